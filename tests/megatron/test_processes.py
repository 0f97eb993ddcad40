"""Which ranks' processes have ended, by what the system says and by beats: in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from overlapc.errors import RankError
from overlapc.megatron import processes


class World:
    """Four ranks: 0 and 1 on this machine, 2 and 3 on another one; a clock and a store to turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.store = 0.0, dict[str, Any]()
        monkeypatch.setattr(processes.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(processes.dist, "get_world_size", lambda: 4)
        monkeypatch.setattr(processes.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(processes.Processes, "_present", self.present)
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        machine = json.loads(processes.own_process())[0]
        start = processes._status(self.child.pid)[1]
        self.store["megatron/process/1"] = json.dumps([machine, self.child.pid, start])
        self.store["megatron/process/2"] = json.dumps(["another", 7, "1"])
        self.store["megatron/process/3"] = json.dumps(["another", 8, "1"])
        self.seen = processes.Processes(7.0)

    def present(self, what: str, ranks: list[int]) -> list[Any]:
        if self.store is None:
            raise RankError("no store")
        return [self.store.get(f"{what}/{rank}") for rank in ranks]

    def after(self, seconds: float, *beats: int) -> str | None:
        """What is found when so many seconds have passed and these ranks have sent beats."""
        self.now += seconds
        for rank in beats:
            self.store[f"beat/{rank}"] = str(self.now)
        return self.seen.lost()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = World(monkeypatch)
    yield made
    made.child.kill()
    made.child.communicate()


def test_a_rank_that_is_late_is_not_lost(world: World) -> None:
    assert [world.after(20.0, 2, 3) for _ in range(5)] == [None] * 5  # rank 1 sends no beat at all


def test_a_machine_is_lost_when_all_of_its_ranks_are_silent(world: World) -> None:
    assert world.after(0.0, 2, 3) is None
    assert world.after(9.0, 3) is None  # rank 2 may have blocked its Python
    assert world.after(6.0) is None
    assert "rank 2 gives no sign of life: its process 7 is silent for 8 s" in str(world.after(2.0))


def test_a_process_that_has_ended_is_found_at_once(world: World) -> None:
    assert world.after(0.0, 2, 3) is None
    world.child.kill()
    world.child.wait()
    said = f"rank 1 gives no sign of life: its process {world.child.pid} has ended"
    assert said in str(world.after(0.1, 2, 3))
    world.store = None  # type: ignore[assignment]  # it may end as well
    assert said in str(world.seen.lost())


def test_another_process_with_its_number_is_not_it(world: World) -> None:
    record = json.loads(world.store["megatron/process/1"])
    world.store["megatron/process/1"] = json.dumps([*record[:2], "1"])
    assert "has ended" in str(world.after(0.0, 2, 3))


def test_a_process_that_is_stopped_may_go_on_in_time(world: World) -> None:
    assert world.after(0.0, 2, 3) is None
    os.kill(world.child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, world.child.pid, os.WSTOPPED | os.WNOWAIT)
    assert world.after(6.0, 2, 3) is None
    assert "is stopped" in str(world.after(2.0, 2, 3))
