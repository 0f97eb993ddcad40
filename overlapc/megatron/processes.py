"""`Processes` finds ranks whose processes have ended or stopped while others wait for them.

Before its first step a rank may be late for minutes, and its Python may be blocked as long: it
reads data. So a silent rank is not a dead one. Each patched rank writes where its process runs. For
a process of the same machine the system says whether it runs. The other machines are judged by
beats, which patched ranks send all the time: a machine is lost when all of its ranks are silent.

    megatron/process/<rank>   [machine, process id, start time]
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from overlapc.errors import RankError
from overlapc.runtime.guard import LOOK_S
from overlapc.runtime.line import BEAT_S, line_to, present
from overlapc.runtime.watch import watched

_SILENT_S = 3 * BEAT_S  # a rank that has sent no beat for so long has ended, if a collective failed
_RUNS, _STOPPED, _ENDED = "runs", "is stopped", "has ended"


def own_process() -> str:
    """Where this process runs, for other ranks."""
    number = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux: beats alone tell
        return json.dumps([f"rank {dist.get_rank()}", number, ""])
    return json.dumps([f"{boot} {space}", number, _status(number)[1]])


class Processes:
    """What this rank knows of the processes of the ranks that it watches."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._known: dict[int, tuple[str, int, str]] = {}
        self._beats: dict[int, bytes | None] = {}
        self._signs: dict[int, float] = {}  # when a rank gave its last sign of life
        self._own = ""
        self._asks = True  # the store
        self.begin()

    def begin(self) -> None:
        """Before a step: silence counts from now on."""
        self._signs.clear()

    def lost(self) -> str | None:
        """The first watched rank that has ended, or gives no sign of life for `timeout_s`."""
        return self._lost(self._timeout_s)

    def ended(self, has_store: bool) -> str | None:
        """The same after a collective has failed: wait a little for a rank to be found lost. If the
        store has ended as well, only what is known by now can tell: asking it takes long."""
        self.begin()
        if not has_store:
            self._asks = False
            if not self._known:
                return None
        until = time.monotonic() + _SILENT_S + 2 * BEAT_S
        while (found := self._lost(_SILENT_S)) is None and time.monotonic() < until:
            time.sleep(LOOK_S / 5)
        return found

    def _lost(self, silent_s: float) -> str | None:
        rank = dist.get_rank()
        self._own = self._own or json.loads(own_process())[0]
        others = watched(range(dist.get_world_size()), rank)
        beats: dict[int, bytes | None] = {}
        try:
            if not self._asks:
                raise RankError("the store has ended")
            self._read(others)
            far = [r for r in others if r in self._known and not self._is_near(r)]
            beats = dict(zip(far, self._present("beat", far), strict=True))
        except RankError:
            if not self._known:
                raise
        now = time.monotonic()
        for each, (_, number, start) in self._known.items():
            said = _status(number) if self._is_near(each) else None
            if said is not None and (said[0] == _ENDED or said[1] != start):
                return self._text(each, _ENDED)
            moved = beats.get(each) != self._beats.get(each) if said is None else said[0] == _RUNS
            if moved or each not in self._signs:
                self._signs[each] = now
        self._beats |= beats
        return self._silent(now, silent_s)

    def _silent(self, now: float, silent_s: float) -> str | None:
        for each, (machine, *_) in self._known.items():
            near = self._is_near(each)
            beside = [r for r, (other, *_) in self._known.items() if other == machine and not near]
            last = max(self._signs[r] for r in (each, *beside))
            if now - last > (self._timeout_s if near else silent_s):
                return self._text(each, _STOPPED if near else f"is silent for {now - last:.0f} s")
        return None

    def _text(self, rank: int, what: str) -> str:
        return (
            f"rank {rank} gives no sign of life: its process {self._known[rank][1]} {what}; "
            "expected all ranks to live until training ends: see the output of that rank for why "
            "it ended, and start the run again"
        )

    def _is_near(self, rank: int) -> bool:
        return self._known[rank][0] == self._own

    def _read(self, ranks: list[int]) -> None:
        left = [rank for rank in ranks if rank not in self._known]
        for rank, record in zip(left, self._present("megatron/process", left), strict=True):
            if record is not None:
                self._known[rank] = tuple(json.loads(record))

    def _present(self, what: str, ranks: list[int]) -> list[Any]:
        if not ranks:
            return []
        keys = [f"{what}/{rank}" for rank in ranks]
        line = line_to(_get_default_store(), dist.get_rank())
        return line.call(lambda store: present(store, keys), self._timeout_s)


def _status(number: int) -> tuple[str, str]:
    """Whether a process of this machine runs, and when it began."""
    try:
        said = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _ENDED, ""
    state = {"Z": _ENDED, "X": _ENDED, "T": _STOPPED}.get(said[0], _RUNS)
    return state, said[19]
