"""Objects that hold tensors, among a sliced model's results and arguments."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from overlapc import TrainStep, optimize
from overlapc.core.errors import OptionError
from overlapc.megatron.outside import left_outside
from overlapc.state.objects import inside, joined
from overlapc.state.snapshot import answers, is_a, is_looked_into
from tests.torch.exact import DYNAMO_WARNINGS, needs_torch, randn

# Dynamo of torch 2.11 does not trace `vars` of an object: such a batch runs uncut, with a warning.
pytestmark = [*DYNAMO_WARNINGS, needs_torch("2.12")]
Gradients = list[Tensor | None]


class Held:
    """Holds what it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Layers(Held):
    def add(self, key: Tensor) -> None:
        self.layers.append(Held(key=key, length=key.shape[1]))


class Returns(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = nn.Linear(16, 8), call

    def forward(self, x: Tensor, **more: Any) -> Any:
        return self.call(self, x, self.inner(x), **more)


def made(call: Callable[..., Any]) -> tuple[Returns, Any, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Returns(call)
    return model, optimize(model, slices=2, profile="estimate"), randn(8, 16)


def compare(found: Any, model: nn.Module, x: Tensor) -> None:
    """Is this what the slices hold, put together, and what the batch holds?"""
    whole, parts = inside("", model(x)), [inside("", model(each)) for each in x.chunk(2)]
    mine = inside("", found)
    assert mine.keys() == whole.keys()
    for name, value in mine.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, whole[name])
            shared = not value.dim() or value.shape[0] != x.shape[0] or value.requires_grad
            each = [part[name] for part in parts]
            assert torch.equal(value, each[0] if shared else torch.cat(each))
        else:
            assert value == whole[name]


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x, y: (y, Held(keys=y * 2, kind=y.dtype, length=x.shape[1])),
        lambda m, x, y: Held(out=y, layers=[Held(k=y + i, v=y - i) for i in range(3)]),
        lambda m, x, y: {"out": y, "cache": Held(by_name={"k": y.relu(), "n": (1, "a", None)})},
        lambda m, x, y: (y * 2, Held(one=y, again=y, view=y[:, 1:], of_input=x + 1)),
        lambda m, x, y: (y, Held(weight=m.inner.weight, two=torch.tensor(2.0), at=x.device)),
        lambda m, x, y: (y, Held()),
    ],
)
def test_tensors_in_objects_are_put_together(call):
    model, twin, x = made(call)
    with torch.no_grad():
        for i in range(2):
            compare(twin(x + i), model, x + i)
    assert "each tensor in it along dimension 0" in twin.explain()
    assert twin.fallbacks == []


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    loss: Tensor
    logits: Tensor


def plainly(model: nn.Module, x: Tensor, slices: int, wanted: Callable[[Any], Tensor]) -> Gradients:
    """The gradients of accumulation over slices."""
    model.zero_grad()
    for each in x.chunk(slices):
        (wanted(model(each)) / slices).backward()
    return taken(model)


def taken(model: nn.Module) -> Gradients:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def same(mine: Gradients, others: Gradients) -> bool:
    pairs = zip(mine, others, strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


LOSSES = [
    lambda m, x, y: Output(y.square().mean(), y),
    lambda m, x, y: Frozen(y.square().mean(), y.detach()),
    lambda m, x, y: Output(
        y.square().mean(), y.t() * 2, {"kept": [y + 1, (Held(z=y * 2, n=3), 1)]}
    ),
    lambda m, x, y: (Output(y.square().mean(), y), y.argmax(1)),
]


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("call", LOSSES)
def test_a_loss_in_an_object_is_the_batchs(call, slices):
    """`optimize`: the loss of the returned object has the gradients of the slices'."""

    def wanted(result: Any) -> Tensor:
        found = result[0] if isinstance(result, tuple) else result
        return found.loss

    model, _, x = made(call)
    twin = optimize(model, slices=slices, profile="estimate")
    for i in range(2):
        expected = plainly(model, x + i, slices, wanted)
        result = twin(x + i)
        wanted(result).backward()
        assert same(taken(model), expected)
        whole, parts = model(x + i), [wanted(model(each)) for each in (x + i).chunk(slices)]
        assert torch.equal(wanted(result), sum(part / slices for part in parts))
        mine, theirs = inside("", result), inside("", whole)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(mine[name], value)
                assert mine[name].requires_grad == value.requires_grad
    assert twin.fallbacks == []
    assert ".loss mean" in twin.explain()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("call", [*LOSSES[:2], LOSSES[3]])
def test_a_loss_in_an_object_is_the_batchs_without_gradients(call, slices, mode):
    """In evaluation, or where nothing requires a gradient; and the first batch may be one of whose
    slices the losses are alike."""

    def wanted(result: Any) -> Tensor:
        found = result[0] if isinstance(result, tuple) else result
        return found.loss

    model, _, _ = made(call)
    twin = optimize(model.requires_grad_(mode is not None), slices=slices, profile="estimate")
    with contextlib.nullcontext() if mode is None else mode():
        for x in (torch.zeros(12, 16), randn(12, 16)):
            result = twin(x)
            whole, parts = model(x), [wanted(model(each)) for each in x.chunk(slices)]
            assert torch.equal(wanted(result), sum(part / slices for part in parts))
            mine, theirs = inside("", result), inside("", whole)
            assert mine.keys() == theirs.keys()
            pairs = [(mine[n], value) for n, value in theirs.items() if isinstance(value, Tensor)]
            assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
    assert twin.fallbacks == []
    assert ".loss mean" in twin.explain()


def test_a_number_that_the_model_keeps_stays_in_its_object():
    def call(m: Any, x: Tensor, y: Tensor) -> Any:
        return y, Held(scale=m.scale, rows=y)

    model, twin, x = made(call)
    model.register_buffer("scale", torch.tensor(3.0))
    with torch.no_grad():
        for _ in range(2):
            assert twin(x)[1].scale.item() == 3.0
    assert twin.fallbacks == []


def test_what_stands_at_two_places_of_an_object_is_one_result():
    def call(m: Any, x: Tensor, y: Tensor) -> Any:
        pair = (y * 2, y + 1)
        return Output(y.square().mean(), y, [pair, pair, y])

    def loss(result: Any) -> Tensor:
        (one, _), (again, more), out = result.more
        return result.loss + (one * more).mean() + again.square().mean() + out.sum() / len(out)

    model, twin, x = made(call)
    loss(model(x)).backward()
    expected = taken(model)
    for _ in range(2):
        loss(twin(x)).backward()
        torch.testing.assert_close(taken(model), expected)
    assert twin.fallbacks == []


def test_a_loss_of_what_an_object_holds():
    """The loss is outside of the model, and reads tensors that lie differently in the batch."""

    def wanted(result: Any) -> Tensor:
        return (result.logits.square() * 2).mean() + result.more["kept"][0].square().mean()

    model, twin, x = made(lambda m, x, y: Output(None, y.t() * 2, {"kept": [y + 1, y.relu()]}))
    model.zero_grad()
    wanted(model(x)).backward()
    expected = taken(model)
    for _ in range(2):
        result = twin(x)
        wanted(result).backward()
        for mine, other in zip(taken(model), expected, strict=True):
            torch.testing.assert_close(mine, other)
    assert twin.fallbacks == []
    assert "result 0.logits along dimension 1" in twin.explain()


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(
    "call", [*LOSSES[:2], lambda m, x, y: Output(y.square().mean(), y, [(Held(z=y * 2, n=3), 1)])]
)
def test_a_step_takes_the_loss_of_an_object(call, slices):
    model, _, x = made(call)
    step = TrainStep(model, slices=slices, results=True, profile="estimate")
    for i in range(2):
        expected = plainly(model, x + i, slices, lambda result: result.loss)
        (found,) = step([x + i])
        assert same(taken(model), expected)
        whole = inside("", model(x + i))
        for name, value in inside("", found).items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(value, whole[name].detach())
                assert not value.requires_grad
    assert step.fallbacks == []


class Slots:
    __slots__ = ("kept",)


def in_slots(x: Tensor) -> Slots:
    found = Slots()
    found.kept = x
    return found


def test_a_gradient_in_an_object_that_is_not_opened_runs_uncut():
    _, twin, x = made(lambda m, x, y: (y.square().mean(), in_slots(y)))
    with pytest.warns(RuntimeWarning, match="in an object without a `__dict__`"):
        loss, _ = twin(x)
    loss.backward()
    assert len(twin.fallbacks) == 1


class Pair:
    def __init__(self, key: Tensor, turned: Tensor) -> None:
        self.key, self.turned = key, turned


def test_a_registered_class_has_its_own_dimension_for_each_tensor():
    def call(m: Any, x: Tensor, y: Tensor) -> Any:
        return y, Pair(y * 2, y.t() * 3)

    pytree.register_pytree_node(
        Pair, lambda p: ([p.key, p.turned], None), lambda parts, _: Pair(*parts)
    )
    try:
        model, twin, x = made(call)
        with torch.no_grad():
            for _ in range(2):
                out, pair = twin(x)
                expected, whole = model(x)
                torch.testing.assert_close(out, expected)
                torch.testing.assert_close(pair.key, whole.key)
                torch.testing.assert_close(pair.turned, whole.turned)
        assert "result 2 along dimension 1" in twin.explain()
    finally:
        pytree._deregister_pytree_node(Pair)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, x, y: (y, Held(rows=y.shape[0])), r"result 1\.rows is another .*\(4 for 8"),
        (lambda m, x, y: (y, Held(turned=y.t() + 1)), r"result 1\.turned is another in slices"),
        (lambda m, x, y: (y, Held(a=[{"b": x}])), r"result 1\.a\[0\]\['b'\] is an input"),
        (lambda m, x, y: (y, Held(a=x[:, 1:])), r"result 1\.a is an input or a view of one"),
        (lambda m, x, y: (y, Held(total=y.sum())), r"result 1\.total is another in slices"),
        (lambda m, x, y: (y, Held(n=y.argmax(1).sum())), r"result 1\.n is .* for slices"),
        (lambda m, x, y: (y, Held(places=torch.arange(3))), r"result 1\.places is another"),
        (lambda m, x, y: (y, Held(l=Held(mean=y - y.mean(0)))), r"result 1\.l\.mean is another"),
    ],
)
def test_what_an_object_holds_is_refused_by_its_place(call, said):
    _, twin, x = made(call)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(OptionError, match=rf"slices=2: {said}"):
            twin(x)
    assert twin.fallbacks == []


@pytest.mark.parametrize("part", [slice(None), slice(1, None)])
def test_an_input_as_an_attribute_is_refused_by_its_name(part):
    """It was the last slice's input, without a word."""

    def call(m: Any, x: Tensor, y: Tensor) -> Any:
        m.seen = x[:, part] if part.start else x
        return y

    _, twin, x = made(call)
    with pytest.raises(OptionError, match=r"seen, which the forward sets, is an input"):
        twin(x)


def test_an_object_that_is_given_is_filled_once_and_one_that_holds_the_batch_runs_uncut():
    def call(m: Any, x: Tensor, y: Tensor, cache: Any) -> Any:
        if cache.layers:
            y = y + cache.layers[0].key
        cache.add(y * 2)
        return y, cache

    model, twin, x = made(call)
    with torch.no_grad():
        for i in range(2):
            mine, others = Layers(layers=[]), Layers(layers=[])
            out, found = twin(x + i, cache=mine)
            expected, _ = model(x + i, cache=others)
            assert found is mine
            assert len(mine.layers) == 1
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(mine.layers[0].key, others.layers[0].key)
        assert twin.fallbacks == []
        with pytest.warns(RuntimeWarning, match="uncut: an argument is a Layers that holds tensor"):
            out, _ = twin(x, cache=mine)
        expected, _ = model(x, cache=others)
        torch.testing.assert_close(out, expected)
        assert [len(mine.layers), len(others.layers)] == [2, 2]
        twin(x, cache=mine)  # warned of once
        twin(x, cache=Layers(layers=[]))
    assert len(twin.graphs) == 1


LEAVES = st.sampled_from(["batched", "number", "text", "none", "scalar"])
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda d: Held(**d))
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(tree=TREES, count=st.integers(2, 4))
def test_any_object_is_joined_place_by_place(tree, count):
    """What is joined from the slices' objects is what the batch's holds."""
    numbers = torch.arange(12.0 * count).reshape(4 * count, 3)

    def filled(tree: Any, rows: Tensor) -> Any:
        if isinstance(tree, str):
            return {
                "batched": rows * 2,
                "number": 3,
                "text": "x",
                "none": None,
                "scalar": torch.tensor(1.5),
            }[tree]
        if isinstance(tree, dict):
            return {key: filled(part, rows) for key, part in tree.items()}
        if isinstance(tree, Held):
            return Held(**filled(vars(tree), rows))
        return type(tree)(filled(part, rows) for part in tree)

    whole = inside("it", Held(tree=filled(tree, numbers)))
    parts = [inside("it", Held(tree=filled(tree, rows))) for rows in numbers.chunk(count)]
    assert all(part.keys() == whole.keys() for part in parts)
    for name, value in whole.items():
        found = joined(name, [part[name] for part in parts])
        assert torch.equal(found, value) if isinstance(value, Tensor) else found == value


def test_an_object_within_itself_is_opened_once():
    ring = Held(x=torch.ones(2))
    ring.again, ring.more = ring, [ring]
    assert [*inside("it", ring)] == ["it.x"]


def test_a_module_may_hold_a_list_that_holds_itself():
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    model.ring = [1]
    model.ring.append(model.ring)
    step = TrainStep(model, lambda model, x: model(x).mean(), slices=2, profile="estimate")
    step([torch.ones(4, 4)])
    assert torch.allclose(model.bias.grad, torch.full((4,), 0.25))


class Refuses:
    """Answers for attributes that it has not, as a Pydantic model's validator does."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is asked of a class that cannot be made")


# Returns, above, has this module's namespace for the names of its methods.
REFUSES = [Refuses(), weakref.proxy(Held())]


@pytest.mark.parametrize("which", range(len(REFUSES)))
def test_an_object_that_refuses_to_be_asked_is_not_looked_into(which: int) -> None:
    value = REFUSES[which]
    assert not is_looked_into(value)
    assert not answers(value, "cache_clear")
    assert not is_a(value, type)


def test_refusing_objects_around_a_model_are_left_alone() -> None:
    with left_outside(Returns(lambda model, x, y: y), "forward"):
        pass
