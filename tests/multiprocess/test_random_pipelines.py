"""Random rows of random stages: gradients are those of plain accumulation, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc.core.errors import InvalidSchedule
from overlapc.core.schedule import Action, Schedule, Step, check_schedule
from overlapc.runtime.pipeline import Pipeline
from tests.multiprocess.spawn import run_ranks
from tests.torch.exact import bits
from tests.torch.random_models import OPS, ROWS, WIDTH, RandomModel, Recipe
from tests.torch.random_models import Step as Op

pytestmark = pytest.mark.multiprocess

# A rank that has two stages draws in the order of its row, so nothing is drawn here.
DRAWS = {"dropout", "noise", "recomputed_by_user", "changes_buffer"}
CALM = sorted(set(OPS) - DRAWS)


def random_schedule(rng: Random, ranks: int) -> Schedule:
    """Any rank does anything that it could; each stage keeps the order of microbatches."""
    stages = rng.randint(ranks, 2 * ranks)
    placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(placement)
    microbatches = rng.randint(1, 5)
    split = [rng.random() < 0.5 for _ in range(stages)]
    remade = {(s, m) for s in range(stages) for m in range(microbatches) if rng.random() < 0.4}
    done: dict[tuple[int, str], int] = {(s, k): 0 for s in range(stages) for k in "FRBIW"}
    rows: list[list[Step]] = [[] for _ in range(ranks)]

    def could(stage: int) -> list[Action]:
        back = "I" if split[stage] else "B"
        f, r, b, w = (done[stage, kind] for kind in ("F", "R", back, "W"))
        found = []
        if f < microbatches and (stage == 0 or done[stage - 1, "F"] > f):
            found.append(Action(stage, "F", f))
        if r < f:
            found.append(Action(stage, "R", r))
        behind = stage == stages - 1 or max(done[stage + 1, k] for k in "BI") > b
        if b < f and behind and ((stage, b) not in remade or r > b):
            found.append(Action(stage, back, b))
        if split[stage] and w < b:
            found.append(Action(stage, "W", w))
        return found

    while ready := [action for stage in range(stages) for action in could(stage)]:
        action = rng.choice(ready)
        done[action.stage, action.kind] += 1
        started = any(done[action.stage, kind] > action.microbatch for kind in "BI")
        if action.kind == "R" and ((action.stage, action.microbatch) not in remade or started):
            continue
        rows[placement[action.stage]].append((action,))
    schedule = Schedule("random", tuple(map(tuple, rows)))
    for rank, at in [(r, i) for r, row in enumerate(rows) for i in range(len(row) - 1)]:
        merged = with_merged(schedule, rank, at)
        if merged is not None and rng.random() < 0.7:
            schedule = merged
    return schedule


def with_merged(schedule: Schedule, rank: int, at: int) -> Schedule | None:
    """The schedule with F and the B of an earlier microbatch behind it as one step, if legal."""
    row = schedule.rows[rank]
    pair = row[at] + row[at + 1] if at + 1 < len(row) else ()
    if len(pair) != 2 or [a.kind for a in pair] != ["F", "B"] or pair[0].stage != pair[1].stage:
        return None
    rows = [*schedule.rows]
    rows[rank] = (*row[:at], pair, *row[at + 2 :])
    merged = Schedule(schedule.name, tuple(rows))
    try:
        check_schedule(merged)
    except InvalidSchedule:
        return None
    return merged


class RandomStage(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        steps = []
        for _ in range(rng.randint(2, 6)):
            a, b = rng.choice([-1, -1, -2, 0]), rng.choice([-1, -2, 0])
            steps.append(Op(rng.choice(CALM), a, b, rng.randrange(9)))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = RandomModel(Recipe(tuple(steps), (0,), rng.choice([(), (), (0,)])))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return torch.tanh(self.inner(x)[0] + 0.5 * x)


class Wire(torch.autograd.Function):
    """What is sent is contiguous, both ways; sums over another layout could round differently."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous().view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def on_rank(rank: int, ranks: int, seeds: list[int]) -> list[Any]:
    dist.init_process_group("gloo")
    wrong: list[Any] = []
    for seed in seeds:
        schedule = random_schedule(Random(seed), ranks)
        check_schedule(schedule)
        last = schedule.stages - 1
        every = [RandomStage(Random(1000 * seed + stage)) for stage in range(last + 1)]
        mine = {
            stage: RandomStage(Random(1000 * seed + stage))
            for stage, owner in schedule.rank_of.items()
            if owner == rank
        }
        generator = torch.Generator().manual_seed(seed)
        batches = torch.randn(2, schedule.microbatches, ROWS, WIDTH, generator=generator)
        for x, target in zip(*batches, strict=True):
            for number, stage in enumerate(every):
                x = stage(Wire.apply(x) if number else x)
            loss(x, target).backward()
        pipeline = Pipeline(
            mine,
            schedule,
            schedule.microbatches,
            loss if last in mine else None,
            solver=Random(seed).choice(["none", "full", "overlap"]),
            memory_budget="1GB",
            place=seed % 2 == 0,
            profile="estimate",
        )
        pipeline(*map(list, batches))
        for stage, module in mine.items():
            for (name, a), b in zip(
                module.named_parameters(), every[stage].parameters(), strict=True
            ):
                if (a.grad is None) != (b.grad is None) or (
                    a.grad is not None and not torch.equal(bits(a.grad)[2], bits(b.grad)[2])
                ):
                    wrong.append((seed, stage, name))
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (2, [*range(4), 25]),  # of a generator, 25 keeps states that other nodes are called like
        pytest.param(2, range(4, 80), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(3, range(80, 110), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_random_rows_of_random_stages(ranks: int, seeds: Sequence[int]) -> None:
    assert run_ranks(on_rank, ranks, list(seeds), timeout_s=1700) == [[]] * ranks
