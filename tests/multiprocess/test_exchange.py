"""Ranks agree, or every rank that lives raises RankError in time: real processes over loopback."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from overlapc.core.errors import Infeasible, OptionError, RankError
from overlapc.ranks.board import attend, board_of
from overlapc.ranks.exchange import Exchange, busy
from tests.multiprocess.mortal import DEAD, caught, launch
from tests.multiprocess.spawn import free_port

pytestmark = pytest.mark.multiprocess

BAR_S = 10.0  # what is promised: an error on every rank within 10 s
HINT = "use one model"


# Many rounds in the same three processes, so that each also shows that failed ones do no harm.


def _agreement(rank: int) -> Any:
    with Exchange([0, 1, 2]) as exchange:
        exchange.agree("trace", "8c1f", HINT)
        parts = exchange.gather("times", b"%d\n" % rank * rank)
        text = exchange.broadcast("plan", lambda: f"plan of rank {rank}")
    dist.barrier()
    return parts, text


def _disagreement(rank: int) -> Any:
    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            exchange.agree("trace", "02ab" if rank == 1 else "8c1f", HINT)

    return caught(go)


def _long_disagreement(rank: int) -> Any:
    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            exchange.agree("options", f"{rank}" * 1000, HINT)

    return caught(go)


def _follower_raises(rank: int) -> Any:
    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            exchange.agree("trace", "8c1f", HINT)
            if rank == 1:
                raise ValueError("odd shape")
            exchange.broadcast("plan", lambda: time.sleep(30) or "late")

    return caught(go)


def _last_moment(rank: int) -> Any:
    """After the last call a rank finds the plan unusable: nobody may go on with it."""

    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            exchange.broadcast("plan", lambda: "plan")
            if rank == 2:
                raise ValueError("cannot parse")

    return caught(go)


def _leader_raises(rank: int) -> Any:
    def solve() -> str:
        raise Infeasible(10, 20)

    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            if rank == 2:
                time.sleep(1)  # the leader does not wait for the late to say that it failed
            exchange.broadcast("plan", solve)

    return caught(go)


def _other_step(rank: int) -> Any:
    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            if rank == 1:
                exchange.agree("costs", "1", HINT)
            exchange.agree("trace", "1", HINT)

    return caught(go)


def _crossed_groups(rank: int) -> Any:
    def go() -> None:
        with Exchange([0, 1] if rank == 0 else [1, 0]) as exchange:
            exchange.agree("trace", "1", HINT)

    return caught(go) if rank < 2 else None


def _one_is_late(rank: int) -> Any:
    if rank == 2:
        time.sleep(12)
    with Exchange([0, 1, 2]) as exchange:
        exchange.agree("trace", "1", HINT)
    return True


def _one_is_too_late(rank: int) -> Any:
    if rank == 2:
        time.sleep(4)

    def go() -> None:
        with Exchange([0, 1, 2], timeout_s=2) as exchange:
            exchange.agree("trace", "1", HINT)

    return caught(go)


def _one_holds_the_gil(rank: int) -> Any:
    if rank == 2:
        ctypes.PyDLL(None).sleep(9)  # a PyDLL keeps the GIL
    with Exchange([0, 1, 2]) as exchange:
        exchange.agree("trace", "1", HINT)
    return True


def _one_waits_in_a_barrier(rank: int) -> Any:
    """The barrier ends when the others come to it, too."""

    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            exchange.agree("trace", "1", HINT)

    result = caught(go) if rank != 2 else None
    dist.barrier()
    # The next round of these ranks is the one that rank 2 left out.
    return result if rank != 2 else caught(go)


def _one_has_raised(rank: int) -> Any:
    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            exchange.agree("trace", "1", HINT)

    def call() -> None:
        with busy("tracing"):
            if rank == 2:
                raise ValueError("odd shape")
            go()

    result = caught(call)
    if rank == 2:
        time.sleep(8)  # it goes on without planning
    dist.barrier()
    return result if rank != 2 else caught(go)


def _large_text(rank: int) -> Any:
    text = random.Random(0).randbytes(10_000_000).decode("latin-1")
    with Exchange([0, 1, 2]) as exchange:
        return exchange.broadcast("plan", lambda: text) == text


def _hundred_rounds(rank: int) -> Any:
    keys = []
    for number in range(100):
        # Every few rounds fails: what it leaves behind must go too.
        with contextlib.suppress(RankError), Exchange([0, 1, 2]) as exchange:
            exchange.agree("number", str(number), HINT)
            assert exchange.broadcast("plan", lambda n=number: f"plan {n}") == f"plan {number}"
            if number % 20 == 7:
                raise RankError("on purpose")
        if number in (19, 99):
            with Exchange([0, 1, 2]) as exchange:
                exchange.agree("count", "", HINT)
                keys.append(_get_default_store().num_keys())
    return keys


def _slow_tracing(rank: int) -> Any:
    with busy("tracing"):
        time.sleep(5 if rank == 2 else 0)
        with Exchange([0, 1, 2]) as exchange:
            exchange.agree("trace", "1", HINT)
    return True


def _limit(rank: int) -> Any:
    def go() -> None:
        with busy("tracing"):
            time.sleep(4 if rank == 2 else 0)
            with Exchange([0, 1, 2], timeout_s=3) as exchange:
                exchange.agree("trace", "1", HINT)

    return caught(go)


SCENARIOS = [
    _agreement,
    _disagreement,
    _long_disagreement,
    _follower_raises,
    _last_moment,
    _leader_raises,
    _other_step,
    _crossed_groups,
    _one_is_late,
    _one_is_too_late,
    _one_holds_the_gil,
    _one_waits_in_a_barrier,
    _one_has_raised,
    _large_text,
    _hundred_rounds,
    _slow_tracing,
    _limit,
]


def _all_scenarios(rank: int) -> dict[str, Any]:
    results = {}
    for scenario in SCENARIOS:
        dist.barrier()
        results[scenario.__name__] = scenario(rank)
    dist.barrier()  # rank 0 holds the store: it may not end before the others
    return results


@pytest.fixture(scope="module")
def run() -> Callable[[Callable[[int], Any]], list[Any]]:
    """The results of a scenario, by rank."""
    ranks = launch(_all_scenarios, 3, timeout_s=150)
    return lambda scenario: [results[scenario.__name__] for results in ranks]


def test_ranks_that_agree(run: Any) -> None:
    everywhere = ([b"", b"1\n", b"2\n2\n"], "plan of rank 0")
    assert run(_agreement) == [everywhere] * 3


def test_disagreement_is_told_on_every_rank(run: Any) -> None:
    for kind, text, took_s, _ in run(_disagreement):
        assert kind == "RankError"
        assert text == (
            "the ranks disagree on trace: ranks 0, 2 hold 8c1f; rank 1 holds 02ab; "
            "expected one value on ranks 0, 1, 2: use one model"
        )
        assert took_s < BAR_S


def test_long_values_are_named_by_digest(run: Any) -> None:
    for kind, text, _, _ in run(_long_disagreement):
        assert kind == "RankError"
        assert len(text) < 250


def test_a_rank_that_raises_is_seen_at_once(run: Any) -> None:
    results = run(_follower_raises)
    assert results[1][:2] == ("ValueError", "odd shape")
    for rank in (0, 2):
        kind, text, took_s, _ = results[rank]
        assert kind == "RankError"
        assert "rank 1 failed while planning" in text
        assert "ValueError: odd shape" in text
        assert took_s < BAR_S


def test_a_rank_that_raises_last_stops_all(run: Any) -> None:
    results = run(_last_moment)
    assert [kind for kind, *_ in results] == ["RankError", "RankError", "ValueError"]
    assert all("rank 2 failed" in text for _, text, _, _ in results[:2])


def test_a_leader_that_cannot_solve(run: Any) -> None:
    results = run(_leader_raises)
    assert [kind for kind, *_ in results] == ["Infeasible", "RankError", "RankError"]
    for _, text, took_s, _ in results[1:]:
        assert "rank 0 failed" in text
        assert "memory_budget=20" in text
        assert took_s < BAR_S
    assert results[0][2] < results[2][2]  # it does not wait for rank 2's second


def test_ranks_at_different_steps(run: Any) -> None:
    for kind, text, took_s, _ in run(_other_step):
        assert kind == "RankError"
        assert "'trace'" in text
        assert "'costs'" in text
        assert took_s < BAR_S


def test_groups_that_wait_for_each_other(run: Any) -> None:
    results = run(_crossed_groups)[:2]
    for kind, _, took_s, _ in results:
        assert kind == "RankError"
        assert took_s < BAR_S
    # The second to notice may find the first already gone.
    assert any("wait for each other" in text for _, text, _, _ in results)


def test_a_late_rank_is_waited_for(run: Any) -> None:
    assert run(_one_is_late) == [True] * 3
    assert run(_one_holds_the_gil) == [True] * 3


def test_a_rank_that_is_later_than_the_timeout(run: Any) -> None:
    results = run(_one_is_too_late)
    for kind, text, _, _ in results:
        assert kind == "RankError"
        assert "rank 2 did not come in 2 s" in text
        assert "give a longer timeout_s" in text
    assert results[2][2] < BAR_S  # it comes late, and is told at once


def test_a_rank_that_waits_elsewhere_for_the_others(run: Any) -> None:
    for kind, text, took_s, _ in run(_one_waits_in_a_barrier):
        assert kind == "RankError"
        assert "rank 2 is not planning: it waits in barrier" in text
        assert "test_exchange.py" in text
        assert took_s < BAR_S


def test_a_rank_that_raised_before_the_round(run: Any) -> None:
    results = run(_one_has_raised)
    for kind, text, took_s, _ in results:
        assert kind == "RankError"
        assert "rank 2 has raised ValueError: odd shape" in text
        assert took_s < BAR_S


def test_texts_of_ten_megabytes(run: Any) -> None:
    assert run(_large_text) == [True] * 3


def test_a_hundred_rounds_leave_no_keys(run: Any) -> None:
    for early, late in run(_hundred_rounds):
        assert late <= early + 2


def test_a_slow_rank_is_waited_for(run: Any) -> None:
    assert run(_slow_tracing) == [True] * 3


def test_nothing_waits_for_ever(run: Any) -> None:
    for kind, text, _, _ in run(_limit):
        assert kind == "RankError"
        assert "rank 2 did not come" in text
        assert "(tracing, test_exchange.py" in text


# Deaths


def _die(how: signal.Signals, after_s: float, stamp: str) -> None:
    def go() -> None:
        time.sleep(after_s)
        Path(stamp).write_text(str(time.monotonic()))
        os.kill(os.getpid(), how)

    threading.Thread(target=go, daemon=True).start()


def _planning_with_a_death(
    ranks: list[int], victim: int, how: signal.Signals, stamp: str, rank: int
) -> Any:
    def go() -> None:
        with Exchange(ranks) as exchange:
            exchange.agree("trace", "1", HINT)
            if rank == victim:
                _die(how, 1.0, stamp)
            exchange.broadcast("plan", lambda: time.sleep(40) or "too late")

    return caught(go)


@pytest.mark.parametrize(
    ("leader", "victim", "how", "says"),
    [
        (0, 1, "SIGKILL", "rank 1 is gone: its process has ended"),
        (1, 1, "SIGKILL", "rank 1 is gone: its process has ended"),
        (0, 0, "SIGKILL", "rank 0"),
        (1, 0, "SIGKILL", "rank 0"),
    ],
    ids=["follower", "leader", "leader hosting the store", "store host"],
)
def test_a_rank_dies_while_the_leader_solves(
    tmp_path: Path, leader: int, victim: int, how: str, says: str
) -> None:
    stamp = tmp_path / "died"
    ranks = [leader, *(rank for rank in range(3) if rank != leader)]
    scenario = functools.partial(
        _planning_with_a_death, ranks, victim, signal.Signals[how], str(stamp)
    )
    results = launch(scenario, 3)
    assert results.pop(victim) == DEAD
    for kind, text, _, when in results:
        assert kind == "RankError", text
        assert says in text
        assert when - float(stamp.read_text()) < BAR_S


def _one_never_comes(rank: int) -> Any:
    attend()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go() -> None:
        with Exchange([0, 1, 2]) as exchange:
            exchange.agree("trace", "1", HINT)

    return caught(go)


def test_a_missing_rank() -> None:
    results = launch(_one_never_comes, 3)
    assert results.pop(1) == DEAD
    for kind, text, took_s, _ in results:
        assert kind == "RankError"
        assert "rank 1 is gone: its process has ended" in text
        assert took_s < BAR_S


# Other ways to run


def _two_groups(rank: int) -> Any:
    ranks = [0, 2] if rank in (0, 2) else [3, 1]
    texts = []
    for number in range(20):
        with Exchange(ranks) as exchange:
            texts.append(exchange.broadcast("plan", lambda n=number: f"{ranks} {n}"))

    def go() -> None:
        with Exchange(ranks) as exchange:
            exchange.agree("trace", str(rank == 1), HINT)

    kind = caught(go)[0]
    dist.barrier()  # rank 0 holds the store: it may not end before the others
    return texts[-1], kind


def test_disjoint_groups_at_once() -> None:
    # One group's failure is not the other's.
    first, second = ("[0, 2] 19", ""), ("[3, 1] 19", "RankError")
    assert launch(_two_groups, 4) == [first, second, first, second]


def test_over_a_file_store(tmp_path: Path) -> None:
    everywhere = ([b"", b"1\n", b"2\n2\n"], "plan of rank 0")
    assert launch(_agreement, 3, init=f"file://{tmp_path}/store") == [everywhere] * 3


def _again_on_the_same_port(init: str, met: Path, rank: int) -> Any:
    for turn in range(2):
        with Exchange([0, 1]) as exchange:
            exchange.agree("trace", "1", HINT)
        # Nobody may still be talking to the store, and nobody may keep it.
        dist.barrier()
        dist.destroy_process_group()
        # The other may be slow to let go, and its store would be met again.
        (met / f"{turn}-{rank}").touch()
        until = time.monotonic() + 60
        while not (met / f"{turn}-{1 - rank}").exists():
            assert time.monotonic() < until, "the other rank did not let go of its store in 60 s"
            time.sleep(0.05)
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    dist.barrier()  # rank 0 holds the store: it may not end before the other has joined
    return threading.active_count()


def test_the_store_ends_with_its_process_group(tmp_path: Path) -> None:
    init = f"tcp://127.0.0.1:{free_port()}"
    again = functools.partial(_again_on_the_same_port, init, tmp_path)
    assert launch(again, 2, init=init) == [1, 1]


def test_a_store_that_has_ended_is_not_waited_for_again() -> None:
    place = "127.0.0.1", free_port()
    host = dist.TCPStore(*place, is_master=True, wait_for_workers=False)
    store = dist.TCPStore(*place)
    board_of(store, 1, [1]).put("key", "value")
    del host
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(RankError, match="holds it"):
            board_of(store, 1, [1]).look(["key"])
        assert time.monotonic() - begun < BAR_S / 2


def _slow_leader(rank: int) -> Any:
    with Exchange([0, 1]) as exchange:
        text = exchange.broadcast("plan", lambda: time.sleep(15) or "plan")
    dist.barrier()
    return text


@pytest.mark.slow
def test_a_slow_leader_is_waited_for() -> None:
    assert launch(_slow_leader, 2) == ["plan", "plan"]


def test_one_rank_needs_no_store() -> None:
    with busy("tracing"), Exchange([0]) as exchange:
        exchange.agree("trace", "1", HINT)
        assert exchange.gather("times", b"1") == [b"1"]
        assert exchange.broadcast("plan", lambda: "plan") == "plan"


def test_the_fake_backend_has_no_peers() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    try:
        with busy("tracing"), Exchange(range(8)) as exchange:
            assert exchange.broadcast("plan", lambda: "plan") == "plan"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "options", [{"ranks": [1]}, {"ranks": [0, 0]}, {"ranks": [0], "timeout_s": 0}]
)
def test_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="expected"):
        Exchange(**options)
