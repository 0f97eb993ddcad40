"""Slices draw together what the whole batch draws: masks and the generator's state are its."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from overlapc import optimize
from overlapc.core.errors import Infeasible, OptionError
from overlapc.runtime.train_step import TrainStep
from tests.torch.exact import DYNAMO_WARNINGS, randn
from tests.torch.test_slices import gradients
from tests.torch.zoo import gpt, on_fabric, tokens

pytestmark = DYNAMO_WARNINGS

# Of [batch, 6, 8]: along the batch, along another dimension of it, of it merged, of all samples
# alike, and as one op.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "turned": lambda x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "merged": lambda x: F.dropout(x.flatten(0, 1), 0.3).view_as(x),
    "channels": lambda x: F.dropout1d(x, 0.3),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "normal": lambda x: x + 0.1 * torch.empty_like(x).normal_(),
    "uniform": lambda x: x * torch.empty(x.shape[0], 1, 8).uniform_(0.5, 1.0),
    "gumbel": lambda x: x + F.gumbel_softmax(x, tau=2.0),
    "rows": lambda x: x * torch.rand(x.shape[0], 1, 1),
    "alike": lambda x: x * torch.rand(8),
    "one op": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "no draw": lambda x: F.dropout(x, 0.0).tanh(),
}


class Drawing(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in names)

    def forward(self, x: Tensor) -> Any:
        for name, layer in zip(self.names, self.layers, strict=True):
            x = DRAWS[name](layer(x))
        return x.square().mean(), x


def assert_whole(names: list[str], slices: int, **options: Any) -> None:
    torch.manual_seed(1)
    model, x = Drawing(names), randn(12, 6, 8)
    step = TrainStep(model, slices=slices, results=True, profile="estimate", **options)
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        expected, out = model(x)
        expected.backward()
        others, state = gradients(model), torch.get_rng_state()
        model.zero_grad()
        torch.manual_seed(seed)
        ((loss, found),) = step([(x,)])
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(found == 0, out == 0)
        torch.testing.assert_close(found, out.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss, expected.detach())
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-6)
    assert step.fallbacks == []


@pytest.mark.parametrize("slices", [2, 3])
def test_all_that_can_be_drawn_together_is(slices):
    assert_whole([*DRAWS], slices, solver="heu")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("examples", "solvers"),
    [(3, ["heu", "full"]), pytest.param(40, ["overlap", "heu", "full"], marks=pytest.mark.slow)],
)
def test_any_draws(examples, solvers):
    @settings(max_examples=examples)
    @given(
        names=st.lists(st.sampled_from([*DRAWS]), min_size=1, max_size=4),
        slices=st.sampled_from([2, 3, 4]),
        solver=st.sampled_from(solvers),
        budget=st.sampled_from([None, 0.3]),
    )
    def holds(names: list[str], slices: int, solver: str, budget: float | None) -> None:
        torch._dynamo.reset()
        try:
            assert_whole(names, slices, solver=solver, memory_budget=budget)
        except Infeasible as infeasible:
            least = infeasible.smallest_bytes
            assert_whole(names, slices, solver=solver, memory_budget=least)

    holds()


@pytest.mark.usefixtures("short_search")
def test_a_model_with_dropout_is_cut_where_slices_hide_collectives():
    with on_fabric():
        torch.manual_seed(1)
        model = gpt(layers=1, dropout=0.1)()
        batch = tokens(4, 8), tokens(4, 8, seed=9)
        twin = optimize(model, slices=2, profile="estimate", hardware="v100-sxm2-32")
        for seed in range(2):
            torch.manual_seed(seed)
            expected = model(*batch)
            expected.backward()
            others = gradients(model)
            model.zero_grad()
            torch.manual_seed(seed)
            loss = twin(*batch)
            loss.backward()
            torch.testing.assert_close(loss, expected)
            for name, gradient in gradients(model).items():
                torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-6)
            model.zero_grad()
        (report,) = twin.graphs
        assert report.slices == 2
        assert report.timeline.exposed_ns < report.eager.exposed_ns


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x * torch.bernoulli(x.sigmoid()), "bernoulli.* of inner draws random numbers"),
        (lambda x: x[torch.randperm(x.shape[0])], "randperm.* draws random numbers"),
        (lambda x: x * torch.rand(x.shape[0], x.shape[0]).sum(1)[:, None], r"shapes \(4, 4\) and"),
    ],
)
def test_other_draws_are_refused_by_name(call, said):
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return call(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.inner = nn.Linear(8, 8), Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.layer(x))

    torch.manual_seed(1)
    with pytest.raises(OptionError, match=rf"slices=2: .*{said}"):
        optimize(Model(), slices=2, profile="estimate")(randn(8, 8))
