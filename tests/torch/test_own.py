"""A model that checkpoints itself has the memory of its checkpoints as default budget."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import overlapc
from overlapc.profiler.memory import measure_peak


def products_are_kept(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = op == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    def __init__(self, selective: bool = False, p: float = 0.0) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(p), nn.Linear(256, 32))
            for _ in range(6)
        )
        self.blocks = nn.ModuleList(blocks)
        self.options: dict[str, Any] = {"use_reentrant": False}
        if selective:
            contexts = partial(create_selective_checkpoint_contexts, products_are_kept)
            self.options["context_fn"] = contexts

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, **self.options)
        return x.square().mean()


def peaks(model: nn.Module, x: Tensor, **options: Any) -> tuple[int, int, Any]:
    """What a step takes in eager and planned, and the report."""

    def step(run: nn.Module) -> None:
        model.zero_grad()
        run(x).backward()

    planned: Any = overlapc.optimize(model, **options)
    step(planned)
    taken = [min(measure_peak(partial(step, run)) for _ in range(2)) for run in (model, planned)]
    return taken[0], taken[1], planned.graphs[0]


@pytest.mark.parametrize("selective", [False, True])
def test_the_default_budget_is_what_checkpoints_take(selective: bool) -> None:
    eager, planned, report = peaks(Checkpointed(selective), torch.randn(512, 32))
    assert planned <= 1.05 * eager
    assert report.peak_bytes <= report.problem.budget_bytes == pytest.approx(eager, rel=0.15)
    assert report.eager.peak_bytes > (1.2 if selective else 2) * eager


def test_a_baseline_keeps_what_it_keeps() -> None:
    eager, _, report = peaks(Checkpointed(), torch.randn(512, 32), solver="none")
    assert report.plan.solver == "none"
    assert report.peak_bytes > 2 * eager


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_slices_take_what_checkpoints_do_but_for_what_they_drop(p: float) -> None:
    """What slices draw together is not drawn again, so what is dropped is kept."""
    model, x = Checkpointed(p=p), torch.randn(512, 32)
    eager, planned, report = peaks(model, x, slices=2, profile="estimate")
    dropped = 6 * 512 * 256 * (4 + 2) if p else 0  # results, and masks: the batch's and the parts
    assert planned <= 1.1 * (eager + dropped)
    assert planned < 0.9 * report.eager.peak_bytes
