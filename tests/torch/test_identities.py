"""Ops that give what they are given leave the graph, and its numbers stay."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from overlapc.passes.capture import capture
from overlapc.passes.identities import without_identities


class Roundabout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        there = self.linear(x).view(2, 3, 8)
        back = there.view(6, 8).view(2, 3, 8)
        turned = back.transpose(0, 1).expand(3, 2, 8)
        return (turned * turned.detach()).sum()


def test_without_identities() -> None:
    x = torch.randn(6, 8)
    captured = capture(Roundabout(), x)
    joint = captured.joint
    model = Roundabout()
    given = [*model.parameters(), x, torch.ones(())]

    def run() -> list[Tensor | None]:
        with torch.no_grad():
            found = fx.Interpreter(joint).run(*given, enable_io_processing=False)
        return [value for value in found if value is not None]

    before, expected = kinds(joint), run()
    without_identities(joint)
    after, found = kinds(joint), run()
    assert all(map(torch.equal, expected, found))
    assert before.count("detach") > after.count("detach") == 0
    assert before.count("expand") > after.count("expand")
    assert before.count("view") > after.count("view")
    assert before.count("transpose") == after.count("transpose")


def kinds(joint: fx.GraphModule) -> list[str]:
    targets = [node.target for node in joint.graph.nodes if node.op == "call_function"]
    return [str(target).split(".")[1].strip("_") for target in targets]
