"""Slices on several ranks: gradients are those of accumulation over slices there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from examples.moe.model import MoEConfig, MoEGPT, checked_sizes
from overlapc import TrainStep, optimize
from overlapc.emulate import Link, init_link
from overlapc.nn.layers import AllToAll, SumOverRanks, before, exchange, total, whole
from tests.multiprocess.mortal import caught
from tests.multiprocess.spawn import run_ranks
from tests.multiprocess.test_exactness_ranks import gpt
from tests.slow import slow_hardware
from tests.torch.test_slices import crossed, gradients, plainly

pytestmark = pytest.mark.multiprocess

SLOW_LINK = Link(alpha_s=1e-2, bytes_per_s=1e7)  # much to hide, on a busy machine, too


def moe() -> nn.Module:
    config = MoEConfig(vocab=32, width=32, heads=4, experts=4, expert_width=32, max_seq=16)
    return MoEGPT(config, dist.group.WORLD)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(seed))


def on_rank(
    rank: int, ranks: int, name: str, budget: Any, hardware: str, across: bool
) -> dict[str, Any]:
    """With `across` backwards begin before the last forward has ended, as the given plan says."""
    dist.init_process_group("gloo")
    own = rank if name == "moe" else 0  # tensor parallel ranks read the same

    def made() -> Any:
        torch.manual_seed(1)
        return moe() if name == "moe" else gpt(dropout=0.0)

    model, twin = made(), made()
    how: Any = {"solver": "heu", "profile": "estimate", "hardware": hardware}
    step = TrainStep(twin, memory_budget=budget, slices=2, **how)
    if across:
        planned = step.predict([(tokens(own), tokens(100 * own + 50))])
        tries = (crossed(planned.problem, planned.plan, 0.8, n / 20) for n in range(20))
        step = TrainStep(twin, slices=2, plan=[each for each in tries if each][-1], **how)
    same = []
    for i in range(2):  # the second adds to what the first left
        batch = tokens(10 * i + own), tokens(i + 100 * own + 50)
        expected = plainly(model, batch, 2)
        (found,) = step([batch])
        same.append(torch.equal(expected, found))
    mine, others = gradients(model), gradients(twin)
    same += [torch.equal(mine[name], others[name]) for name in mine]
    report = step.report
    dist.barrier()
    dist.destroy_process_group()
    return {
        "same": all(same) and mine.keys() == others.keys(),
        "order": report.plan.order,
        "hidden": report.timeline.exposed_ns < report.eager.exposed_ns,
        "unchanged": step.fallbacks,
        "phases": len(report.problem.phases),
    }


@pytest.mark.parametrize(
    ("name", "budget", "across"),
    [
        pytest.param("moe", None, False, marks=pytest.mark.slow),
        ("moe", None, True),
        pytest.param("gpt", None, False, marks=pytest.mark.slow),
        pytest.param("gpt", None, True, marks=pytest.mark.slow),
        pytest.param("gpt", 0.6, False, marks=pytest.mark.slow),
        pytest.param("moe", 0.6, False, marks=pytest.mark.slow),
    ],
)
def test_two_ranks(name: str, budget: float | None, across: bool, tmp_path: Path) -> None:
    hardware = slow_hardware(tmp_path)
    everyone = run_ranks(on_rank, 2, name, budget, hardware, across, timeout_s=280)
    for found in everyone:
        assert found["phases"] == (1 if across else 2)
        assert found["same"]
        assert found["unchanged"] == []
        assert found["order"] == everyone[0]["order"]
        assert found["hidden"]


def optimized(rank: int, ranks: int, hardware: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = moe()
    how: Any = {"solver": "heu", "profile": "estimate", "hardware": hardware}
    twin = optimize(model, slices=2, **how)
    batch = tokens(rank), tokens(100 * rank + 50)
    expected = plainly(model, batch, 2)
    others = gradients(model)
    same, hidden = [], []
    for _ in range(2):
        model.zero_grad()
        loss = twin(*batch)
        loss.backward()
        mine = gradients(model)
        same += [torch.equal(loss.detach(), expected)]
        same += [torch.equal(mine[name], others[name]) for name in others]
    with torch.no_grad():
        same += [torch.equal(twin(*batch), expected) for _ in range(2)]
    for report in twin.graphs:
        hidden.append(report.timeline.exposed_ns < report.eager.exposed_ns)
    dist.barrier()
    dist.destroy_process_group()
    return {"same": all(same), "hidden": hidden, "plain": twin.fallbacks}


def test_calls_of_a_model_in_slices(tmp_path: Path) -> None:
    """Training, and forwards alone."""
    for found in run_ranks(optimized, 2, slow_hardware(tmp_path), timeout_s=280):
        assert found["same"]
        assert found["hidden"] == [True, True]
        assert found["plain"] == []


class Counted(nn.Module):
    """Drops, and has the mean over tokens that count, of all slices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        counts = (x[:, 0] > 0).to(x.dtype)
        for layer in self.layers:
            x = F.dropout(SumOverRanks.apply(layer(x), dist.group.WORLD.group_name), 0.2)
        return total((x.square().mean(1) * counts).sum()) / total(counts.sum())


def counted(rank: int, ranks: int) -> dict[str, Any]:
    init_link(SLOW_LINK)
    torch.manual_seed(1)
    model, x = Counted(), torch.randn(24, 16)
    twin = optimize(model, solver="heu", slices=2)
    apart = []
    for seed in range(2):
        losses, grads = [], []
        for run in (model, twin):
            model.zero_grad()
            torch.manual_seed(seed)
            loss = run(x)
            loss.backward()
            losses.append(loss.detach())
            grads.append(gradients(model))
        apart.append(float((losses[0] - losses[1]).abs() / losses[0]))
        expected, found = grads
        apart += [float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()]
    dist.barrier()
    dist.destroy_process_group()
    return {"apart": max(apart), "plain": twin.fallbacks}


def test_totals_and_draws_are_the_whole_batchs() -> None:
    for found in run_ranks(counted, 2, timeout_s=280):
        assert found["apart"] < 1e-4
        assert found["plain"] == []


def automatic(rank: int, ranks: int) -> dict[str, Any]:
    init_link(SLOW_LINK)
    torch.manual_seed(1)
    model = moe()
    step = TrainStep(model, solver="heu", slices="auto")
    batch = tokens(rank), tokens(50 + rank)
    (found,) = step([batch])
    mine, slices = gradients(model), step.report.slices
    model.zero_grad()
    expected = plainly(model, batch, slices)
    same = [torch.equal(expected, found)]
    same += [torch.equal(mine[name], grad) for name, grad in gradients(model).items()]
    dist.barrier()
    dist.destroy_process_group()
    return {"slices": slices, "same": all(same), "said": step.explain().splitlines()[-3:]}


@pytest.mark.slow
def test_all_ranks_take_as_many_slices() -> None:
    one, other = run_ranks(automatic, 2, timeout_s=280)
    assert one["same"]
    assert other["same"]
    assert one["slices"] == other["slices"]
    assert one["said"] == other["said"]
    assert [line[:9] for line in one["said"]] == ["1 slices:", "2 slices:", "4 slices:"]


class Switch(nn.Module):
    """Top-1, each expert takes only so many tokens of a rank's batch, and only these travel."""

    def __init__(self, width: int, experts: int, factor: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks, self.factor = group.group_name, group.size(), factor
        self.experts, self.held = experts, experts // group.size()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.held, width, width) * width**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, chosen = F.softmax(self.router(x), dim=-1).max(dim=-1)
        hot = F.one_hot(chosen, self.experts)
        place = ((hot.cumsum(0) + before(hot.sum(0))) * hot).sum(1)
        keep = place <= int(self.factor * whole(x.shape[0]) / self.experts)

        sent = (hot * keep[:, None]).sum(0)
        order = torch.argsort(torch.where(keep, chosen, self.experts), stable=True)
        received = exchange(sent, [self.held] * self.ranks, [self.held] * self.ranks, self.group)
        received = received.view(self.ranks, self.held)
        send = checked_sizes(sent.view(self.ranks, self.held).sum(1))
        receive = checked_sizes(received.sum(1))
        torch._check(sum(send) <= x.shape[0])
        order = order.narrow(0, 0, sum(send))
        rows = AllToAll.apply(x[order], receive, send, self.group)
        labels = torch.arange(self.held).repeat(self.ranks)
        label = torch.repeat_interleave(labels, received.flatten(), output_size=rows.shape[0])
        by_expert = torch.argsort(label, stable=True)
        parts = torch.split(rows[by_expert], checked_sizes(received.sum(0)))
        done = torch.cat([F.gelu(part @ self.up[e]) for e, part in enumerate(parts)])
        back = torch.empty_like(done).index_copy(0, by_expert, done)
        rows = AllToAll.apply(back, send, receive, self.group)
        out = torch.zeros_like(x).index_copy(0, order, rows * gate[order][:, None])
        return (x + out).square().mean(), keep


def routed(rank: int, ranks: int, factor: float, gates: int) -> dict[str, Any]:
    """Tokens that slices route or drop otherwise than the whole batch, over random gates; in every
    third no rank but the first gets any."""
    init_link(SLOW_LINK)
    torch._dynamo.config.capture_scalar_outputs = True
    torch.manual_seed(1)
    model = Switch(16, 4, factor, dist.group.WORLD)
    step = TrainStep(model, solver="heu", slices=2, results=True)
    different, dropped, apart = 0, 0, 0.0
    for i in range(gates):
        with torch.no_grad():
            torch.manual_seed(i)
            weight = torch.randn(4, 16)
            model.router.weight.copy_(weight)
            x = torch.randn(24, 16, generator=torch.Generator().manual_seed(100 * rank + i))
            if i % 3 == 0:
                x = x.abs()
                model.router.weight[2:] = -9.0
                model.router.weight[:2].abs_()
        model.zero_grad()
        ((_, kept),) = step([x])
        mine = gradients(model)
        model.zero_grad()
        loss, expected = model(x)
        loss.backward()
        different += int((kept != expected).sum())
        dropped += int((~expected).sum())
        whole_batch = gradients(model)
        apart = max(
            [
                apart,
                *(
                    float((mine[n] - g).abs().max() / g.abs().max())
                    for n, g in whole_batch.items()
                    if g.any()
                ),
            ]
        )
    dist.barrier()
    dist.destroy_process_group()
    return {"different": different, "dropped": dropped, "apart": apart, "plain": step.fallbacks}


@pytest.mark.parametrize(
    "factor",
    [1.0, *(pytest.param(f, marks=pytest.mark.slow) for f in (1.25, 2.0))],
)
def test_capacity_is_passed_on_where_tokens_travel(factor: float) -> None:
    for found in run_ranks(routed, 2, factor, 30, timeout_s=280):
        assert found["plain"] == []
        assert found["different"] == 0
        assert found["dropped"] > 0
        assert found["apart"] < 1e-4


class Centered(nn.Module):
    """On rank 1 a sample's result depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out = SumOverRanks.apply(self.inner(x), dist.group.WORLD.group_name)
        return (out - dist.get_rank() * out.mean(0)).square().mean()


def centered(rank: int, ranks: int) -> Any:
    dist.init_process_group("gloo")
    step = TrainStep(Centered(), slices=2)
    return caught(lambda: step([torch.randn(4, 16)]))


def test_what_one_rank_refuses_all_refuse() -> None:
    for kind, said, _, _ in run_ranks(centered, 2, timeout_s=120):
        assert kind == "OptionError"
        assert "is another in slices" in said


class Looks(nn.Module):
    """Adds rows of a table that is as large as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        x = self.inner(x) + table[rows]
        return SumOverRanks.apply(x, dist.group.WORLD.group_name).square().mean()


def failing(rank: int, ranks: int) -> list[Any]:
    """On all ranks, and then on one, while the other waits for it in a collective."""
    dist.init_process_group("gloo")
    found = []
    for rows in ([3, 2, 1, 0], [3, 2, 1, 0] if rank else [1, 0, 1, 0]):
        step = TrainStep(Looks(), slices=2, profile="estimate")
        given = torch.randn(4, 16), torch.randn(4, 16), torch.tensor(rows)
        found.append(caught(lambda step=step, given=given: step([given])))
    return found


def test_a_model_that_fails_for_a_slice_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(failing, 2, timeout_s=280)
    for kind, said, _, _ in (first[0], second[0]):
        assert kind == "OptionError"
        assert "slices=2: the model fails for a slice, IndexError" in said
    kind, said, _, _ = second[1]
    assert kind == "RankError"
    assert "slices=2: the model fails for a slice, IndexError" in said
    assert "on this rank; " in said
    assert first[1][0] == "RankError"
