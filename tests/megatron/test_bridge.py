"""The callback for Megatron-Bridge, in a loop that fires events as Bridge's does, and in its own.

The latter needs a checkout of Megatron-Bridge (v0.6.0) in the folder that OVERLAPC_MEGATRON_BRIDGE
names."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import bridge, cpu
from tests.megatron.models import Layout, Trained, set_up, twins
from tests.megatron.test_patch import MERGED_1F1B, QUICK, SHARDED, differences
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

EVENTS = ("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end")
HEURISTIC = {"solver": "heu", "profile": "estimate"}
FIRED = Layout(pp=2, tokens=True, hands_in=True, options=MERGED_1F1B)
LAYOUTS = {
    "pp": Layout(pp=2, ddp=SHARDED),
    "merged": Layout(ranks=4, tp=2, pp=2, tokens=True, ddp=SHARDED, options=MERGED_1F1B),
    "experts": Layout(ep=2, experts=4, layers=1, ddp=SHARDED, merge=False),
}


class Manager:
    """Registers methods that are called like events, as Bridge's `CallbackManager` does."""

    def __init__(self, callback: Any) -> None:
        events = [event for event in EVENTS if hasattr(callback, event)]
        self.registered = {event: getattr(callback, event) for event in events}

    def fire(self, event: str) -> None:
        if event in self.registered:
            self.registered[event](None)


def trained_by(manager: Manager, trained: Trained, steps: int) -> list[dict[str, Any]]:
    manager.fire("on_train_start")
    found = []
    for number in range(steps):
        manager.fire("on_train_step_start")
        found.append(trained.step(number))
        manager.fire("on_train_step_end")
    manager.fire("on_train_end")
    return found


def on_rank(rank: int, ranks: int, version: str, steps: int) -> dict[str, Any]:
    cpu.use(version)
    dist.init_process_group("gloo")
    from overlapc.megatron.bridge import OverlapcCallback

    set_up(FIRED)
    plain, ours = twins(FIRED)
    expected = [plain.step(number) for number in range(steps)]
    callback = OverlapcCallback(**HEURISTIC, **FIRED.options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = trained_by(Manager(callback), ours, steps)
    pairs = zip(expected, found, strict=True)
    return {
        "wrong": [difference for pair in pairs for difference in differences(*pair)],
        "printed": printed.getvalue(),
        "ran": ran(),
    }


def ran() -> list[dict[str, int]]:
    import overlapc.megatron as patched

    assert patched._steps is not None
    return [chunk.ran for chunk in patched._steps.chunks.values()]


@pytest.mark.parametrize(
    ("version", "steps"),
    [
        (QUICK[-1], 3),
        pytest.param(QUICK[-1], 1, marks=pytest.mark.slow),
        pytest.param(QUICK[0], 3, marks=pytest.mark.slow),
    ],
)
def test_the_callback_plans_and_says_so_once(version: str, steps: int) -> None:
    cpu.need(version)
    check(FIRED, run_ranks(on_rank, FIRED.ranks, version, steps), steps)


def in_bridges_loop(rank: int, ranks: int, name: str) -> dict[str, Any]:
    cpu.use(QUICK[-1])
    dist.init_process_group("gloo")
    from overlapc.megatron.bridge import OverlapcCallback

    layout = LAYOUTS[name]
    set_up(layout)
    plain, ours = twins(layout)
    bridge.train(plain, 3, None)
    callback = OverlapcCallback(merge=layout.merge, **HEURISTIC, **layout.options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bridge.train(ours, 3, [callback])
    pairs = zip(plain._parameters(), ours._parameters(), strict=True)
    wrong = [i for i, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    return {"wrong": wrong, "printed": printed.getvalue(), "ran": ran()}


@pytest.mark.slow
@pytest.mark.skipif(
    not (bridge.FOLDER / "training/callbacks.py").is_file(),
    reason="OVERLAPC_MEGATRON_BRIDGE names no checkout of Megatron-Bridge",
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_bridges_own_loop_trains_alike(name: str) -> None:
    cpu.need(QUICK[-1])
    layout = LAYOUTS[name]
    check(layout, run_ranks(in_bridges_loop, layout.ranks, name, timeout_s=200), 3)


def check(layout: Layout, found: list[dict[str, Any]], steps: int) -> None:
    for rank, one in enumerate(found):
        (counts,) = one["ran"]
        assert (one["wrong"], counts["plain"]) == ([], 0)
        assert counts["planned"] == steps * layout.microbatches
        assert (counts["merged"] > 0) == layout.merges
        assert one["printed"].count("overlapc, on rank 0:") == (rank == 0)
    assert found[0]["printed"].count("one microbatch:") == 1  # also where hooks come after step 1
    told_after = min(steps, 2) * layout.microbatches
    assert f"ran: {told_after} planned" in found[0]["printed"]
