"""What Dynamo gives up without an error is said, once, with reason and place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

import overlapc
from overlapc import api
from overlapc.core import errors
from overlapc.runtime.train_step import TrainStep
from tests.torch.exact import needs_torch

# Which function it gave up Dynamo says since torch 2.12.
SAYS_WHERE = hasattr(getattr(eval_frame, "dynamo_tls", eval_frame), "skip_reasons")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class InALoop(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == 2:
                torch._dynamo.graph_break()
            x = x + layer(x)
        return x


class InATry(Layer):
    def forward(self, x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            return super().forward(x)
        finally:
            x = x + 1


class Between(Layer):
    """Dynamo goes on after this one: two graphs, and nothing between them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def optimized(model: nn.Module, **options: Any) -> Any:
    return overlapc.optimize(model, solver="none", profile="estimate", **options)


def trained(model: Any, *shapes: int) -> list[str]:
    """What was said while the model was trained."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in shapes:
            model(torch.randn(rows, 8)).sum().backward()
    said = [str(each.message) for each in caught if "overlapc" in str(each.message)]
    return [each for each in said if "numbers may differ" not in each]  # see .differences


@pytest.mark.parametrize(
    "make", [lambda: InALoop(lambda: nn.Linear(8, 8)), lambda: InALoop(Layer), InATry]
)
def test_a_function_given_up_is_said_once(make: Callable[[], nn.Module]) -> None:
    model = optimized(make())
    said = trained(model, 3, 3, 3)
    assert len(said) == 1
    assert "graph_break" in said[0]
    places = [where for where in ("forward", "the whole model") if where in said[0]]
    assert places == (["forward"] if SAYS_WHERE else ["the whole model"])
    assert said[0].count("test_given_up.py") == 1 + SAYS_WHERE
    (what,) = model.fallbacks
    assert f"{what} (runs as plain PyTorch)" in model.explain()


def test_what_goes_on_after_a_break_is_planned() -> None:
    model = optimized(Between())
    assert trained(model, 3, 3) == []
    assert len(model.graphs) == 2


class Packed(Layer):
    """Dynamo takes no packed sequence: the LSTM runs between the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 4)
        packed = pack_padded_sequence(self.linear(x).view(len(x), 4, 2).repeat(1, 1, 4), lengths,
                                      batch_first=True)  # fmt: skip
        found: Tensor = pad_packed_sequence(self.body(packed)[0])[0]
        return found.tanh()


class Disabled(Layer):
    """A part of it is kept from Dynamo."""

    def forward(self, x: Tensor) -> Tensor:
        return self.apart(super().forward(x)).tanh()

    @torch.compiler.disable
    def apart(self, x: Tensor) -> Tensor:
        return self.linear(x).exp()


@pytest.mark.parametrize(
    ("make", "ops"),
    [
        # Dynamo before torch 2.13 fails behind such a sequence, in the middle of the model.
        pytest.param(Packed, "RnnLayer, PackPadded", marks=needs_torch("2.13")),
        (Disabled, "Addmm, Exp"),
    ],
)
def test_what_runs_between_graphs_is_said_once(make: Callable[[], nn.Module], ops: str) -> None:
    model = optimized(make())
    (said,) = trained(model, 3, 3)
    assert "between its graphs" in said
    assert ops in said
    assert "test_given_up.py" in said
    assert len(model.fallbacks) == 1
    assert model.fallbacks[0] in model.explain()


def test_a_hook_is_no_op_between_graphs() -> None:
    model = Disabled()
    model.linear.register_full_backward_hook(lambda *_: None)
    (said,) = trained(optimized(model), 3, 3)
    assert "between its graphs (Addmm, Exp)" in said


class IfAny(Layer):
    """It asks how many there are, which is data."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x).masked_select(x > 0)
        return found.exp() if found.numel() else self.linear(x)


class Hooked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(lambda *_: None)


class Prints(Layer):
    def forward(self, x: Tensor) -> Tensor:
        print("in the middle")
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [(Prints, "it calls print"), (Hooked, "a full backward hook"), (IfAny, "a value of a tensor")],
)
def test_common_breaks_are_said_in_users_words(make: Callable[[], nn.Module], said: str) -> None:
    step = overlapc.TrainStep(make(), lambda model, x: model(x).sum(), profile="estimate")
    with pytest.warns(RuntimeWarning, match=said):
        step([torch.randn(2, 8, requires_grad=True) for _ in range(2)])


class OrElse(Layer):
    """It finds out by an error which shape it was given."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.linear(x.view(-1, 5))
        except RuntimeError:
            return super().forward(x)


def test_an_error_that_the_model_catches() -> None:
    model, x = OrElse(), torch.randn(2, 8)
    twin = optimized(model)
    (said,) = trained(twin, 2, 2)
    assert "the whole model unchanged" in said
    assert "view(" in said
    assert "test_given_up.py" in said
    assert torch.equal(twin(x), model(x))


def test_an_error_of_the_models_own_leaves_it_planned() -> None:
    model = Layer()
    twin = optimized(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        twin(torch.randn(2, 7))
    assert trained(twin, 2) == []
    assert len(twin.graphs) == 1
    assert twin.fallbacks == []


def test_a_branch_by_a_size_that_is_data() -> None:
    model, given = IfAny(), [torch.randn(2, 8), -torch.ones(2, 8)]
    for x in given:
        model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    twin = optimized(model)
    with pytest.warns(RuntimeWarning, match="between its graphs .MaskedSelect"):
        [twin(x).sum().backward() for x in given]
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
    assert twin.graphs
    model.zero_grad()
    step = overlapc.TrainStep(model, lambda model, x: model(x).sum(), profile="estimate")
    with pytest.warns(RuntimeWarning, match="data-dependent"):
        step(given)
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))


class Inverse(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.linalg.inv(self.linear.weight + 8 * torch.eye(8))


@needs_torch("2.13")  # where it has effects
def test_an_op_whose_effects_keep_their_order() -> None:
    model, x = Inverse(), torch.randn(2, 8)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    step = overlapc.TrainStep(model, lambda model, x: model(x).sum(), profile="estimate")
    with pytest.warns(RuntimeWarning, match="expected an op without any .torch.linalg.inv_ex"):
        step([x])
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))


def test_many_models_of_a_class_are_planned() -> None:
    models = [optimized(Layer()) for _ in range(12)]
    assert [trained(model, 3) for model in models] == [[]] * 12
    assert [len(model.graphs) for model in models] == [1] * 12


def test_many_shapes_are_planned() -> None:
    model = optimized(Layer(), dynamic=False)
    assert trained(model, *range(2, 14)) == []
    assert len(model.graphs) == 12


def test_too_many_shapes_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api._SETTINGS, "recompile_limit", 2)
    model = optimized(Layer(), dynamic=False)
    (said,) = trained(model, 2, 3, 4, 4, 5, 6)
    assert "recompile limit" in said
    assert "recompile limit" in model.explain()
    assert len(model.graphs) == 2


def test_dynamo_off_is_said() -> None:
    model = optimized(Layer())
    with torch._dynamo.config.patch(disable=True):
        (said,) = trained(model, 2, 2)
    assert "torch.compile" in said
    assert model.graphs == []


class _Watches(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:overlapc:RuntimeWarning")
@pytest.mark.parametrize("door", ["optimize", "TrainStep"])
def test_a_forward_within_a_dispatch_mode_runs_once(door: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    planned: Any = (
        overlapc.optimize(model, profile="estimate")
        if door == "optimize"
        else TrainStep(model, lambda model, x: model(x).sum(), profile="estimate")
    )
    x = torch.randn(3, 4)
    for calls in (1, 2):
        with _Watches():
            planned(x) if door == "optimize" else planned([x])
        assert int(model[1].num_batches_tracked) == calls
    assert "_Watches" in planned.explain()
    for _ in range(2):
        planned(x).sum().backward() if door == "optimize" else planned([x])
    assert int(model[1].num_batches_tracked) == 4
    assert planned.graphs if door == "optimize" else planned.report


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_rnns_are_planned(kind: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = getattr(nn, kind)(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.body(x)[0]
            return found

    model = optimized(Recurrent())
    assert trained(model, 3, 3) == []
    assert len(model.graphs) == 1


class Named(Tensor):
    """A subclass of one tensor, as users make them to carry a name along."""


def test_a_tensor_subclass_runs_as_plain_pytorch() -> None:
    model, x = Layer(), torch.randn(2, 8)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with pytest.warns(RuntimeWarning, match=r"takes a .*Named, .*as_subclass"):
        optimized(model)(x.as_subclass(Named)).sum().backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
    model.zero_grad()
    step = overlapc.TrainStep(model, lambda model, x: model(x).sum(), profile="estimate")
    with pytest.warns(RuntimeWarning, match=r"takes a .*Named, .*as_subclass"):
        step([x.as_subclass(Named)])
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))


def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(errors.OptionError, match="pass the module that it was scripted"):
        overlapc.optimize(torch.jit.script(nn.Linear(2, 2)))


def test_a_twin_is_not_optimized_again() -> None:
    twin = overlapc.optimize(Layer())
    assert overlapc.optimize(twin) is twin
    with pytest.raises(errors.OptionError, match="expected the model that was passed"):
        overlapc.TrainStep(nn.Sequential(twin))


class Combines(Layer):
    """Dynamo fails at the pairs of what is known only as it runs, here behind a graph break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.combinations(x[0])


@pytest.mark.parametrize("breaks", [False, True])
def test_where_dynamo_fails_behind_a_break_the_rest_runs_unchanged(breaks: bool) -> None:
    model, x = Combines(breaks), torch.randn(3, 8)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    twin = overlapc.optimize(model, profile="estimate")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twin(x).sum().backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
    assert twin.graphs
    assert not breaks or any("Dynamo failed" in str(each.message) for each in caught)
    assert not breaks or "test_given_up.py" in twin.fallbacks[0]


class DynamoFails(Layer):
    """Dynamo knows no `context_fn` that is a function of PyTorch's own."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(  # type: ignore[no-any-return]
            super().forward, x, use_reentrant=False, context_fn=noop_context_fn
        )


def test_where_dynamo_fails_the_model_runs_unchanged() -> None:
    model, x = DynamoFails(), torch.randn(3, 8)
    twin = overlapc.optimize(model)
    with pytest.warns(RuntimeWarning, match="the whole model unchanged.*Dynamo failed"):
        twin(x).sum().backward()
    assert torch.equal(twin(x), model(x))  # and is said once
    assert len(twin.fallbacks) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"timeout_s": "7"},
        {"timeout_s": -1},
        {"hardware": 5},
        {"cache": 5},
        {"dynamic": "no"},
        {"dynamic": 1},
    ],
)
def test_an_option_of_another_kind(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(errors.OptionError, match=f"{name}=.*expected"):
        overlapc.optimize(Layer(), **given)


@pytest.mark.parametrize("given", [{"memory_budgt": 1}, {"solver": "ovelap"}])
def test_a_typo_in_the_options_of_the_backend(given: dict[str, Any]) -> None:
    with pytest.raises(BackendCompilerFailed, match=r"OptionError: .*expected one of"):
        torch.compile(Layer(), backend="overlapc", options=given)(torch.randn(3, 8))
