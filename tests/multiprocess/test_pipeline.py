"""Pipelines of real processes: gradients are those of one process that accumulates, bit by bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from examples.gpt.model import Block as ParallelBlock
from examples.gpt.model import GPTConfig, Shard
from examples.moe.model import Block as ExpertBlock
from examples.moe.model import MoEConfig
from overlapc.core.errors import OptionError
from overlapc.core.schedule import Schedule
from overlapc.emulate import Link, init_link
from overlapc.passes.emit.parts import Part
from overlapc.profiler.memory import measure_peak
from overlapc.runtime import pipeline as runtime
from overlapc.runtime.hosted import PipelineSchedule
from overlapc.runtime.pipeline import Pipeline
from overlapc.search.chosen import load_search
from overlapc.solvers.order import merging
from overlapc.solvers.pipeline.schedules import make_schedule
from tests.multiprocess.mortal import DEAD, caught, launch
from tests.multiprocess.spawn import run_ranks
from tests.torch.exact import bits

pytestmark = pytest.mark.multiprocess

WIDTH, ROWS = 16, 6
SEARCH = Path(__file__).parents[1] / "plain" / "golden" / "search.json"


class Stage(nn.Module):
    """Stages differ in depth; the first embeds, the last has a head."""

    def __init__(self, number: int, last: int, dropout: float, group: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH) if number == 0 else None
        config = GPTConfig(width=WIDTH, heads=2, max_seq=ROWS, dropout=dropout)
        self.blocks = nn.ModuleList(
            ParallelBlock(config, Shard(group)) for _ in range(1 + number % 2)
        )
        self.head = nn.Linear(WIDTH, 12) if number == last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(number: int, last: int, dropout: float, group: Any = None) -> Stage:
    torch.manual_seed(50 + number)
    return Stage(number, last, dropout, group)


def batches(count: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, 12, (2, count, 2, ROWS), generator=generator)
    return list(drawn[0]), list(drawn[1])


def accumulated(stages: list[Stage], microbatches: int, rounds: int) -> list[Tensor]:
    """Plain accumulation in one process, each stage drawing from random numbers of its own."""
    losses = []
    for _ in range(rounds):
        states = []
        for number in range(len(stages)):
            torch.manual_seed(100 + number)
            states.append(torch.get_rng_state())
        for x, target in zip(*batches(microbatches), strict=True):
            for number, stage in enumerate(stages):
                torch.set_rng_state(states[number])
                x = stage(x)
                states[number] = torch.get_rng_state()
            found = loss(x, target)
            found.backward()
            losses.append(found.detach())
    return losses


def on_rank(rank: int, ranks: int, cases: list[tuple[str, int, float, str, Any]]) -> list[Any]:
    dist.init_process_group("gloo")
    found = []
    for name, microbatches, dropout, solver, place in cases:
        schedule = make_schedule(name, ranks, microbatches)
        last = schedule.stages - 1
        mine = {s: make(s, last, dropout) for s, r in schedule.rank_of.items() if r == rank}
        pipeline = Pipeline(
            mine,
            schedule,
            microbatches,
            loss if last in mine else None,
            solver=solver,
            memory_budget="1GB",
            place=place,
            profile="estimate",
        )
        losses = []
        for _ in range(2):
            torch.manual_seed(100 + rank)
            losses += pipeline(*batches(microbatches))
        every = [make(s, last, dropout) for s in range(last + 1)]
        expected = accumulated(every, microbatches, 2)
        wrong = []
        for stage, module in mine.items():
            for (parameter, a), b in zip(
                module.named_parameters(), every[stage].parameters(), strict=True
            ):
                if not torch.equal(bits(a.grad)[2], bits(b.grad)[2]):
                    wrong.append(f"stage {stage} {parameter}")
        if last in mine and not all(map(torch.equal, losses, expected)):
            wrong.append("losses")
        recomputed = sum(len(r.plan.recomputed) for r in pipeline.reports.values())
        held = [len(stage.states) for stage in pipeline._stages.values()]
        found.append((wrong, recomputed, held))
    dist.barrier()
    dist.destroy_process_group()
    return found


QUICK: list[Any] = [
    ("1f1b", 5, 0.2, "full", True),
    ("zero-bubble", 6, 0.2, "full", True),
    ("interleaved", 4, 0.0, "full", True),
    ("zero-bubble-v", 4, 0.0, "full", True),
    ("merged", 5, 0.2, "full", True),
]
FEW: list[Any] = [
    ("1f1b", 1, 0.0, "none", True),
    ("1f1b", 4, 0.2, "full", False),
    ("gpipe", 3, 0.2, "full", False),
]
FOUR: list[Any] = [("1f1b", 12, 0.2, "full", True), ("zero-bubble", 5, 0.2, "none", True)]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, QUICK, id="2"),
        pytest.param(2, FEW, id="2, few", marks=pytest.mark.slow),
        pytest.param(4, FOUR, id="4", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_plain_accumulation(ranks: int, cases: list[Any]) -> None:
    everyone = run_ranks(on_rank, ranks, cases, timeout_s=280)
    for rank, seen in enumerate(everyone):
        for case, (wrong, recomputed, held) in zip(cases, seen, strict=True):
            assert wrong == [], (rank, case)
            assert (recomputed > 0) == (case[3] == "full"), (rank, case)
            assert not any(held), (rank, case)


class ExpertStage(nn.Module):
    """A block of experts, which are divided over the ranks of the stage."""

    def __init__(self, number: int, group: Any) -> None:
        super().__init__()
        config = MoEConfig(width=WIDTH, heads=2, experts=4, expert_width=16)
        self.embed = nn.Embedding(12, WIDTH) if number == 0 else None
        self.block = ExpertBlock(config, group)
        self.head = nn.Linear(WIDTH, 12) if number else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x if self.embed is None else self.embed(x))
        return x if self.head is None else self.head(x)


def in_two_dimensions(rank: int, ranks: int, kind: str, name: str) -> Any:
    """Two stages, each over two ranks: tensor parallel, or experts and other data on each."""
    dist.init_process_group("gloo")
    across = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    along = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = rank // 2

    def made() -> nn.Module:
        torch.manual_seed(70 + stage)
        return (
            ExpertStage(stage, across[stage])
            if kind == "ep"
            else Stage(stage, 1, 0.0, across[stage])
        )

    module, twin = made(), made()
    given, targets = batches(6)
    if kind == "ep" and rank % 2:
        given, targets = given[::-1], targets[::-1]
    pipeline = Pipeline(
        {stage: module},
        name,
        6,
        loss if stage == 1 else None,
        group=along[rank % 2],
        solver="overlap" if name == "merged" else "full",
        memory_budget="1GB",
        profile="measure" if name == "merged" else "estimate",
    )
    pipeline(given, targets)
    # The same by hand: the activation and its gradient through the pipeline's group.
    for x, target in zip(given, targets, strict=True):
        if stage == 0:
            out = twin(x)
            dist.send(out.detach(), group=along[rank % 2], group_dst=1)
            grad = torch.empty_like(out)
            dist.recv(grad, group=along[rank % 2], group_src=1)
            out.backward(grad)
        else:
            came = torch.empty(2, ROWS, WIDTH)
            dist.recv(came, group=along[rank % 2], group_src=0)
            came.requires_grad_()
            loss(twin(came), target).backward()
            dist.send(came.grad, group=along[rank % 2], group_dst=0)
    pairs = zip(module.named_parameters(), twin.parameters(), strict=True)
    wrong = [name for (name, a), b in pairs if not torch.equal(a.grad, b.grad)]
    dist.barrier()
    dist.destroy_process_group()
    return wrong, pipeline.reports[stage].merged is not None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tp", "1f1b"),
        pytest.param("tp", "merged", marks=pytest.mark.slow),
        pytest.param("ep", "1f1b", marks=pytest.mark.slow),
        pytest.param("ep", "merged", marks=pytest.mark.slow),
    ],
)
def test_tensor_and_expert_parallel_stages(kind: str, name: str) -> None:
    everyone = run_ranks(in_two_dimensions, 4, kind, name, timeout_s=250)
    assert [wrong for wrong, _ in everyone] == [[]] * 4
    # With a link this quick, merging may not pay everywhere.
    assert name == "merged" or not any(merged for _, merged in everyone)


def merged_on_rank(rank: int, ranks: int) -> Any:
    """A stage over both ranks, on a link so slow that merging pays, in a pipeline of its own."""
    merging.MERGED = 20_000  # a quick search finds enough
    init_link(Link(alpha_s=2e-2, bytes_per_s=1e8))
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    module, twin = (make(1, 1, 0.0, dist.group.WORLD) for _ in range(2))
    given = list(torch.randn(4, 2, ROWS, WIDTH, generator=torch.Generator().manual_seed(5)))
    _, targets = batches(4)
    pipeline = Pipeline(
        {0: module}, "merged", 4, loss, group=alone, memory_budget="1GB", solver="heu"
    )
    ran: list[Part] = []
    run = Part.run

    def noted(part: Part, *states: Any) -> None:
        ran.append(part)
        run(part, *states)

    with mock.patch.object(Part, "run", noted):
        pipeline(given, targets)
    for x, target in zip(given, targets, strict=True):
        loss(twin(x), target).backward()
    pairs = zip(module.named_parameters(), twin.parameters(), strict=True)
    wrong = [name for (name, a), b in pairs if not torch.equal(a.grad, b.grad)]
    stage = pipeline._stages[0]
    merged = stage.form.program.merged
    dist.barrier()
    dist.destroy_process_group()
    return wrong, merged is not None, [part is merged for part in ran]


def test_merged_graphs_run_in_a_pipeline() -> None:
    for wrong, is_merged, ran in run_ranks(merged_on_rank, 2, timeout_s=280):
        assert wrong == []
        assert is_merged
        assert ran == [False, True, True, True, False]


class Tied(nn.Module):
    """The first stage embeds, the last scores with the same weight."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        torch.manual_seed(9)
        self.table = nn.Parameter(torch.randn(12, WIDTH))
        torch.manual_seed(number)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.number == 0:
            return torch.tanh(self.inner(F.embedding(x, self.table)))
        return torch.tanh(self.inner(x)) @ self.table.t()


def tied_and_replicated(rank: int, ranks: int) -> list[str]:
    """Two pipelines of two stages, on data of their own; average gradients."""
    dist.init_process_group("gloo")
    along = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage, replica = rank // 2, rank % 2
    given, targets = batches(6)
    data = [(given[:3], targets[:3]), (given[3:], targets[3:])]
    module = Tied(stage)
    tied = [{0: "table", 1: "table"}]
    pipeline = Pipeline(
        {stage: module}, "zero-bubble", 3, loss if stage else None, group=along[replica],
        data_parallel=replicas[stage], tied=tied, profile="estimate",
    )  # fmt: skip
    pipeline(*data[replica])
    summed: dict[str, list[Tensor]] = {}
    for inputs, wanted in data:
        first, last = Tied(0), Tied(1)
        for x, target in zip(inputs, wanted, strict=True):
            loss(last(first(x)), target).backward()
        table = first.table.grad + last.table.grad
        summed.setdefault("table", []).append(table)
        for name, parameter in (last if stage else first).inner.named_parameters():
            summed.setdefault(f"inner.{name}", []).append(parameter.grad)
    wrong = [
        name
        for name, parameter in module.named_parameters()
        if not torch.equal(parameter.grad, (summed[name][0] + summed[name][1]) / 2)
    ]
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def test_tied_weights_and_data_parallel_replicas() -> None:
    assert run_ranks(tied_and_replicated, 4, timeout_s=120) == [[]] * 4


def as_a_search_chose(rank: int, ranks: int) -> list[str]:
    dist.init_process_group("gloo")
    chosen = load_search(SEARCH)
    module, twins = make(rank, 1, 0.0), [make(stage, 1, 0.0) for stage in range(2)]
    given, targets = batches(chosen.microbatches)
    pipeline = Pipeline(
        {rank: module}, chosen.schedule, chosen.microbatches, loss if rank else None,
        memory_budget=dict(enumerate(chosen.memory_budgets)), solver=chosen.solver,
        profile="estimate",
    )  # fmt: skip
    pipeline(given, targets)
    for x, target in zip(given, targets, strict=True):
        loss(twins[1](twins[0](x)), target).backward()
    pairs = zip(module.named_parameters(), twins[rank].parameters(), strict=True)
    wrong = [name for (name, a), b in pairs if not torch.equal(a.grad, b.grad)]
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.slow
def test_what_a_search_wrote_is_run() -> None:
    assert run_ranks(as_a_search_chose, 2, timeout_s=120) == [[]] * 2


class Turned(nn.Module):
    """Gives and takes what does not lie in memory as it says; its weight may be tied."""

    def __init__(self, number: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(30 + number)
        self.table = nn.Parameter(torch.randn(12, WIDTH)) if number in (0, last) else None
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = number == 0, number == last

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = F.embedding(x, self.table)
        y = torch.tanh(self.inner(x)).transpose(0, 1)
        return y @ self.table.t() if self.last else y


def turned_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def twice_and_turned(rank: int, ranks: int, name: str, stages: int) -> Any:
    dist.init_process_group("gloo")
    last = stages - 1
    schedule = make_schedule(name, ranks, 4)
    mine = {s: Turned(s, last) for s, owner in schedule.rank_of.items() if owner == rank}
    twins = nn.ModuleList(Turned(s, last) for s in range(stages))
    with torch.no_grad():
        twins[last].table.copy_(twins[0].table)
        if last in mine:
            mine[last].table.copy_(twins[0].table)
    given, targets = batches(4)
    pipeline = Pipeline(
        mine, schedule, 4, turned_loss if last in mine else None,
        tied=[{0: "table", last: "table"}], profile="estimate",
    )  # fmt: skip
    for _ in range(2):  # the second adds to what the first left
        pipeline(given, targets)
    for _ in range(2):
        for x, target in zip(given, targets, strict=True):
            for twin in twins[:-1]:  # what is sent lies in memory as it says, both ways
                x = twin(x).contiguous()
                x.register_hook(Tensor.contiguous)
            turned_loss(twins[-1](x), target).backward()
    wrong = []
    for s, module in mine.items():
        expected = {n: p.grad for n, p in twins[s].named_parameters()}
        if "table" in expected:
            expected["table"] = twins[0].table.grad + twins[last].table.grad
        for n, p in module.named_parameters():
            # Both calls' sums are added for a tied weight, every microbatch's for the others.
            close = torch.allclose(p.grad, expected[n], rtol=1e-5, atol=1e-7)
            if not (close if n == "table" else torch.equal(p.grad, expected[n])):
                wrong.append(f"stage {s}: {n}")
    same = {s: module.table for s, module in mine.items() if module.table is not None}
    refused = ""
    if len(same) == 2:
        mine[last].table = mine[0].table
        refused = caught(
            lambda: Pipeline(mine, schedule, 4, turned_loss, tied=[{0: "table", last: "table"}])
        )[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other_graphs = caught(lambda: pipeline(given, targets))[1]
    dist.barrier()
    dist.destroy_process_group()
    return wrong, refused, other_graphs


@pytest.mark.parametrize(
    ("name", "stages"), [pytest.param("1f1b", 2, marks=pytest.mark.slow), ("zero-bubble-v", 4)]
)
def test_stages_of_odd_strides_and_tied_weights_that_add_up(name: str, stages: int) -> None:
    first, second = run_ranks(twice_and_turned, 2, name, stages, timeout_s=120)
    assert first[0] == second[0] == []
    assert ("same Parameter" in first[1]) == (stages == 4)
    assert first[2] == "", "planned anew"


class Several(nn.Module):
    """A stage that hands on several tensors: some get a gradient, one is only passed through, one
    is there twice, one is a view of another, and one nobody reads."""

    def __init__(self, number: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(90 + number)
        self.embed = nn.Embedding(12, WIDTH) if number == 0 else None
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 12) if number == last else None

    def forward(self, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        if self.embed is not None:
            mask, x = x % 3 != 0, self.embed(x)
            more = mask, x.square().mean().reshape(1), x[:, :1] * 2
        mask, extra, unread = more[:3]
        if len(more) > 3:  # by another stage
            extra = extra + more[4].cos().mean()
        x = torch.tanh(self.inner(x)) * mask[..., None]
        extra = extra + x.square().mean()
        return (
            (x, mask, extra, unread, extra, x[:1]) if self.head is None else (self.head(x), extra)
        )


def several_loss(found: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, extra = found
    return loss(logits, targets) + 0.1 * extra.sum()


def with_several(rank: int, ranks: int, names: list[str]) -> list[str]:
    dist.init_process_group("gloo")
    wrong = []
    given, targets = batches(5)
    for name in names:
        schedule = make_schedule(name, ranks, 5)
        last = schedule.stages - 1
        mine = {s: Several(s, last) for s, owner in schedule.rank_of.items() if owner == rank}
        twins = [Several(s, last) for s in range(last + 1)]
        pipeline = Pipeline(
            mine, schedule, 5, several_loss if last in mine else None, profile="estimate",
            memory_budget="1GB",
        )  # fmt: skip
        found, expected = pipeline(given, targets), []
        for x, target in zip(given, targets, strict=True):
            handed: tuple[Tensor, ...] = (x,)
            for twin in twins:
                handed = twin(*handed)
            expected.append(several_loss(handed, target))
            expected[-1].backward()
        if last in mine and not all(map(torch.equal, found, expected)):
            wrong.append(f"{name}: losses")
        for s, module in mine.items():
            pairs = zip(module.named_parameters(), twins[s].parameters(), strict=True)
            wrong += [f"{name}: stage {s} {n}" for (n, a), b in pairs if not same(a, b)]
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def same(ours: nn.Parameter, theirs: nn.Parameter) -> bool:
    return torch.equal(ours.grad, theirs.grad)


def test_stages_hand_on_several_tensors() -> None:
    names = ["1f1b", "zero-bubble-v", "merged"]
    assert run_ranks(with_several, 2, names, timeout_s=120) == [[], []]


def unlike_rows(rank: int, ranks: int) -> list[str]:
    """Two replicas of a V of two ranks whose rows differ."""
    dist.init_process_group("gloo")
    along = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replica, place = rank % 2, rank // 2
    rows = make_schedule("zero-bubble-v", 2, 2)
    mine = [s for s, owner in rows.rank_of.items() if owner == place]
    if replica:  # this one's last weight gradients are in another order
        tails = [
            [step for row in [rows.rows[p]] for step in row if step[0].kind != "W"]
            + sorted((step for step in rows.rows[p] if step[0].kind == "W"), key=repr)
            for p in range(2)
        ]
        rows = Schedule(rows.name, tuple(map(tuple, tails)))
    modules = {s: make(s, 3, 0.0) for s in mine}
    given, targets = batches(4)
    data = [(given[:2], targets[:2]), (given[2:], targets[2:])]
    pipeline = Pipeline(
        modules, rows, 2, loss if 3 in mine else None, group=along[replica],
        data_parallel=replicas[place], profile="estimate", place=False,
    )  # fmt: skip
    pipeline(*data[replica])
    summed: dict[tuple[int, str], list[Tensor]] = {}
    for inputs, wanted in data:
        twins = [make(s, 3, 0.0) for s in range(4)]
        for x, target in zip(inputs, wanted, strict=True):
            for twin in twins:
                x = twin(x)
            loss(x, target).backward()
        for s in mine:
            for name, parameter in twins[s].named_parameters():
                summed.setdefault((s, name), []).append(parameter.grad)
    wrong = [
        f"stage {s}: {name}"
        for s in mine
        for name, parameter in modules[s].named_parameters()
        if not torch.equal(parameter.grad, (summed[s, name][0] + summed[s, name][1]) / 2)
    ]
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.slow
def test_replicas_with_other_rows_average_the_same_gradients() -> None:
    assert run_ranks(unlike_rows, 4, timeout_s=120) == [[]] * 4


def slow_to_plan(rank: int, ranks: int) -> int:
    dist.init_process_group("gloo")
    if rank:
        real = runtime.plan_stage
        runtime.plan_stage = lambda *a, **k: (time.sleep(9), real(*a, **k))[1]
    pipeline = Pipeline(
        {rank: make(rank, 1, 0.0)}, "1f1b", 2, loss if rank else None,
        profile="estimate",
    )  # fmt: skip
    found = pipeline(*batches(2))
    dist.barrier()
    dist.destroy_process_group()
    return len(found)


def test_a_rank_that_plans_for_long_is_waited_for() -> None:
    assert run_ranks(slow_to_plan, 2, timeout_s=120) == [0, 2]


class Counts(nn.Module):
    """Is another graph at each call, for which it is traced within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


def slow_to_compile(rank: int, ranks: int) -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    stage, last = Counts(), rank == ranks - 1
    pipeline = Pipeline({rank: stage}, "1f1b", 3, loss=F.mse_loss if last else None, solver="heu")
    x = [torch.randn(2, WIDTH) for _ in range(3)]
    given = x if rank == 0 else (), x if last else ()
    pipeline(*given)
    slow = (lambda _: time.sleep(5.0)) if rank == 1 else (lambda _: None)
    callback_handler.register_end_callback(slow)
    pipeline(*given)
    dist.barrier()
    dist.destroy_process_group()
    return [stage.calls, float(stage.linear.weight.grad.sum())]


def test_a_rank_that_compiles_within_a_step_is_waited_for() -> None:
    for calls, gradient in run_ranks(slow_to_compile, 2):
        assert calls >= 6
        assert gradient != 0.0


def one_stays_away(rank: int, ranks: int) -> Any:
    dist.init_process_group("gloo")
    pipeline = Pipeline(
        {rank: make(rank, 1, 0.0)}, "1f1b", 2, loss if rank else None,
        profile="estimate", timeout_s=3,
    )  # fmt: skip
    pipeline(*batches(2))
    if rank == 1:
        time.sleep(8)
        return None
    return caught(lambda: pipeline(*batches(2)))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_that_names_the_action() -> None:
    kind, said, seconds, _ = run_ranks(one_stays_away, 2, timeout_s=120)[0]
    assert kind == "RankError"
    assert "rank 0 at action the beginning of a step" in said
    assert "stage" in said
    assert "within 3 s" in said
    assert seconds < 10


def _killed(rank: int) -> Any:
    pipeline = Pipeline(
        {rank: make(rank, 1, 0.0)}, "1f1b", 4, loss if rank else None, profile="estimate"
    )
    pipeline(*batches(4))
    if rank == 1:
        stage = pipeline._stages[1]
        do, calls = stage.do, []

        def die(kind: str, microbatch: int) -> Any:
            calls.append(kind)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(kind, microbatch)

        stage.do = die  # type: ignore[method-assign]
    return caught(lambda: pipeline(*batches(4)))


def test_a_killed_rank_is_an_error_on_the_others_within_ten_seconds() -> None:
    (kind, said, seconds, _), dead = launch(_killed, 2, timeout_s=100)
    assert dead == DEAD
    assert kind == "RankError"
    assert "rank 0 at action 0" in said
    assert "rank 1" in said
    assert said.count("see the output of that rank") == 1
    assert seconds < 10


def changed_on_one_rank(rank: int, ranks: int) -> Any:
    """Between steps rank 1 alone changes a number, then rank 0 alone its graph."""
    dist.init_process_group("gloo")
    every = [make(s, 1, 0.2) for s in range(2)]
    module = make(rank, 1, 0.2)
    pipeline = Pipeline({rank: module}, "1f1b", 3, loss if rank else None, profile="estimate")
    wrong = []
    for change in range(3):
        if change == 1 and rank == 1:
            module.blocks[0].dropout.p = 0.5
        if change == 2 and rank == 0:
            module.blocks[0].dropout = nn.Identity()
        if change == 1:
            every[1].blocks[0].dropout.p = 0.5
        if change == 2:
            every[0].blocks[0].dropout = nn.Identity()
        for each in (module, *every):
            each.zero_grad()
        torch.manual_seed(100 + rank)
        pipeline(*batches(3))
        accumulated(every, 3, 1)
        for (name, one), other in zip(
            module.named_parameters(), every[rank].parameters(), strict=True
        ):
            if not torch.equal(one.grad, other.grad):
                wrong.append((change, name))
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def test_a_change_on_one_rank_is_seen_by_all() -> None:
    assert run_ranks(changed_on_one_rank, 2, timeout_s=150) == [[], []]


class Fails(Stage):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("as it was told")
        return super().forward(x)


def failed_on_one_rank(rank: int, ranks: int) -> list[Any]:
    """Steps before, while and after the last stage cannot be traced."""
    dist.init_process_group("gloo")
    torch.manual_seed(50 + rank)
    module = Fails(rank, 1, 0.0)
    pipeline = Pipeline({rank: module}, "1f1b", 2, loss if rank else None, profile="estimate")
    found = []
    for fails in (False, True, False):
        module.fails = fails and rank == 1
        module.zero_grad()
        found.append(caught(lambda: pipeline(*batches(2)))[0])
    every = [make(s, 1, 0.0) for s in range(2)]
    accumulated(every, 2, 1)
    same = zip(module.parameters(), every[rank].parameters(), strict=True)
    found.append(all(torch.equal(one.grad, other.grad) for one, other in same))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_step_after_one_that_could_not_be_planned() -> None:
    for found, error in zip(
        run_ranks(failed_on_one_rank, 2, timeout_s=150), ("RankError", "CaptureError"), strict=True
    ):
        assert found == ["", error, "", True]


def other_schedules(rank: int, ranks: int) -> Any:
    dist.init_process_group("gloo")
    pipeline = Pipeline(
        {rank: make(rank, 1, 0.0)}, "gpipe" if rank else "1f1b", 2, loss if rank else None,
        profile="estimate",
    )  # fmt: skip
    return caught(lambda: pipeline(*batches(2)))


def test_ranks_must_have_one_schedule() -> None:
    for kind, said, _, _ in run_ranks(other_schedules, 2, timeout_s=120):
        assert kind == "RankError"
        assert "disagree on the schedule" in said


def wrong_use(rank: int, ranks: int) -> list[str]:
    dist.init_process_group("gloo")
    said = []
    for stages, how in (({5: make(0, 1, 0.0)}, True), ({rank: make(rank, 1, 0.0)}, "other")):
        try:
            given = None if (how and rank) or not rank else loss
            Pipeline(stages, "1f1b", 2, given)
        except OptionError as error:
            said.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return said


def test_wrong_stages_and_a_missing_loss_are_refused() -> None:
    first, last = run_ranks(wrong_use, 2, timeout_s=60)
    assert "expects stages [0] here" in first[0]
    assert "expected one on the rank of the last stage" in last[1]


def in_their_place(rank: int, ranks: int) -> list[Any]:
    """The same stages under PyTorch's 1F1B and under ours."""
    dist.init_process_group("gloo")
    found: list[Any] = []
    inputs, targets = (torch.cat(part) for part in batches(4))
    for ours in (False, True):
        module = make(rank, 1, 0.0)
        stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
        schedule: Any
        if ours:
            schedule = PipelineSchedule(stage, 4, loss, profile="estimate")
        else:
            schedule = Schedule1F1B(stage, 4, loss)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        found.append([p.grad for p in module.parameters()] + losses)
    equal = all(map(torch.equal, *found))
    said = []
    for wrong in (lambda: PipelineSchedule(module, 4), lambda: schedule.step(inputs[:3])):
        try:
            wrong()
        except OptionError as error:
            said.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return [equal, len(found[0]) == len(found[1]), said]


def test_in_the_place_of_pytorchs_schedule() -> None:
    (first, last) = run_ranks(in_their_place, 2, timeout_s=120)
    assert first[:2] == last[:2] == [True, True]
    assert "expected PipelineStage" in first[2][0]
    assert "divided by 4 microbatches" in first[2][1]
    assert "without target" in last[2][1]


def peaks(rank: int, ranks: int, name: str, budget: str, slices: int) -> tuple[int, int]:
    """Measured and predicted, of a stage that is large beside what is allocated for a moment."""
    dist.init_process_group("gloo")
    schedule = make_schedule(name, ranks, 6)
    last = schedule.stages - 1
    config = GPTConfig(width=64, heads=2, max_seq=64)
    modules: dict[int, nn.Module] = {}
    for stage, owner in schedule.rank_of.items():
        if owner == rank:
            torch.manual_seed(stage)
            blocks = nn.Sequential(*(ParallelBlock(config, Shard(None)) for _ in range(2)))
            modules[stage] = blocks
    pipeline = Pipeline(
        modules,
        schedule,
        6,
        (lambda out, target: (out - target).square().mean()) if last in modules else None,
        memory_budget=budget,
        profile="estimate",
        slices=slices,
    )
    drawn = torch.randn(2, 6, 4, 64, 64)
    given, wanted = list(drawn[0]), list(drawn[1])
    pipeline(given, wanted)
    measured = []
    for _ in range(3):
        for module in modules.values():
            module.zero_grad()
        measured.append(measure_peak(lambda: pipeline(given, wanted)))
    gradients = sum(p.nbytes for module in modules.values() for p in module.parameters())
    assert pipeline.timeline is not None
    dist.barrier()
    dist.destroy_process_group()
    return min(measured), pipeline.timeline.peaks_with([gradients, gradients])[rank]


@pytest.mark.parametrize(
    ("name", "budget", "slices"),
    [
        pytest.param("1f1b", "9MB", 1, marks=pytest.mark.slow),
        ("1f1b", "1GB", 1),
        pytest.param("zero-bubble-v", "1GB", 1, marks=pytest.mark.slow),
        pytest.param("1f1b", "9MB", 2, marks=pytest.mark.slow),
        pytest.param("1f1b", "1GB", 2, marks=pytest.mark.slow),
        pytest.param("zero-bubble", "1GB", 2, marks=pytest.mark.slow),
    ],
)
def test_peaks_are_as_predicted(name: str, budget: str, slices: int) -> None:
    for measured, predicted in run_ranks(peaks, 2, name, budget, slices, timeout_s=240):
        assert predicted == pytest.approx(measured, rel=0.05)


def costs_kept(rank: int, world_size: int, path: str) -> bool:
    """Whether a second pipeline is planned with what was measured for the first."""
    dist.init_process_group("gloo")
    found = []
    for _ in range(2):
        modules = {rank: make(rank, 1, 0.0)}
        pipeline = Pipeline(
            modules, "1f1b", 2, loss if rank == 1 else None, cache=Path(path) / f"rank{rank}"
        )
        pipeline(*batches(2))
        problem = pipeline.reports[rank].problem  # adding gradients up is timed anew
        found.append([problem.cost(op.name) for op in problem.trace.ops if op.is_forward])
    dist.barrier()
    dist.destroy_process_group()
    return found[0] == found[1]


def test_measured_costs_are_kept_where_asked(tmp_path: Path) -> None:
    assert run_ranks(costs_kept, 2, str(tmp_path), timeout_s=120) == [True, True]


def plans_kept(rank: int, world_size: int) -> list[str]:
    """By which solver's plan a second pipeline runs that is given the first one's plan."""
    dist.init_process_group("gloo")
    found = []
    options: dict[str, Any] = {"solver": "full", "memory_budget": "1GB"}
    for _ in range(2):
        pipeline = Pipeline(
            {rank: make(rank, 1, 0.0)}, "1f1b", 2, loss if rank else None,
            profile="estimate", **options,
        )  # fmt: skip
        pipeline(*batches(2))
        plan = pipeline.reports[rank].plan
        found.append(plan.solver)
        options = {"plan": {rank: plan}}
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_pipeline_takes_plans_again() -> None:
    assert run_ranks(plans_kept, 2, timeout_s=120) == [["full", "full"]] * 2
