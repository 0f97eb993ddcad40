"""Before stages are planned whose sizes depend on data, microbatches go through the pipeline by
eager: that changes nothing, and if one rank raises, all do."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.moe.model import MoE, MoEConfig
from overlapc import Pipeline
from tests.multiprocess.mortal import caught
from tests.multiprocess.spawn import run_ranks
from tests.multiprocess.test_rank_peaks import squared

pytestmark = pytest.mark.multiprocess

COUNT, WIDTH = 3, 8


class Picking(nn.Module):
    """Turns the rows with a positive mean. `writes`: into its input, too. `adds`: with autograd it
    gives a second tensor."""

    def __init__(self, writes: bool = False, adds: bool = False) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, WIDTH)
        self.writes, self.adds = writes, adds

    def forward(self, x: Tensor, more: Tensor | None = None) -> Any:
        if self.writes:
            x.add_(1.0)
        at = (x.detach().mean(-1) > 0).nonzero().squeeze(-1)
        out = x.tanh().index_add(0, at, self.turn(x[at]))
        out = out if more is None else out * more
        return (out, out.cos()) if self.adds and torch.is_grad_enabled() else out


def data(rank: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    drawn = torch.randn(2, COUNT, 6, WIDTH, generator=torch.Generator().manual_seed(rank))
    return list(drawn[0]), list(drawn[1])


def stages(**how: bool) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Picking(**how), Picking()]


def raises(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and args[0].abs().max() > 50:
        raise ValueError("this data is bad")


def on_rank(rank: int, ranks: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, how in (("plain", {}), ("writes", {"writes": True}), ("adds", {"adds": True})):
        (given, targets), (mine, others) = data(), data()
        first, last = stages(**how)
        losses = []
        for x, target in zip(given, targets, strict=True):
            sent = first(x)
            loss = squared(last(*sent) if isinstance(sent, tuple) else last(sent), target)
            loss.backward()
            losses.append(loss.detach())
        module = stages(**how)[rank]
        end = squared if rank else None
        pipeline = Pipeline({rank: module}, "1f1b", COUNT, end)
        got = pipeline(mine, others)
        same = [torch.equal(*pair) for pair in zip(got, losses, strict=False)]
        same += [torch.equal(*pair) for pair in zip(mine, given, strict=True) if rank == 0]
        twin = (first, last)[rank]
        for parameter, expected in zip(module.parameters(), twin.parameters(), strict=True):
            same.append(torch.equal(parameter.grad, expected.grad))
        found[name] = all(same)

    module = stages()[rank]
    pipeline = Pipeline({rank: module}, "1f1b", COUNT, squared if rank else None)
    given, targets = data()
    spoilt = [given[0], 100 * given[1], given[2]]
    hook = module.register_forward_pre_hook(raises) if rank == 0 else None
    found["bad"] = caught(lambda: pipeline(spoilt, targets))[:2]
    if hook is not None:
        hook.remove()
    found["again"] = len(pipeline(given, targets))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_walk_changes_nothing_and_all_ranks_learn_of_its_errors() -> None:
    first, last = run_ranks(on_rank, 2, timeout_s=120)
    for found in (first, last):
        assert (found["plain"], found["writes"], found["adds"]) == (True, True, True)
    assert "this data is bad" in str(first["bad"])
    assert "rank 0 failed while planning" in str(last["bad"])
    assert "this data is bad" in str(last["bad"])
    assert (first["again"], last["again"]) == (0, COUNT)


class Experts(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        config = MoEConfig(width=WIDTH, heads=2, experts=4, expert_width=16)
        self.experts = MoE(config, group)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x[None].tanh())[0]


def beside(rank: int, ranks: int) -> tuple[str, float]:
    """What a rank was told, and when. Rank 1 raises before its stage's all-to-all, where rank 0
    waits for it."""
    dist.init_process_group("gloo")
    across = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    along = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = rank // 2
    torch.manual_seed(stage)
    module = Experts(across[stage])
    given, targets = data(rank % 2)
    if rank == 1:
        given[1] *= 100
        module.register_forward_pre_hook(raises)
    pipeline = Pipeline(
        {stage: module}, "1f1b", COUNT, squared if stage else None, group=along[rank % 2]
    )
    _, said, _, at = caught(lambda: pipeline(given, targets))
    time.sleep(8)  # this process lives on
    return said, at


def test_ranks_that_share_a_stage_learn_of_it_too() -> None:
    everyone = run_ranks(beside, 4, timeout_s=100)
    for said, at in everyone:
        assert "this data is bad" in said
        assert at - everyone[1][1] < 10
