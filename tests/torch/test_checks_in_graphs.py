"""A graph that checks its own values (`one_hot` does, and `torch._assert_async`) is planned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlapc
from tests.torch.exact import DYNAMO_WARNINGS, Batch, differences, randn, train

pytestmark = DYNAMO_WARNINGS


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x))
        torch._assert_async((hidden < self.most()).all(), "too large")
        chosen = F.one_hot(hidden.argmax(1), 8)
        return self.other(torch.tanh(hidden) * chosen)

    def most(self) -> float:
        return 5.0


class Strict(Checked):
    def most(self) -> float:
        return -5.0


def make(kind: type[Checked]) -> Checked:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("solver", ["full", "heu"])
def test_it_recomputes_and_still_checks(solver: str) -> None:
    batches = [Batch((randn(4, 8, requires_grad=True),))] * 2
    options = {"solver": solver, "profile": "estimate", "memory_budget": None}
    model = overlapc.optimize(make(Checked), **options)
    assert differences(train(make(Checked), batches), train(model, batches)) == []
    assert model.fallbacks == []
    assert model.plan.recomputed or solver == "heu"
    strict = overlapc.optimize(make(Strict), **options)
    for broken in (make(Strict), strict):
        with pytest.raises(RuntimeError, match="too large"):
            broken(*batches[0].args)
