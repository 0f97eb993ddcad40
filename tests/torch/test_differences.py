"""What is not as eager, and cannot be mended, is named with the line of the model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.variables import torch as torch_functions
from torch.utils.checkpoint import checkpoint

import overlapc


class Asks(nn.Module):
    """As transformers does: another branch when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x.sum(0) if is_traced() else sum(x)).square().sum()  # type: ignore[union-attr]


def is_traced() -> bool:
    return torch.compiler.is_compiling()


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)

    def forward(self, x: Tensor, breaks: bool) -> Tensor:
        x = self.one(x)
        rows = x.reshape(-1, 8)
        weight = self.two(rows).sigmoid()
        if breaks:
            torch._dynamo.graph_break()
        return (x + (weight * self.two(rows)).view_as(x)).square().sum()


class Checkpointed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), norm)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False).sum()


def planned(model: nn.Module, *args: Any) -> Any:
    model = overlapc.optimize(model, solver="none", profile="estimate")
    model(*args).backward()
    return model


def test_a_line_that_asks_whether_it_is_compiled() -> None:
    table = torch_functions.tracing_state_functions
    model = planned(Asks(), torch.randn(3, 8))
    (line,) = model.differences
    assert "test_differences.py" in line
    assert "in forward: asks whether it is compiled" in line
    assert f"may be not as eager: {line}" in model.explain()
    assert torch_functions.tracing_state_functions is table


def test_so_in_a_step_of_microbatches() -> None:
    step = overlapc.TrainStep(Asks(), solver="none", profile="estimate")
    step([(torch.randn(3, 8),)] * 2)
    assert "asks whether it is compiled" in step.explain()


@pytest.mark.parametrize("door", ["optimize", "TrainStep"])
def test_the_first_of_them_is_said_once(door: str) -> None:
    x = torch.randn(3, 8)
    options = {"solver": "none", "profile": "estimate"}
    if door == "optimize":
        run = overlapc.optimize(Asks(), **options)
    else:
        run = overlapc.TrainStep(Asks(), **options)
    said = r"may differ from eager's, as torch.compile's do: .*test_differences.py.*line \d+"
    with pytest.warns(RuntimeWarning, match=said):
        run(x if door == "optimize" else [x])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x if door == "optimize" else [x])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own
def test_a_view_that_leaves_a_graph() -> None:
    x = torch.randn(2, 3, 8)
    (line,) = planned(Viewed(), x, True).differences
    assert "in another order" in line
    assert planned(Viewed(), x, False).differences == []


class Filled(nn.Module):
    """What is masked is replaced by a number that learns, or by one that does not."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.token = nn.Parameter(torch.rand(()), requires_grad=learns)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).masked_fill(x > 0, self.token).square().sum()


def test_a_learning_number_that_fills_what_is_masked() -> None:
    (line,) = planned(Filled(True), torch.randn(3, 8)).differences
    assert "in forward: masked_fill: eager sums what fills it in another order" in line
    assert planned(Filled(False), torch.randn(3, 8)).differences == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)

    def forward(self, x: Tensor, shared: bool) -> Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        return (self.one(self.two(x)) if shared else self.two(x)).sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_parameter_of_two_graphs_under_autocast() -> None:
    found = []
    for shared in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            model = overlapc.optimize(Tied(), solver="none", profile="estimate")
            model(torch.randn(3, 8), shared)
        found.append(model.differences)
    assert len(found[0]) == 1
    assert "autocast" in found[0][0]
    assert found[1] == []


class Broken(nn.Module):
    """One layer, used as often in each of two graphs as `times` has it."""

    def __init__(self, times: tuple[int, int]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times[0]):
            x = self.layer(x).tanh()
        torch._dynamo.graph_break()
        for _ in range(self.times[1]):
            x = self.layer(x).tanh()
        return x.square().sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("times", "named"), [((2, 1), 2), ((1, 2), 0), ((2, 0), 0)])
def test_a_tensor_that_two_graphs_use(times: tuple[int, int], named: int) -> None:
    """Named are weight and bias; where nothing is, the gradients are eager's."""
    plain, x = Broken(times), torch.randn(16, 8)
    model = planned(copy.deepcopy(plain), x)
    assert len(model.differences) == named
    assert all("test_differences.py" in line for line in model.differences)
    if not named:
        plain(x).backward()
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


class HandsBack(nn.Module):
    def forward(self, x: Tensor, twice: bool) -> tuple[Tensor, Tensor]:
        return x, (x.exp() + x.sin() if twice else x.exp())


@pytest.mark.parametrize("twice", [True, False])
def test_an_input_that_is_used_and_handed_back(twice: bool) -> None:
    model = overlapc.optimize(HandsBack(), solver="none", profile="estimate")
    gradients = []
    for one in (model, HandsBack()):
        torch.manual_seed(0)
        x = torch.randn(16, 8, requires_grad=True)
        same, made = one(x, twice)
        (same.square() / 3 + made).sum().backward()
        gradients.append(x.grad)
    found = [line for line in model.differences if "as a result, so" in line]
    assert len(found) == twice
    assert twice or torch.equal(*gradients)


def test_a_buffer_that_a_checkpoint_changes() -> None:
    x = torch.randn(2, 3, 8, 8)
    lines = planned(Checkpointed(nn.BatchNorm2d(4)), x).differences
    assert all("once more in the backward" in line for line in lines)
    assert lines
    assert planned(Checkpointed(nn.GroupNorm(2, 4)), x).differences == []
    assert planned(Checkpointed(nn.BatchNorm2d(4).eval()), x).differences == []


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).prod(-1).sum()


def test_a_gradient_by_another_formula() -> None:
    (line,) = planned(Product(), torch.randn(3, 8)).differences
    assert "another formula" in line
    assert "test_differences.py" in line


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.one(x), self.two(x)


def test_a_result_that_the_loss_may_leave_out() -> None:
    model = overlapc.optimize(Heads(), solver="none", profile="estimate")
    model(torch.randn(3, 8))[0].sum().backward()
    assert model.two.weight.grad is not None  # eager leaves None
    (line,) = model.differences
    assert "zeros, not None" in line
    assert "test_differences.py" in line


class Reentrant(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.body, x, use_reentrant=True)
        return x.sum()


def test_a_parameter_of_several_reentrant_checkpoints() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    lines = planned(Reentrant(2), x).differences
    assert len(lines) == 2  # weight and bias
    assert all("one by one" in line for line in lines)
    assert planned(Reentrant(1), x).differences == []


class ReentrantAndNot(Reentrant):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.body(x)) + self.body(x).sum()


def test_a_parameter_of_a_reentrant_checkpoint_that_is_used_elsewhere() -> None:
    lines = planned(ReentrantAndNot(1), torch.randn(3, 8)).differences
    assert len(lines) == 2
    assert all("one by one" in line and "test_differences.py" in line for line in lines)


class Redraws(nn.Module):
    def __init__(self, preserves: bool, attends: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.preserves, self.attends = preserves, attends

    def draw(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.attends:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        return F.dropout(F.normalize(x), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        kept = checkpoint(self.draw, x, use_reentrant=False, preserve_rng_state=self.preserves)
        return kept.square().sum()


@pytest.mark.parametrize("attends", [False, True])
def test_random_numbers_of_a_checkpoint_that_draws_them_again(attends: bool) -> None:
    x = torch.randn(2, 3, 8)
    (line,) = planned(Redraws(preserves=False, attends=attends), x).differences
    assert "preserve_rng_state=False" in line
    assert "test_differences.py" in line
    assert planned(Redraws(preserves=True, attends=attends), x).differences == []


class WithoutZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first if second is None else second


class UsesOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, _ = WithoutZeros.apply(self.body(x))
        return first.sum()


def test_a_function_that_wants_no_zeros() -> None:
    (line,) = planned(UsesOne(), torch.randn(3, 8)).differences
    assert "WithoutZeros is given zeros, where eager gives None" in line
    assert "test_differences.py" in line


def test_an_ordinary_model_has_none() -> None:
    body = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = overlapc.optimize(body, solver="none", profile="estimate")
    model(torch.randn(2, 3, 8)).sum().backward()
    assert model.differences == []
    assert "not as eager" not in model.explain()


def test_calls_in_one_region_of_autocast_are_named() -> None:
    model: Any = overlapc.optimize(nn.Linear(8, 8), solver="none", profile="estimate")
    x, clear = torch.randn(4, 8), torch.clear_autocast_cache
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()
    assert model.differences == []
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(x).float().sum() + model(x).float().sum()
    loss.backward()
    assert model.differences == []
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum() + model(x).float().sum()
    loss.backward()
    (found,) = model.differences
    assert "several calls in one region of autocast" in found
    assert torch.clear_autocast_cache is clear


class Numpys(nn.Module):
    """Divides by a root as many models do, and may ask numpy for more."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) / np.sqrt(24)
        if self.more:
            x = x + torch.from_numpy(np.cumsum(x.detach().numpy()[0]))
        return x.square().sum()


def test_numpy_is_named_where_it_is_no_number() -> None:
    x = torch.randn(4, 8)
    assert planned(Numpys(False), x).differences == []
    assert any("numpy is traced as torch" in line for line in planned(Numpys(True), x).differences)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class Within(nn.Module):
    """Does its work in the body of a custom Function or of a checkpoint."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.what == "Function":
            return Sine.apply(x).sum()
        return checkpoint(lambda x: x.prod(1).sum(), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("what", "said"),
    [("Function", "numpy is traced as torch"), ("checkpoint", "by another formula")],
)
def test_bodies_of_functions_and_checkpoints_are_looked_at(what: str, said: str) -> None:
    assert any(said in line for line in planned(Within(what), torch.randn(4, 8)).differences)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_of_smoothed_labels(smoothing: float) -> None:
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 20)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            weight = torch.linspace(0.5, 2.0, 20)
            return F.cross_entropy(self.linear(x), targets, weight, label_smoothing=smoothing)

    torch.manual_seed(0)
    targets = torch.randint(0, 20, (24,))
    targets[::3] = -100
    twin = planned(Smoothed(), torch.randn(24, 8), targets)
    assert any("smoothed labels" in line for line in twin.differences) == (smoothing > 0)


class Hooked(nn.Module):
    """Sets a hook behind the first use of a tensor, which may be a result."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.given = given

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        early = x.sin()
        x.register_hook(lambda gradient: gradient * 0.5)
        return (x.cos() + early, x) if self.given else (x.cos() + early,)


@pytest.mark.parametrize("given", [False, True])
def test_a_hook_on_a_result_is_named(given: bool) -> None:
    pytest.importorskip("torch._higher_order_ops.register_hook")
    model = Hooked(given)
    twin = overlapc.optimize(copy.deepcopy(model), solver="none", profile="estimate")
    x = torch.randn(4, 8)
    kept = []
    for each in (model, twin):
        *_, result = results = each(x)
        result.retain_grad()
        sum(out.sum() for out in results).backward()
        kept.append(result.grad)
    assert torch.equal(model.linear.weight.grad, twin.linear.weight.grad)
    assert torch.equal(*kept) != given
    assert any("register_hook" in line for line in twin.differences) == given


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Scripts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return scripted(self.linear(x))


def test_a_function_of_torchscript() -> None:
    twin = overlapc.optimize(Scripts(), profile="estimate")
    twin(torch.randn(4, 8)).sum().backward()
    (line,) = twin.differences
    assert "scripted is TorchScript's" in line
    assert "test_differences.py" in line
