"""What one rank alone does, or leaves undone, is named on the others in time."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc.core.errors import OptionError, RankError
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up, twins, two_steps
from tests.megatron.test_patch import differences
from tests.multiprocess.mortal import DEAD, caught, launch
from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

PROMISED_S = 10.0
VERSION = "0.16.1"
QUICKLY: dict[str, Any] = {"solver": "none", "profile": "estimate"}
LAYOUTS = {"tp": Layout(tp=2), "pp": Layout(pp=2), "dp": Layout(), "plain dp": Layout(ddp=None)}
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def megatron() -> None:
    cpu.need(VERSION)


def begun(layout: Layout) -> Trained:
    torch.set_num_threads(1)
    cpu.use(VERSION)
    set_up(layout)
    return Trained(layout)


# Ranks that are not patched


def unpatched(name: str, left: str, how: str, rank: int) -> Any:
    """One of two ranks, the `left` one, is not patched; what it and the other have of a step."""
    trained = begun(LAYOUTS[name])
    import overlapc.megatron as patched

    if str(rank) != left or how == "unpatched":
        patched.patch(**QUICKLY)
    if str(rank) == left and how == "unpatched":
        patched.unpatch()
    if str(rank) == left and how == "refused":
        with pytest.raises(OptionError):
            patched.patch(solver="none such")
    dist.barrier()
    found = caught(lambda: trained.step(0))
    dist.barrier()  # rank 0 has the store
    return found


@pytest.mark.parametrize(
    ("name", "left", "how", "says"),
    [
        ("tp", "1", "never", "it never called overlapc.megatron.patch()"),
        pytest.param("pp", "1", "never", "it never called", marks=SLOW),
        pytest.param("dp", "1", "never", "it never called", marks=SLOW),
        pytest.param("tp", "0", "never", "it never called", marks=SLOW),
        pytest.param("tp", "0", "unpatched", "it called overlapc.megatron.unpatch()", marks=SLOW),
        ("tp", "1", "refused", "its overlapc.megatron.patch() raised OptionError: solver="),
    ],
)
def test_a_rank_that_is_not_patched_is_named(name: str, left: str, how: str, says: str) -> None:
    found = launch(functools.partial(unpatched, name, left, how), 2)
    kind, text, took_s, _ = found[1 - int(left)]
    assert kind == RankError.__name__, text
    assert f"rank {left}: {says}" in text
    assert took_s <= PROMISED_S
    assert found[int(left)][0] == ""  # it ran plain Megatron, and so did the other


def late(rank: int, ranks: int, name: str, early: bool, blocked: bool = False) -> dict[str, Any]:
    """Two steps; rank 1 comes late to the first one, patched `early` or no earlier than that, or
    with its Python `blocked`."""
    cpu.use(VERSION)
    import overlapc.megatron as patched

    asked = QUICKLY
    if early:
        patched.patch(**asked)
    dist.init_process_group("gloo")
    layout = LAYOUTS[name]
    set_up(layout)
    plain, ours = twins(layout)
    if blocked and rank:
        sum(range(7 * 10**8))  # one call, so no other thread runs
    else:
        time.sleep(11.0 * rank)
    if not early:
        patched.patch(**asked)
    found, told, chunk = two_steps(ours)
    expected = [plain.step(number) for number in range(2)]
    dist.barrier()
    return {
        "wrong": [d for pair in zip(expected, found, strict=True) for d in differences(*pair)],
        "told": [text for text in told if "overlapc" in text],
        "ran": chunk.ran["planned"] // layout.microbatches,
    }


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "name", ["tp", *(pytest.param(n, marks=SLOW) for n in ("pp", "dp", "plain dp"))]
)
def test_a_rank_that_is_late_is_waited_for_or_one_step_is_plain(name: str, early: bool) -> None:
    """A patched rank's word is there, so the other waits. Without a word nobody does: the first
    step is Megatron's, on both."""
    for found in run_ranks(late, 2, name, early, timeout_s=100):
        assert found["wrong"] == []
        assert found["ran"] == 1 + early
        if early:
            assert found["told"] == []
        else:
            (told,) = found["told"]
            assert "overlapc ran a step as plain Megatron, and plans the next one: 7 s" in told


@SLOW
def test_a_rank_whose_python_is_blocked_is_waited_for() -> None:
    for found in run_ranks(late, 2, "tp", True, True, timeout_s=120):
        assert (found["wrong"], found["told"], found["ran"]) == ([], [], 2)


def unpatched_replica(rank: int) -> Any:
    """Rank 1 is not patched, and only the script's own collective joins the replicas."""
    trained = begun(LAYOUTS["plain dp"])
    import overlapc.megatron as patched

    if rank == 0:
        patched.patch(**QUICKLY)

    def steps() -> None:
        for number in range(2):
            trained.step(number)
            dist.all_reduce(torch.ones(1))

    return caught(steps)


def test_a_replica_that_is_not_patched_is_named_when_a_collective_has_joined_it() -> None:
    found = launch(unpatched_replica, 2)[0]
    assert found[0] == RankError.__name__, found[1]
    assert "rank 1: it never called overlapc.megatron.patch()" in found[1]
    assert found[2] <= PROMISED_S


# Errors of one rank


class Raising:
    """A forward step that raises in one microbatch."""

    def __init__(self, real: Any, step: int) -> None:
        self.real, self.left = real, step * 4 + 2

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ValueError("no such token: 65")
        return self.real(*args)


def raising(name: str, who: int, step: int, rank: int) -> Any:
    trained = begun(LAYOUTS[name])
    import overlapc.megatron as patched

    if rank == who:
        given, raises = trained._given, Raising(None, step)

        def changed(number: int) -> dict[str, Any]:
            real = given(number)
            raises.real = real["forward_step_func"]
            return {**real, "forward_step_func": raises}

        trained._given = changed  # type: ignore[method-assign]
    patched.patch(**QUICKLY)
    dist.barrier()
    return caught(lambda: [trained.step(number) for number in range(step + 1)])


@pytest.mark.parametrize(
    ("name", "who", "step"),
    [
        ("tp", 1, 0),
        pytest.param("tp", 0, 0, marks=SLOW),  # it has the store
        pytest.param("tp", 1, 1, marks=SLOW),
        ("pp", 1, 1),
        pytest.param("pp", 1, 0, marks=SLOW),
        pytest.param("pp", 0, 0, marks=SLOW),
        pytest.param("dp", 1, 0, marks=SLOW),
        pytest.param("dp", 1, 1, marks=SLOW),
    ],
)
def test_what_one_rank_raises_is_named_on_the_other(name: str, who: int, step: int) -> None:
    found = launch(functools.partial(raising, name, who, step), 2)
    assert found[who][:2] == ("ValueError", "no such token: 65")
    kind, text, _, when = found[1 - who]
    assert kind == RankError.__name__, text
    assert text.startswith(f"rank {who} raised ValueError: no such token: 65; expected"), text
    assert when - found[who][3] <= PROMISED_S


def failing_early(rank: int) -> Any:
    """One rank's model breaks before ranks have exchanged anything."""
    trained = begun(LAYOUTS["tp"])
    import overlapc.megatron as patched
    from overlapc.megatron import steps

    if rank == 1:

        def reason(model: Any) -> str:
            raise AttributeError("no config")

        steps.reason = reason
    patched.patch(**QUICKLY)
    dist.barrier()
    return caught(lambda: trained.step(0))


def test_an_error_before_ranks_exchange_anything_is_named() -> None:
    found, own = launch(failing_early, 2)
    assert own[:2] == ("AttributeError", "no config")
    assert found[0] == RankError.__name__, found[1]
    assert found[1].startswith("rank 1 raised AttributeError: no config")
    assert found[2] <= PROMISED_S


def dying(when: str, stamp: str, rank: int) -> Any:
    """Rank 1 ends: before it calls patch or behind it, within a step, a later one, or while links
    are measured."""
    trained = begun(LAYOUTS["tp"])
    import overlapc.megatron as patched
    from overlapc.profiler import measure
    from overlapc.ranks import presence
    from overlapc.ranks.roll import _board, are_all_patched

    ends: list[int] = []

    def end(*_: Any, **__: Any) -> Any:
        ends.append(1)
        if when == "within a later step" and len(ends) < 6:
            return real(*_, **__)
        Path(stamp).write_text(str(time.monotonic()))
        if when == "within a step":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and when == "before patch":
        end()
    if rank == 1 and "within" in when:
        given = trained._given
        real, step = given(0)["forward_step_func"], {"forward_step_func": end}
        trained._given = lambda number: {**given(number), **step}  # type: ignore[method-assign]
    if rank == 1 and when == "while links are measured":
        measure.measure_links = end
    if rank == 1 and when == "behind patch":  # its word must not come before it can be found
        address = presence._own_address
        presence._own_address = lambda toward: time.sleep(1.0) or address(toward)
    patched.patch(solver="none")
    if when == "behind patch":
        while not _board().call(are_all_patched, 5.0):  # a word takes a moment to the store
            time.sleep(0.05)
        dist.barrier()
        if rank == 1:
            end()
    return caught(lambda: [trained.step(number) for number in range(2)])


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("before patch", "rank 1: it never called overlapc.megatron.patch()"),
        ("behind patch", "rank 1 is gone: its process"),
        pytest.param("within a later step", "rank 1 is gone", marks=SLOW),
        ("within a step", "rank 1 raised SystemExit: 3"),
        ("while links are measured", "rank 1 is gone"),
    ],
)
def test_a_rank_that_ends_is_named(tmp_path: Path, when: str, says: str) -> None:
    stamp = tmp_path / "ended"
    found, own = launch(functools.partial(dying, when, str(stamp)), 2)
    assert own == DEAD
    kind, text, took_s, at = found
    assert kind == RankError.__name__, text
    assert says in text
    assert min(took_s, at - float(stamp.read_text())) <= PROMISED_S


def again(what: str, name: str, rank: int) -> Any:
    """Rank 1 alone calls `patch` again, or `unpatch`, between two steps."""
    trained = begun(LAYOUTS[name])
    import overlapc.megatron as patched

    patched.patch(**QUICKLY)
    trained.step(0)
    dist.barrier()
    if rank == 1 and what == "patch":
        patched.patch(**QUICKLY)
    if rank == 1 and what == "unpatch":
        patched.unpatch()
    dist.barrier()
    return caught(lambda: [trained.step(number) for number in (1, 2)])


def test_a_rank_that_alone_is_patched_again_is_named() -> None:
    for found in launch(functools.partial(again, "patch", "tp"), 2):
        assert found[0] == RankError.__name__, found[1]
        assert found[1].startswith("rank 0 runs step 2 by the plans that it has, and rank 1 plans")
        assert found[2] <= PROMISED_S


def test_a_rank_that_alone_calls_unpatch_is_named() -> None:
    found = launch(functools.partial(again, "unpatch", "plain dp"), 2)[0]
    assert found[0] == RankError.__name__, found[1]
    assert "rank 1: it called overlapc.megatron.unpatch()" in found[1]
    assert found[2] <= PROMISED_S


# What is left behind


def remains(rank: int, ranks: int) -> list[str]:
    cpu.use(VERSION)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from overlapc.megatron.seams import NAMES

    functions = [getattr(schedules, name) for name in NAMES]
    functions.append(parallel_state.initialize_model_parallel)

    def state() -> list[Any]:
        held = ("__code__", "__defaults__", "__kwdefaults__")
        return [[*(getattr(f, name) for name in held), dict(vars(f))] for f in functions]

    before, wrong = state(), []
    patched.patch(**QUICKLY)
    if any(one == other for one, other in zip(before, state(), strict=True)):
        wrong.append("a function was not patched")
    first = state()
    with pytest.raises(OptionError):
        patched.patch(solver="none such")
    if state() != first:
        wrong.append("a patch that raised has changed something")
    patched.patch(**QUICKLY)
    patched.unpatch()
    if state() != before:
        wrong.append("unpatch has left something")
    with pytest.raises(OptionError):
        patched.patch(solver="none such")
    if state() != before or patched.explain() != "overlapc.megatron: not patched":
        wrong.append("a patch that raised has left something")
    patched.patch(**QUICKLY)
    set_up(Layout(ranks=1))  # Megatron's process groups, by positional arguments or by name
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 1)
    patched.unpatch()
    return wrong


def test_unpatch_leaves_nothing_behind() -> None:
    assert run_ranks(remains, 1) == [[]]
