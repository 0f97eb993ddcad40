"""Stages of pipelines in slices: gradients are those of plain accumulation over slices, bit by bit,
and what slices are refused for is an error on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc.nn.layers import total, whole
from overlapc.runtime.pipeline import Pipeline
from overlapc.solvers.pipeline.schedules import make_schedule
from tests.multiprocess.mortal import caught
from tests.multiprocess.spawn import run_ranks
from tests.multiprocess.test_pipeline import ROWS, WIDTH, ExpertStage, Stage, loss, make
from tests.slow import slow_hardware

pytestmark = pytest.mark.multiprocess

COUNT = 3  # microbatches


def batches(rows: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, 12, (2, COUNT, rows, ROWS), generator=generator)
    return list(drawn[0]), list(drawn[1])


def accumulated(stages: Sequence[nn.Module], slices: int, states: list[Tensor]) -> list[Tensor]:
    """Plain accumulation over slices in one process, each stage with random numbers of its own."""
    losses = []
    for given, targets in zip(*batches(), strict=True):
        found = torch.zeros(())
        for x, target in zip(given.chunk(slices), targets.chunk(slices), strict=True):
            for number, stage in enumerate(stages):
                torch.set_rng_state(states[number])
                x = stage(x)
                states[number] = torch.get_rng_state()
            part = loss(x, target) / slices
            part.backward()
            found = found + part.detach()
        losses.append(found)
    return losses


def states_of(stages: int) -> list[Tensor]:
    return [torch.Generator().manual_seed(100 + number).get_state() for number in range(stages)]


class Fours(Stage):
    """A stage that takes only the whole microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 4:
            raise ValueError("four rows")
        return super().forward(x)


class Centred(nn.Module):
    """A stage that takes the mean over its batch away: of all slices, if it `asks` for that."""

    def __init__(self, number: int, asks: bool) -> None:
        super().__init__()
        self.inner, self.asks = make(number, 1, 0.0), asks

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        mean = total(x.sum(0)) / whole(len(x)) if self.asks else x.mean(0)
        return x - mean


def apart(ours: nn.Module, theirs: nn.Module) -> float:
    """How far gradients are apart, relative to the largest number of all."""
    pairs = [(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    largest = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


def on_rank(rank: int, ranks: int, cases: list[tuple[str, str, str]]) -> list[Any]:
    dist.init_process_group("gloo")
    found = []
    for name, kind, solver in cases:
        schedule = make_schedule(name, ranks, COUNT)
        last = schedule.stages - 1

        def made(number: int, last: int = last, kind: str = kind) -> nn.Module:
            dropout = 0.2 if kind == "dropout" else 0.0
            return Centred(number, True) if kind == "total" else make(number, last, dropout)

        mine = {s: made(s) for s, r in schedule.rank_of.items() if r == rank}
        how: dict[str, Any] = {"solver": solver, "memory_budget": "1GB", "profile": "estimate"}
        how["place"] = name != "zero-bubble"  # else they might be put together again
        pipeline = Pipeline(mine, schedule, COUNT, loss if last in mine else None, slices=2, **how)
        every = [made(s) for s in range(last + 1)]
        expected, losses = [], []
        for _ in range(2):  # the second adds to what the first left
            torch.manual_seed(100 + rank)
            losses += pipeline(*batches())
            expected += accumulated(every, 2 if kind == "plain" else 1, states_of(last + 1))
        wrong = 0.0
        for stage, module in mine.items():
            wrong = max(wrong, apart(module, every[stage]))
        if last in mine:
            pairs = zip(losses, expected, strict=True)
            wrong = max(wrong, *(float((a - b).abs()) for a, b in pairs))
        kinds = {action.kind for step in pipeline.schedule.rows[rank] for action in step}
        again = sum(len(r.plan.recomputed) for r in pipeline.reports.values())
        assert {report.slices for report in pipeline.reports.values()} == {2}
        assert not any(stage.states for stage in pipeline._stages.values())
        assert "along dimension 0" in pipeline.explain() or last in mine
        found.append((wrong, "".join(sorted(kinds)), again > 0))
    dist.barrier()
    dist.destroy_process_group()
    return found


QUICK = [("1f1b", "plain", "full"), ("zero-bubble", "total", "none")]
ALL = [
    ("1f1b", "dropout", "full"),
    ("merged", "plain", "full"),
    ("zero-bubble-v", "plain", "full"),
    ("zero-bubble", "plain", "full"),
    ("zero-bubble", "dropout", "full"),
]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)])
def test_gradients_are_those_of_accumulation_over_slices(cases: list[Any]) -> None:
    """What asks for the whole microbatch, or draws, is the uncut microbatch's to rounding."""
    for seen in run_ranks(on_rank, 2, cases, timeout_s=280):
        for (name, kind, solver), (wrong, kinds, again) in zip(cases, seen, strict=True):
            assert wrong <= (0.0 if kind == "plain" else 2e-6), (name, kind)
            assert again == (solver == "full")
            assert name != "zero-bubble" or kinds == "FIW"


def in_two_dimensions(rank: int, ranks: int, kind: str, slices: Any, hardware: str) -> Any:
    """Two stages, each over two ranks: tensor parallel, or experts and other data on each."""
    dist.init_process_group("gloo")
    across = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    along = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = rank // 2

    def made() -> nn.Module:
        torch.manual_seed(70 + stage)
        group = across[stage]
        return ExpertStage(stage, group) if kind == "ep" else make(stage, 1, 0.0, group)

    module, twin = made(), made()
    given, targets = batches(32)
    if kind == "ep" and rank % 2:
        given, targets = given[::-1], targets[::-1]
    pipeline = Pipeline(
        {stage: module},
        "1f1b",
        COUNT,
        loss if stage else None,
        group=along[rank % 2],
        solver="heu",
        memory_budget="1GB",
        profile="estimate",
        hardware=hardware,
        slices=slices,
    )
    pipeline(given, targets)
    report = pipeline.reports[stage]
    by_hand(twin, stage, along[rank % 2], 1 if slices == "auto" else slices, given, targets)
    wrong = apart(module, twin)
    dist.barrier()
    dist.destroy_process_group()
    hidden = report.timeline.exposed_ns < report.eager.exposed_ns
    return wrong, report.slices, hidden, pipeline.explain()


def by_hand(
    stage: nn.Module,
    number: int,
    group: Any,
    slices: int,
    given: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> None:
    """Plain accumulation over slices: activations and gradients through the pipeline's group."""
    for x, target in zip(given, targets, strict=True):
        for part, wanted in zip(x.chunk(slices), target.chunk(slices), strict=True):
            if number == 0:
                out = stage(part)
                dist.send(out.detach(), group=group, group_dst=1)
                grad = torch.empty_like(out)
                dist.recv(grad, group=group, group_src=1)
                out.backward(grad)
                continue
            came = torch.empty(len(part), ROWS, WIDTH)
            dist.recv(came, group=group, group_src=0)
            came.requires_grad_()
            (loss(stage(came), wanted) / slices).backward()
            dist.send(came.grad, group=group, group_dst=0)


@pytest.mark.parametrize(
    ("kind", "slices"),
    [
        ("tp", 2),
        pytest.param("ep", 2, marks=pytest.mark.slow),
        pytest.param("ep", "auto", marks=pytest.mark.slow),
    ],
)
def test_slices_of_stages_over_several_ranks(kind: str, slices: Any, tmp_path: Path) -> None:
    hardware = slow_hardware(tmp_path)
    everyone = run_ranks(in_two_dimensions, 4, kind, slices, hardware, timeout_s=280)
    assert everyone[0][1] == everyone[1][1]
    assert everyone[2][1] == everyone[3][1]
    for wrong, count, hidden, said in everyone:
        assert wrong <= (2e-6 if slices == "auto" else 0.0)
        if slices == "auto":
            took = re.findall(r"(\d) slices: ([\d.]+) ms a microbatch, predicted", said)
            assert [number for number, _ in took] == ["1", "2", "4"]
            assert count in (1, int(min(took, key=lambda each: float(each[1]))[0]))
        else:
            assert count == 2
            assert hidden


def refused(rank: int, ranks: int) -> list[str]:
    dist.init_process_group("gloo")
    module = make(0, 1, 0.0) if rank == 0 else Centred(1, False)
    end: Callable[..., Tensor] | None = loss if rank else None
    how: Any = {"profile": "estimate"}
    pipeline = Pipeline({rank: module}, "1f1b", COUNT, end, slices=2, **how)
    found = [caught(lambda: pipeline(*batches()))[1]]
    mixed = Pipeline({rank: module}, "1f1b", COUNT, end, slices={rank: 2 - rank}, **how)
    mixed(*batches())  # only the first stage is cut
    found.append(str(mixed.reports[rank].slices))
    fours = Fours(0, 1, 0.0) if rank == 0 else make(1, 1, 0.0)
    pipeline = Pipeline({rank: fours}, "1f1b", COUNT, end, slices=2, **how)
    found.append(caught(lambda: pipeline(*batches()))[1])
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_stage_that_sees_the_whole_microbatch_is_refused_on_every_rank() -> None:
    first, second = run_ranks(refused, 2, timeout_s=120)
    for sees, _, fails in (first, second):
        assert "stage 1: slices=2: " in sees
        assert "Centred) sees the whole batch" in sees
        assert re.match(r"stage 0: slices=2: the model fails for a slice .*'four rows'", fails)
    assert (first[1], second[1]) == ("2", "1")
