"""`optimize(slices=k)`: results put together, gradients bitwise plain accumulation over slices."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from overlapc import TrainStep, optimize
from overlapc.core.errors import OptionError
from overlapc.nn.layers import SumOverRanks
from overlapc.profiler.memory import measure_peak
from tests.torch.exact import DYNAMO_WARNINGS, randn
from tests.torch.random_models import WIDTH, RandomModel, Recipe, recipes
from tests.torch.test_slices import CROSSES, Drawn, gradients
from tests.torch.zoo import MLP, gpt, on_fabric, tokens

pytestmark = DYNAMO_WARNINGS


def plainly(
    model: nn.Module, x: Tensor, slices: int, loss: Callable[[Tensor], Tensor], axis: int = 0
) -> Tensor:
    """What a call in slices promises; the loss is outside of the model."""
    parts = [model(each) for each in x.chunk(slices)]
    whole = torch.cat([part.detach() for part in parts], axis).requires_grad_()
    loss(whole).backward()
    for part, gradient in zip(parts, whole.grad.contiguous().chunk(slices, axis), strict=True):
        part.backward(gradient.contiguous())
    return whole.detach()


def outside(x: Tensor) -> Tensor:
    return (x * torch.linspace(0.5, 1.5, x.shape[1])).square().sum() / 7


def assert_same(mine: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert mine.keys() == others.keys()
    assert [name for name in mine if not torch.equal(mine[name], others[name])] == []


@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize("solver", ["overlap", "full"])
def test_the_loss_may_be_outside_of_the_model(slices, solver):
    torch.manual_seed(1)
    model, x = MLP(), randn(24, 16)
    twin = optimize(model, slices=slices, profile="estimate", solver=solver)
    for i in range(2):
        model.zero_grad()
        expected = plainly(model, x + i, slices, outside)
        others = gradients(model)
        model.zero_grad()
        out = twin(x + i)
        assert torch.equal(out, expected)
        outside(out).backward()
        assert_same(gradients(model), others)
    (report,) = twin.graphs
    assert report.slices == slices
    assert f"graph 0 in {slices} slices" in twin.explain()
    assert "result 0 along dimension 0; bitwise plain accumulation over slices" in twin.explain()


@pytest.mark.usefixtures("short_search")
def test_a_model_that_returns_its_loss_gets_the_mean_of_the_slices():
    with on_fabric():
        torch.manual_seed(1)
        model = gpt()()
        twin = optimize(model, slices=2, profile="estimate", hardware="v100-sxm2-32")
        batch = tokens(4, 8), tokens(4, 8, seed=9)
        total: Any = 0
        for each in zip(*(leaf.chunk(2) for leaf in batch), strict=True):
            part = model(*each) / 2
            part.backward()
            total = total + part.detach()
        others = gradients(model)
        model.zero_grad()
        loss = twin(*batch)
        loss.backward()
        assert torch.equal(loss.detach(), total)
        assert_same(gradients(model), others)
        assert "result 0 mean" in twin.explain()
        assert twin.timeline.exposed_ns < twin.graphs[0].eager.exposed_ns


class Several(nn.Module):
    """A batch that lies along other dimensions of results, numbers, the same tensor twice, and an
    input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(16, 4), 0

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        out = self.inner(x) * scale
        return {
            "out": out,
            "turned": out.t() * 2,
            "top": [out.argmax(1), scale],
            "again": out,
            "x": x,
            "loss": out.square().mean(),
        }


def test_results_are_put_together_along_the_dimension_of_the_batch():
    torch.manual_seed(1)
    model, x = Several(), randn(8, 16)
    twin = optimize(model, slices=2, profile="estimate")
    for _ in range(2):
        twin(x)
    calls = model.calls
    found = twin(x, scale=0.5)
    assert model.calls == calls + 1
    expected = model(x, scale=0.5)
    assert found.keys() == expected.keys()
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
            assert one.requires_grad == other.requires_grad
        else:
            assert one == other
    assert torch.equal(found["x"], x)
    (found["turned"].square().sum() + found["loss"] + found["again"].sum()).backward()
    mine = gradients(model)
    model.zero_grad()
    (expected["turned"].square().sum() + expected["loss"] + expected["again"].sum()).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(mine[name], gradient)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).t()


def test_gradients_are_cut_along_the_same_dimension():
    torch.manual_seed(1)
    model, x = Turned(), randn(8, 16)
    expected = plainly(model, x, 4, outside, axis=1)
    others = gradients(model)
    model.zero_grad()
    out = optimize(model, slices=4, profile="estimate")(x)
    outside(out).backward()
    assert torch.equal(out, expected)
    assert_same(gradients(model), others)


def test_autograd_goes_on_before_the_model_and_behind_it():
    """Inputs that require a gradient, hooks, `autograd.grad`, and `.grad` that is there before."""
    torch.manual_seed(1)
    model, first, x = MLP(), nn.Linear(16, 16), randn(12, 16)
    twin = optimize(model, slices=3, profile="estimate")
    seen: list[Tensor] = []
    parameter = next(model.parameters())
    parameter.register_hook(seen.append)
    given = first(x)
    leaf = given.detach().requires_grad_()
    plainly_of_leaf = [each.detach().requires_grad_() for each in leaf.detach().chunk(3)]
    parts = [model(each) for each in plainly_of_leaf]
    whole = torch.cat([part.detach() for part in parts]).requires_grad_()
    outside(whole).backward()
    for part, gradient in zip(parts, whole.grad.chunk(3), strict=True):
        part.backward(gradient)
    others, of_input = gradients(model), torch.cat([each.grad for each in plainly_of_leaf])
    outside(twin(leaf)).backward()  # the first batch is compared with the uncut one
    model.zero_grad()
    seen.clear()
    outside(twin(given)).backward()
    assert_same(gradients(model), others)
    assert len(seen) == 1
    given = first(x)
    given.backward(of_input)
    expected = first.weight.grad / 2  # twice the same was added
    first.zero_grad()
    first(x).backward(of_input)
    torch.testing.assert_close(first.weight.grad, expected)
    (found,) = torch.autograd.grad(outside(twin(leaf)), [leaf])
    assert torch.equal(found, of_input)
    assert_same(gradients(model), others)  # as before
    outside(twin(leaf)).backward()
    assert_same(gradients(model), {name: g + g for name, g in others.items()})


def test_the_default_is_uncut_and_bitwise_eagers():
    torch.manual_seed(1)
    model, x = MLP(), randn(8, 16)
    outside(model(x)).backward()
    others = gradients(model)
    model.zero_grad()
    twin = optimize(model, slices=1, profile="estimate")
    outside(twin(x)).backward()
    assert_same(gradients(model), others)
    assert twin.graphs[0].slices == 1


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_alone_are_cut_too(mode):
    """Evaluation and prefill: collectives of one slice under another."""
    with on_fabric():
        torch.manual_seed(1)
        model = gpt(dropout=0.1)().eval()
        twin = optimize(model, slices=2, profile="estimate", hardware="v100-sxm2-32")
        batch = tokens(4, 8), tokens(4, 8, seed=9)
        with mode():
            expected: Any = 0
            for each in zip(*(leaf.chunk(2) for leaf in batch), strict=True):
                expected = expected + model(*each) / 2
            for _ in range(2):
                assert torch.equal(twin(*batch), expected)
        (report,) = twin.graphs
        assert report.name == "graph 0 in 2 slices, its forward alone"
        assert not report.plan.saved
        assert all(op.is_forward for op in report.problem.trace.ops)
        assert report.timeline.exposed_ns < report.eager.exposed_ns


def test_a_forward_alone_holds_no_more_than_is_predicted():
    torch.manual_seed(1)
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), randn(512, 64)
    twin = optimize(model, slices=2, profile="estimate")
    with torch.no_grad():
        twin(x)
        peak = min(measure_peak(lambda: twin(x)) for _ in range(3))
    # Beside the slices' results lies for a moment the batch's.
    assert peak <= twin.graphs[0].peak_bytes + x.nbytes + 4096


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x - x.mean(0), r"result 0 is another in slices .*sees the whole batch"),
        (lambda x: x.cumsum(0), "result 0 is another in slices"),
        (lambda x: torch.bernoulli(x.sigmoid()), "draws random numbers"),
        (lambda x: x @ x.t(), r"result 0 is of shape \(4, 4\) for a slice and \(8, 8\)"),
        (lambda x: (x, x.shape[0]), "result 1 is another in slices .4 for 8"),
        (lambda x: (x, x.detach().sum()), "result 1 is another in slices"),
        (lambda x: x.square().sum(), "the loss is another in slices"),
        (lambda x: (x.sum(0), x), "result 0 is another in slices"),
    ],
)
def test_what_may_not_be_cut_is_refused_by_name(call, said):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Any:
            return call(self.inner(x))

    torch.manual_seed(1)
    model = Model()
    for _ in range(2):
        with pytest.raises(OptionError, match=rf"slices=2: .*{said}"):
            optimize(model, slices=2, profile="estimate")(randn(8, 16))
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(OptionError, match=r"slices=2: found inputs of shapes \[\(7, 16\)\]"):
        optimize(model, slices=2)(randn(7, 16))


def test_what_cannot_be_captured_runs_uncut_and_says_so():
    class Picky(MLP):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if out.sum().item() > -1e9 else -out

    torch.manual_seed(1)
    model, x = Picky(), randn(8, 16)
    twin = optimize(model, slices=2, profile="estimate")
    with pytest.warns(RuntimeWarning, match="overlapc runs the batch uncut"):
        out = twin(x)
    outside(out).backward()
    mine = gradients(model)
    model.zero_grad()
    outside(model(x)).backward()
    assert_same(mine, gradients(model))
    assert "(runs uncut)" in twin.explain()


@pytest.mark.parametrize(
    ("kept", "said"), [(True, "is kept by the model"), (False, "a view of another")]
)
def test_results_that_are_no_tensors_of_their_own_run_uncut(kept, said):
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(16, 16), None

        def forward(self, x: Tensor) -> Any:
            out = self.inner(x)
            if kept:
                self.last = out * 2
                return out
            return out.relu(), out.view(-1)[:], out

    model, x = Views(), randn(8, 16)
    twin = optimize(model, slices=2, profile="estimate")
    with pytest.warns(RuntimeWarning, match=said):
        found = twin(x)
    for one, other in zip(tree_leaves(found), tree_leaves(model(x)), strict=True):
        assert torch.equal(one, other)


class WithHidden(nn.Module):
    """Takes what is as large along dimension 0 as the batch, and no batch there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gru = nn.GRU(16, 16, num_layers=4, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if self.kind == "hidden state":
            x = self.gru(x, other)[0]
        elif self.kind == "mask":
            x = self.attention(x, x, x, attn_mask=other)[0]
        elif self.kind == "table":
            x = x + other[3]
        else:
            x = x + other[torch.tensor([3, 2, 1, 0])][: len(x), None]
        for _ in range(3):
            x = self.out(x)
            if dist.is_initialized():
                x = SumOverRanks.apply(x, dist.group.WORLD.group_name).tanh()
        return x.square().mean()

    def inputs(self) -> tuple[Tensor, Tensor]:
        shape = {"hidden state": (4, 4, 16), "mask": (4, 4)}.get(self.kind, (4, 16))
        return randn(4, 4, 16), randn(*shape, seed=1)


HIDDEN = {
    "hidden state": r"RuntimeError\(.*'Expected hidden size \(4, 2, 16\), got \[2, 4, 16\]'.*\)",
    "mask": r"RuntimeError\('The shape of the 2D attn_mask is torch.Size\(\[2, 4\]\)",
    "table": r"IndexError.*index 3 is out of bounds",
    "looked up": r"IndexError\('index 3 is out of bounds",
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_an_input_that_is_only_as_large_as_the_batch_is_refused_by_name(kind):
    """It raised the model's own error, or ran uncut with a warning."""
    torch.manual_seed(1)
    model = WithHidden(kind)
    x, other = model.inputs()
    shapes = re.escape(str([tuple(x.shape), tuple(other.shape)]))
    said = rf"slices=2: the model fails for a slice.*{HIDDEN[kind]}.*; .*{shapes}"
    for _ in range(2):
        with pytest.raises(OptionError, match=said):
            optimize(model, slices=2, profile="estimate")(x, other)
        with pytest.raises(OptionError, match=said):
            TrainStep(model, slices=2, profile="estimate")([(x, other)])
        with torch.no_grad(), pytest.raises(OptionError, match=said):
            optimize(model, slices=2, profile="estimate")(x, other)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "kind", [pytest.param("hidden state", marks=pytest.mark.slow), "mask", "table"]
)
def test_auto_runs_it_whole_and_says_why(kind, auto):
    with on_fabric():
        torch.manual_seed(1)
        model = WithHidden(kind)
        expected = model(*model.inputs())
        expected.backward()
        others = gradients(model)
        model.zero_grad()
        twin = optimize(model, **auto)
        loss = twin(*model.inputs())
        loss.backward()
        assert torch.equal(loss, expected)
        assert_same(gradients(model), others)
        assert "2 slices: slices=2: the model fails for a slice" in twin.explain()
        model.zero_grad()
        step = TrainStep(model, **auto)
        (found,) = step([model.inputs()])
        assert torch.equal(found, expected.detach())
        assert_same(gradients(model), others)
        assert "2 slices: slices=2: the model fails for a slice" in step.explain()


@pytest.mark.parametrize("slices", [2, "auto"])
def test_what_fails_of_the_whole_batch_too_is_the_models_own_error(slices):
    class Wrong(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if len(x):
                raise LookupError("mine")
            return x

    twin = optimize(Wrong(), slices=slices, profile="estimate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(LookupError, match="mine"):
            twin(randn(8, 16))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((randn(8, 16), randn(1, 16)), r"found inputs of shapes \[\(8, 16\), \(1, 16\)\]"),
        ((torch.eye(8, 16).to_sparse(), randn(8, 16)), "an input is a sparse_coo tensor"),
        (("a", 3), "found no tensors among the inputs, but str, int"),
        ((), "found no tensors among the inputs, but nothing"),
    ],
)
def test_inputs_that_cannot_be_cut_are_named(inputs, said):
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, *inputs: Any) -> Tensor:
            found = [self.inner(x.to_dense()) for x in inputs if isinstance(x, Tensor)]
            return sum(found, self.inner.bias * 2)

    model = Sums()
    with pytest.raises(OptionError, match=rf"slices=2: {said}"):
        optimize(model, slices=2, profile="estimate")(*inputs)
    for mode in (torch.no_grad, torch.enable_grad):
        twin = optimize(model, slices="auto", profile="estimate")
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # Dynamo takes no sparse tensor
            for _ in range(2):
                assert torch.equal(twin(*inputs), model(*inputs))
        assert re.search(rf"1 slices: it cannot be cut: {said}", twin.explain())


def test_auto_says_why_a_batch_cannot_be_planned():
    class Picky(MLP):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if out.sum().item() > -1e9 else -out

    twin = optimize(Picky(), slices="auto", profile="estimate")
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="overlapc runs the batch uncut"):
        twin(randn(8, 16))
    assert re.search(r"1 slices: cannot be planned: .*test_sliced.py", twin.explain())


def test_a_number_is_the_batchs_where_the_first_slices_have_the_same():
    """A batch of zeros to warm up: the loss of its slices is alike, that of others is not."""

    class Scored(MLP):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return {"loss": out.square().mean(), "right": (out > 0).float().mean()}

    torch.manual_seed(1)
    model = Scored()
    twin = optimize(model, slices=2, profile="estimate")
    with torch.no_grad():
        for x in (torch.zeros(8, 16), randn(8, 16)):
            parts = [model(each) for each in x.chunk(2)]
            for name, value in twin(x).items():
                assert torch.equal(value, sum(part[name] / 2 for part in parts))


class Measured(MLP):
    """Returns its loss with an accuracy, as a tensor or as a Python number."""

    def __init__(self, counts: bool = False, item: bool = False) -> None:
        super().__init__()
        self.counts, self.item = counts, item

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        out = super().forward(x)
        right = (out.argmax(1) == 0).float()
        found = right.sum() if self.counts else right.mean()
        return out.square().mean(), found.item() if self.item else found


@pytest.mark.parametrize("how", ["step", "call"])
def test_a_mean_that_is_zero_in_the_first_batch_is_the_batchs(how):
    """Of a model that has learned nothing, an accuracy is."""

    class Wrong(Measured):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = MLP.forward(self, x)
            return out.square().mean(), (out.argmax(1) == y).float().mean()

    torch.manual_seed(1)
    model, x = Wrong(), randn(8, 16)
    best = MLP.forward(model, x).argmax(1)
    options = {"slices": 2, "profile": "estimate"}
    step = how == "step"
    run = TrainStep(model, results=True, **options) if step else optimize(model, **options)
    for wrong, expected in ((8, 0.0), (6, 0.25), (0, 1.0)):
        y = torch.where(torch.arange(8) < wrong, (best + 1) % 4, best)
        found = run([(x, y)])[0] if how == "step" else run(x, y)
        assert found[1] == expected


def test_a_result_for_each_sample_is_refused():
    class Listing(MLP):
        def forward(self, x: Tensor) -> Any:
            return [each.clone() for each in super().forward(x)]

    said = "slices=2: the model gives 4 results for a slice and 8 for the batch; expected as many"
    with pytest.raises(OptionError, match=said):
        optimize(Listing(), slices=2, profile="estimate")(randn(8, 16))


@pytest.mark.parametrize("how", ["step", "call"])
def test_a_mean_beside_the_loss_is_the_batchs(how):
    torch.manual_seed(1)
    model, x = Measured(), randn(8, 16)
    expected = model(x)[1]
    assert expected not in [model(part)[1] for part in x.chunk(2)]
    options = {"slices": 2, "profile": "estimate"}
    for _ in range(2):
        if how == "step":
            found = TrainStep(model, results=True, **options)([x])[0]
        else:
            found = optimize(model, **options)(x)
        assert torch.equal(found[1], expected)
    with pytest.raises(OptionError, match="slices=2: result 1 is another in slices"):
        optimize(Measured(counts=True), **options)(x)


def test_a_python_number_of_a_result_is_refused_by_its_place():
    said = "slices=2: result 1 is a number that is another for each slice; .*layers.total"
    with pytest.raises(OptionError, match=said):
        optimize(Measured(item=True), slices=2, profile="estimate")(randn(8, 16))


def test_what_the_forward_counts_it_counts_once():
    """Slices of the first batch, which eager computes too, find what the whole batch finds."""

    class Warm(MLP):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    torch.manual_seed(1)
    model, x = Warm(), randn(8, 16)
    twin = optimize(model, slices=2, profile="estimate")
    body = MLP.forward(model, x)
    for i in range(1, 4):
        torch.testing.assert_close(twin(x), body * i)
        assert model.calls == i


def test_a_result_whose_size_depends_on_data_is_refused_if_it_requires_a_gradient():
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x[x[:, 0] > 0])

    model, even, uneven, some = Chosen(), *(torch.ones(8, 16) for _ in range(3))
    uneven[0], some[4:] = -1, -1
    twin = optimize(model, slices=2, profile="estimate")
    with pytest.raises(OptionError, match=r"result 0, .* of shapes \(3, 4\) \(of \(7, 4\)\) in"):
        twin(uneven)
    with pytest.raises(OptionError, match=r"result 0, .* of shapes \(0, 4\) \(of \(4, 4\)\) in"):
        twin(some)
    twin(even)
    with pytest.raises(OptionError, match=r"result 0, .* of shapes \(3, 4\) \(4, 4\) in slices"):
        twin(uneven)
    with torch.no_grad():
        torch.testing.assert_close(twin(uneven), model(uneven))


def test_gradients_that_are_added_up_sparsely():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4)

        def forward(self, places: Tensor) -> Tensor:
            return self.out(self.table(places))

    torch.manual_seed(1)
    model, places = Looks(), torch.arange(8) % 5
    outside(model(places)).backward()
    others = {name: p.grad.to_dense() for name, p in model.named_parameters()}
    twin = optimize(model, slices=2, profile="estimate")
    for _ in range(2):
        model.zero_grad()
        outside(twin(places)).backward()
        mine = {name: p.grad.to_dense() for name, p in model.named_parameters()}
        torch.testing.assert_close(mine, others)


@pytest.mark.parametrize("inside", [False, True])
def test_masks_under_autocast_are_of_its_type(inside):
    """The whole batch, of which masks are drawn, was traced without autocast."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

        def body(self, x: Tensor) -> Tensor:
            return F.dropout(self.last(F.dropout(self.first(x), 0.3)), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False) if inside else self.body(x)

    model, x = Dropped(), randn(8, 16)
    made: list[Any] = []
    for run in (model, optimize(model, slices=2, profile="estimate")):
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            out = run(x)
        outside(out.float()).backward()
        made.append((out.detach(), gradients(model), torch.get_rng_state()))
    (out, others, state), (mine, found, after) = made
    assert mine.dtype == torch.bfloat16
    assert torch.equal(after, state)
    torch.testing.assert_close(mine, out, rtol=0.05, atol=0.05)
    torch.testing.assert_close(found, others, rtol=0.05, atol=0.05)


def test_a_gradient_is_not_differentiated_again():
    """Without a word the second gradient was left out."""
    model, x = MLP(), randn(8, 16, requires_grad=True)
    twin = optimize(model, slices=2, profile="estimate")
    (gradient,) = torch.autograd.grad(outside(twin(x)), x, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(outside(model(x)), x)[0])
    with pytest.raises(RuntimeError, match="batch in slices is differentiated again"):
        (outside(twin(x)) + gradient.square().sum()).backward()


class Checkpointed(nn.Module):
    """Drops within and between blocks that eager runs again in its backward."""

    def __init__(self, preserve: bool) -> None:
        super().__init__()
        self.first, self.last, self.preserve = nn.Linear(16, 16), nn.Linear(16, 4), preserve

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return F.dropout(F.dropout(self.first(x), 0.3).relu(), 0.1)

        options = {"use_reentrant": False, "preserve_rng_state": self.preserve}
        x = F.dropout(checkpoint(block, x, **options), 0.5)
        return self.last(checkpoint(block, x, **options))


def test_checkpoints_that_drop_read_the_same_part_again():
    model, x = Checkpointed(True), randn(9, 16)
    twin = optimize(model, slices=3, profile="estimate", solver="full")
    torch.manual_seed(3)
    expected = model(x)
    outside(expected).backward()
    others = gradients(model)
    model.zero_grad()
    torch.manual_seed(3)
    found = twin(x)
    outside(found).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model), others)
    with pytest.raises(OptionError, match="draws other random numbers when it runs again"):
        optimize(Checkpointed(False), slices=3, profile="estimate", solver="full")(x)


def test_checkpoints_drop_beside_a_mean_of_counted_targets():
    """Slices whose means are weighed run beside each other, and have one backward."""

    class Trained(Checkpointed):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x), targets)

    model, x = Trained(True), randn(9, 16)
    targets = torch.tensor([0, 1, 2, 3, -100, 1, -100, -100, 2])
    twin = optimize(model, slices=3, profile="estimate", solver="full")
    torch.manual_seed(3)
    expected = model(x, targets)
    expected.backward()
    others = gradients(model)
    model.zero_grad()
    torch.manual_seed(3)
    found = twin(x, targets)
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model), others)


class Setting(nn.Module):
    """Sets attributes in its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.calls = nn.Linear(16, 4), kind, 0
        self.register_buffer("average", torch.zeros(4))
        self.cache: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []
        self.sizes: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.kind == "average":
            self.average = 0.9 * self.average + out.detach().mean(0)
        elif self.kind == "cache" and not self.cache:
            self.cache["scale"] = torch.arange(4.0)
        elif self.kind == "number":
            self.last = out.detach().sum()
        elif self.kind == "seen":
            self.seen.append(out.detach() * 2)
        elif self.kind == "samples":
            self.calls += len(x)
        elif self.kind == "distinct":
            self.sizes.add(len(x))
        elif self.kind == "shapes":
            self.seen.append(x.shape)
        elif self.kind == "item":
            self.last = float(out.detach().max())
        elif self.kind == "mean":
            self.last = out.detach().mean().item() * 0 + 1.0
        return out + self.cache["scale"] if self.cache else out


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("average", r"average, which the forward sets, .* \(of shape \(8,\) for \(4,\)"),
        ("number", "last, which the forward sets, is a number that is another for each slice"),
        ("samples", "calls, which the forward sets, is 4 for slice 0 and 8 for the batch"),
        ("shapes", r"seen\[0\]\[0\], which the forward sets, is 4 for slice 0 and 8 for the batch"),
        ("distinct", r"sizes, which the forward sets, is frozenset\(\{4\}\) for slice 0"),
        ("item", "last, which the forward sets, is .* for slice . and .* for the batch"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_what_the_forward_sets_is_the_batchs_or_refused(kind, said, grad):
    model, x = Setting(kind), randn(8, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.set_grad_enabled(grad), pytest.raises(OptionError, match=said):
        optimize(model, slices=2, profile="estimate")(x)
    assert_same(before, model.state_dict())
    assert (model.calls, model.seen) == (0, [])


def test_a_number_that_is_alike_for_slices_and_batch_may_be_set():
    model, x = Setting("mean"), randn(8, 16)
    twin = optimize(model, slices=2, profile="estimate")
    assert [twin(x).shape, model.last, twin.fallbacks] == [(8, 4), 1.0, []]


def test_a_cache_of_what_is_no_batch_is_kept():
    model, x = Setting("cache"), randn(8, 16)
    expected = model.inner(x) + torch.arange(4.0)
    twin = optimize(model, slices=2, profile="estimate")
    for _ in range(2):
        torch.testing.assert_close(twin(x), expected)
        assert torch.equal(model.cache["scale"], torch.arange(4.0))


def test_what_the_forward_keeps_of_each_sample_is_the_batchs():
    model, x = Setting("seen"), randn(8, 16)
    twin = optimize(model, slices=2, profile="estimate")
    outs = [twin(x + i) for i in range(2)]
    assert all(torch.equal(kept, out * 2) for kept, out in zip(model.seen, outs, strict=True))


def test_a_backward_comes_once_and_before_changes():
    torch.manual_seed(1)
    model, x = MLP(), randn(8, 16)
    twin = optimize(model, slices=2, profile="estimate")
    loss = outside(twin(x))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through a batch in slices"):
        loss.backward()
    loss = outside(twin(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place after the forward"):
        loss.backward()


def test_a_twin_in_slices_can_be_copied_and_changed():
    torch.manual_seed(1)
    model, x = MLP(), randn(8, 16)
    twin = optimize(model, slices=2, profile="estimate")
    twin(x)
    other = copy.deepcopy(twin)
    assert torch.equal(other(x), twin(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert not torch.equal(other(x), twin(x))
    torch.testing.assert_close(twin(x), model(x))


@pytest.mark.parametrize("grad", [True, False])
def test_auto_takes_the_number_of_slices_that_is_predicted_to_be_fastest(auto, grad):
    with on_fabric(), torch.set_grad_enabled(grad):
        batch = (tokens(32, 8), tokens(32, 8, seed=9))
        torch.manual_seed(1)
        model = gpt(layers=1)()
        twin = optimize(model, **auto)
        found = twin(*batch)
        (report,) = twin.graphs
        assert report.slices > 1
        parts = zip(*(leaf.chunk(report.slices) for leaf in batch), strict=True)
        expected = sum(model(*each).detach() / report.slices for each in parts)
        assert torch.equal(found.detach(), expected)
        assert twin.explain().count("ms predicted") == 3
        odd = twin(tokens(33, 8), tokens(33, 8, seed=9))  # cannot be cut
        assert torch.equal(odd, model(tokens(33, 8), tokens(33, 8, seed=9)))


def test_auto_runs_whole_what_is_refused(auto):
    with on_fabric():
        torch.manual_seed(1)
        model = gpt(layers=1)()
        model.head = nn.Sequential(model.head, Drawn())
        twin = optimize(model, **auto)
        batch = (tokens(32, 8), tokens(32, 8, seed=9))
        torch.manual_seed(2)
        found = twin(*batch)
        torch.manual_seed(2)
        assert torch.equal(found, model(*batch))
        assert [report.slices for report in twin.graphs] == [1]
        assert "2 slices: slices=2: " in twin.explain()


@pytest.mark.timeout(1800)
def test_calls_of_any_graph() -> None:
    """Each sample goes its own way through a random graph: results and gradients are bitwise those
    of plain accumulation over slices, in training and as forwards alone."""

    seen: Counter[str] = Counter()

    @settings(max_examples=max(4, settings.default.max_examples // 50))
    @given(
        recipe=recipes(max_steps=8),
        slices=st.sampled_from([2, 3, 4]),
        solver=st.sampled_from(["heu", "full"]),
    )
    def holds(recipe: Recipe, slices: int, solver: str) -> None:
        torch._dynamo.reset()
        steps = tuple(step for step in recipe.steps if step.op not in CROSSES)
        if not steps:
            return
        recipe = replace(recipe, steps=steps)
        world = on_fabric() if recipe.ranks > 1 else contextlib.nullcontext()
        with world, warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            torch.manual_seed(1)
            model, x = RandomModel(recipe), randn(24, WIDTH)
            parts = [[*model(each)] for each in x.chunk(slices)]
            ends = [i for i, out in enumerate(parts[0]) if out.requires_grad]
            if not ends:
                return
            whole = [torch.cat(column).detach() for column in zip(*parts, strict=True)]
            for part, k in zip(parts, range(slices), strict=True):
                gradients_of_it = [whole[i].cos().chunk(slices)[k] for i in ends]
                torch.autograd.backward([part[i] for i in ends], gradients_of_it)
            others = gradients(model)
            model.zero_grad()
            twin = optimize(model, slices=slices, profile="estimate", solver=solver)
            try:
                twin(x)
            except RuntimeWarning as warning:
                if "a result is a view of another" not in str(warning):
                    raise
                return
            for _ in range(2):
                model.zero_grad()
                found = [*twin(x)]
                assert all(map(torch.equal, found, whole))
                torch.autograd.backward([found[i] for i in ends], [whole[i].cos() for i in ends])
                assert_same(gradients(model), others)
            with torch.no_grad():
                expected = zip(*(model(each) for each in x.chunk(slices)), strict=True)
                assert all(map(torch.equal, twin(x), map(torch.cat, expected)))
        assert twin.fallbacks == []
        seen["examples"] += 1

    holds()
    assert seen["examples"] > 0
