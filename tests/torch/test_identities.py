"""Ops that give what they are given leave the graph, and its numbers stay."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor

from overlapc.passes.capture.front import capture
from overlapc.passes.exact.identities import without_identities


class Roundabout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        there = self.linear(x).view(2, 3, 8)
        back = there.view(6, 8).view(2, 3, 8)
        turned = back.transpose(0, 1).expand(3, 2, 8)
        return (turned * turned.detach()).sum()


class Masked(nn.Module):
    """Scores masked in place, as Megatron's attention does it, and copies that must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.seen.clone()  # of a buffer that changes below
        self.seen.add_(1)
        scores = self.linear(x)
        result = scores.view(2, 3, 8).clone()  # of another result
        masked = scores.view(2, 3, 8).masked_fill_(x.view(2, 3, 8) > 0, -1e4)
        turned = x[:3].t().clone() * seen[:, None]  # laid out as only a copy is
        return (masked.softmax(-1).clone() * seen).sum() + turned.sum(), result


def changed(model: nn.Module, x: Tensor, *tangents: Tensor) -> tuple[list[str], list[str]]:
    """The ops of the model's joint graph before and after; its numbers stay."""
    joint = capture(model, x).joint
    given = [*model.parameters(), *model.buffers(), x, *tangents]

    def run() -> list[Tensor]:
        with torch.no_grad():
            inputs = [value.clone() for value in given]
            found = fx.Interpreter(joint).run(*inputs, enable_io_processing=False)
        return [value for value in [*found, *inputs] if value is not None]

    before, expected = kinds(joint), run()
    without_identities(joint)
    after, found = kinds(joint), run()
    assert all(map(torch.equal, expected, found))
    return before, after


def test_copies_that_nothing_changes_leave() -> None:
    model = Masked()
    before, after = changed(model, torch.randn(6, 8), torch.ones(()), torch.ones(2, 3, 8))
    assert before.count("copy") == 2
    assert "copy" not in after
    assert before.count("clone") - after.count("clone") == 2  # softmax's, and a gradient's
    assert before.count("new_empty_strided") == 1
    assert "new_empty_strided" not in after


def test_without_identities() -> None:
    before, after = changed(Roundabout(), torch.randn(6, 8), torch.ones(()))
    assert before.count("detach") > after.count("detach") == 0
    assert before.count("expand") > after.count("expand")
    assert before.count("view") > after.count("view")
    assert before.count("transpose") == after.count("transpose")


def kinds(joint: fx.GraphModule) -> list[str]:
    targets = [node.target for node in joint.graph.nodes if node.op == "call_function"]
    return [str(target).partition(".")[2].partition(".")[0].strip("_") for target in targets]


class Bent(nn.Module):
    """Its gradient passes a view of a copy, which lies as the tangent does without it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.view(48).masked_fill_(x.view(48) > 0, -1.0)
        return y * 2


def test_a_copy_of_what_may_lie_otherwise_stays() -> None:
    changed(Bent(), torch.randn(6, 8), torch.randn(8, 6).t())


class Turned(nn.Module):
    """Copies that resolve a conjugation, or copy what no storage holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = (torch.complex(self.linear(x), x) * 2).conj().resolve_conj()
        sparse = (x > 0).float().to_sparse().clone()
        return (torch.view_as_real(y) ** 2).sum() + sparse.to_dense().sum()


def test_a_copy_that_resolves_stays() -> None:
    changed(Turned(), torch.randn(6, 8), torch.ones(()))


class Shared(nn.Module):
    """A result is a view of what is copied: the caller may change it."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.split = split

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        if self.split:
            shown = torch.unsafe_chunk(y, 2, -1)[0]
        else:
            shown = wait_tensor(all_reduce(y.detach(), "sum", dist.group.WORLD)).view(-1)
        kept = y.clone()
        return (kept * kept).sum(), shown


@pytest.mark.parametrize("split", [False, True])
def test_a_copy_of_what_the_caller_sees_stays(split: bool) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = Shared(split)
        tangent = torch.ones(6, 4) if split else torch.ones(48)
        tangents = (torch.ones(()), tangent) if split else (torch.ones(()),)
        before, after = changed(model, torch.randn(6, 8), *tangents)
    finally:
        dist.destroy_process_group()
    assert before.count("clone") == after.count("clone") == 1
