"""Whatever changes in Python between two steps: the gradients are those of the model as it is."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import overlapc
from overlapc.core.errors import CaptureError
from overlapc.runtime.pipeline import Pipeline
from overlapc.runtime.train_step import TrainStep
from overlapc.solvers.pipeline.schedules import make_schedule
from tests.torch.exact import bits, needs_torch, randn

FACTOR = 1.0  # a global that the loss reads
SETTINGS = {"power": 2, "use": "mean"}


def bend(x: Tensor) -> Tensor:
    return x.sin()


def bend_otherwise(x: Tensor) -> Tensor:
    return x.tanh() * 1.5


class Block(nn.Module):
    slope = 0.5  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 16)
        self.act: nn.Module = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.narrow = nn.Linear(16, 8)
        self.scale = 1.0
        self.repeats = 1
        self.residual = True
        self.function = bend
        self.register_buffer("mask", torch.ones(8))
        self.plain_tensor = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for _ in range(self.repeats):
            y = self.narrow(self.drop(self.act(self.wide(y)))) * self.mask
        y = self.function(self.shape(y)) * self.scale * self.plain_tensor
        return x + y if self.residual else y

    def shape(self, y: Tensor) -> Tensor:
        return F.leaky_relu(y, self.slope)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.seen: list[float] = []
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        loss = (self.head(x) - y).abs().pow(SETTINGS["power"])
        return (loss.mean() if SETTINGS["use"] == "mean" else loss.sum()) * FACTOR


class World:
    """A model, and what can be changed about it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Net()
        self.weight = 1.0
        self.class_weights = torch.rand(4) + 0.5
        self.autocast = False
        self.count = 3
        self.rows = 3
        self.handles: list[Any] = []

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        extra = (self.class_weights * model.head.weight.mean(1)).sum()
        total: Tensor = model(x, y) * self.weight + extra
        return total

    def ending(self, out: Tensor, y: Tensor) -> Tensor:
        """The loss of a pipeline."""
        loss = (out - y).abs().pow(SETTINGS["power"])
        return (loss.mean() if SETTINGS["use"] == "mean" else loss.sum()) * FACTOR * self.weight

    def block(self) -> Block:
        found = self.random.choice(list(self.model.blocks))
        assert isinstance(found, Block)
        return found

    def changes(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        block, pick = self.block(), self.random.choice
        yield "dropout.p", lambda: setattr(block.drop, "p", pick([0.0, 0.1, 0.5]))
        yield "scale", lambda: setattr(block, "scale", self.random.random() + 0.5)
        yield "repeats", lambda: setattr(block, "repeats", pick([1, 2]))
        yield "residual", lambda: setattr(block, "residual", not block.residual)
        yield "module", lambda: setattr(block, "act", pick([nn.ReLU, nn.Identity, nn.GELU])())
        yield "function", lambda: setattr(block, "function", pick([bend, bend_otherwise]))
        yield "class", lambda: setattr(Block, "slope", pick([0.1, 0.5, 0.9]))
        yield "method", lambda: setattr(Block, "shape", pick([SHAPE, OTHER_SHAPE]))
        yield "own method", lambda: self.own_method(block)
        yield "closure", lambda: setattr(self, "weight", self.random.random() + 0.5)
        yield "closure's tensor", lambda: setattr(self, "class_weights", torch.rand(4))
        yield "global", lambda: globals().update(FACTOR=pick([1.0, 2.0, 0.25]))
        yield "dict", lambda: SETTINGS.update(power=pick([1, 2]), use=pick(["mean", "sum"]))
        yield "buffer", lambda: setattr(block, "mask", torch.rand(8))
        yield "buffer in place", lambda: block.mask.mul_(0.9)
        yield "tensor", lambda: setattr(block, "plain_tensor", torch.rand(8))
        yield (
            "frozen",
            lambda: block.wide.weight.requires_grad_(not block.wide.weight.requires_grad),
        )
        yield "bias", lambda: self.other_bias(block)
        yield "parameter", lambda: setattr(block.narrow, "bias", nn.Parameter(torch.rand(8)))
        yield "data", lambda: block.narrow.bias.data.add_(0.5)
        yield "eval", lambda: block.train(not block.training)
        yield "order", lambda: self.model.blocks.insert(0, self.model.blocks.pop(-1))
        yield "hook", lambda: self.hook(block)
        yield "pre-hook", lambda: self.hook(block, before=True)
        yield "no hooks", self.unhook
        yield "hook on a gradient", lambda: self.hook_gradient(block)
        yield "autocast", lambda: setattr(self, "autocast", not self.autocast)
        yield "count", lambda: setattr(self, "count", pick([1, 2, 3]))
        yield "rows", lambda: setattr(self, "rows", pick([3, 4]))
        yield "tied", lambda: self.tie()
        yield "eps", lambda: setattr(block.norm, "eps", pick([1e-5, 1e-2]))

    def other_bias(self, block: Block) -> None:
        block.wide.bias = None if block.wide.bias is not None else nn.Parameter(torch.rand(16))

    def own_method(self, block: Block) -> None:
        if "shape" in block.__dict__:
            del block.__dict__["shape"]
        else:
            block.__dict__["shape"] = lambda y: y.cos()

    def hook(self, block: Block, before: bool = False) -> None:
        factor = self.random.random() + 0.5
        if before:
            add = block.register_forward_pre_hook(lambda module, given: (given[0] * factor,))
        else:
            add = block.register_forward_hook(lambda module, given, out: out * factor)
        self.handles.append(add)

    def hook_gradient(self, block: Block) -> None:
        self.handles.append(block.narrow.weight.register_hook(lambda grad: grad * 2))

    def unhook(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def tie(self) -> None:
        first, second = self.model.blocks
        if first.narrow.weight is second.narrow.weight:
            second.narrow.weight = nn.Parameter(first.narrow.weight.detach().clone())
        else:
            second.narrow.weight = first.narrow.weight

    def left_by(self, run: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
        given = [
            (randn(self.rows, 8, seed=i), randn(self.rows, 4, seed=20 + i))
            for i in range(self.count)
        ]
        self.model.zero_grad()
        torch.manual_seed(5)
        calls = self.model.calls
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            losses = run(given)
        found = {f"loss {i}": bits(one.detach()) for i, one in enumerate(losses)}
        found["calls"] = self.model.calls - calls
        found["random state"] = bits(torch.get_rng_state())
        for name, parameter in self.model.named_parameters():
            found[name] = bits(parameter.grad)
        return found

    def plainly(self, given: list[Any]) -> list[Any]:
        losses = []
        for x, y in given:
            losses.append(self.loss(self.model, x, y))
            losses[-1].backward()
        return losses


SHAPE = Block.shape


def OTHER_SHAPE(self: Block, y: Tensor) -> Tensor:
    return F.elu(y)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    globals().update(FACTOR=1.0)
    SETTINGS.update(power=2, use="mean")
    Block.slope = 0.5
    Block.shape = SHAPE  # type: ignore[method-assign]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[:2] == other[:2] and torch.equal(one[2], other[2])
    return bool(one == other)


def wander(seed: int, count: int) -> TrainStep:
    """Change something at random, `count` times, and compare a step after each change."""
    world = World(seed)
    step = TrainStep(
        world.model,
        world.loss,
        profile="estimate",
        solver="heu" if seed % 2 else "full",
        memory_budget="1GB",
    )
    step([(randn(3, 8), randn(3, 4))] * 3)  # planned before anything changes
    done = []
    for _ in range(count):
        name, change = world.random.choice(list(world.changes()))
        change()
        done.append(name)
        expected = world.left_by(world.plainly)
        found = world.left_by(step)
        wrong = [key for key in expected if not same(expected[key], found[key])]
        assert wrong == [], (seed, done, wrong)
    return step


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 8), *(pytest.param(s, 25, marks=pytest.mark.slow) for s in range(1, 41))],
)
def test_never_a_wrong_gradient(seed: int, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step = wander(seed, count)
    assert all("has hooks on its gradient" in reason for reason in step.fallbacks)


def through_a_pipeline(seed: int, count: int) -> None:
    """The same of a Pipeline of one rank and one stage, whose loss is a part of it."""
    world = World(seed)
    names = [name for name, _ in world.changes() if name not in NOT_IN_A_PIPELINE]
    world.count = 3
    stage = Inner(world.model)
    pipeline = Pipeline(
        {0: stage}, "1f1b", 3, lambda out, y: world.ending(out, y), profile="estimate",
        memory_budget="1GB", solver="heu" if seed % 2 else "full",
    )  # fmt: skip

    def step(given: list[Any]) -> list[Any]:
        return pipeline([x for x, _ in given], [y for _, y in given])

    def plainly(given: list[Any]) -> list[Any]:
        losses = []
        for x, y in given:
            losses.append(world.ending(stage(x), y))
            losses[-1].backward()
        return losses

    world.left_by(step)
    done = []
    for _ in range(count):
        name = world.random.choice(names)
        dict(world.changes())[name]()
        done.append(name)
        expected, found = world.left_by(plainly), world.left_by(step)
        wrong = [key for key in expected if not same(expected[key], found[key])]
        assert wrong == [], (seed, done, wrong)


class Inner(nn.Module):
    """The net without its loss."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        self.net.calls += 1
        for block in self.net.blocks:
            x = block(x)
        out: Tensor = self.net.head(x)
        return out


# A pipeline has the number and the shapes of its microbatches, and refuses hooks on gradients.
NOT_IN_A_PIPELINE = ("count", "rows", "hook on a gradient", "closure's tensor")


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 5), *(pytest.param(s, 25, marks=pytest.mark.slow) for s in range(1, 9))],
)
@pytest.mark.usefixtures("alone")
def test_nor_in_a_pipeline(seed: int, count: int) -> None:
    through_a_pipeline(seed, count)


@pytest.mark.usefixtures("alone")
def test_a_stage_that_gives_no_tensor_is_refused() -> None:
    given = [randn(2, 8)]
    stages = {0: nn.Linear(8, 8), 1: nn.Linear(8, 8)}
    stages[0].register_forward_hook(lambda module, args, out: {"out": out})
    schedule = make_schedule("interleaved", 1, 1)
    pipeline = Pipeline(stages, schedule, 1, F.mse_loss, profile="estimate")
    with pytest.raises(CaptureError, match="something else than tensors; expected a tensor"):
        pipeline(given, given)


class Picky(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 4:
            raise ValueError("a batch of 4, please")
        return super().forward(x)


@pytest.mark.usefixtures("alone")
def test_what_a_stage_raises_is_said() -> None:
    given = [randn(2, 8)]
    pipeline = Pipeline({0: Picky(8, 8)}, "1f1b", 1, F.mse_loss, profile="estimate")
    with pytest.raises(
        CaptureError, match=r"stage 0 raises where it is traced: ValueError\('a batch"
    ):
        pipeline(given, given)


HOOKED: dict[str, Callable[[nn.Sequential], Any]] = {
    "hook": lambda net: net[0].register_forward_hook(lambda _module, _given, out: 3 * out),
    "hook before": lambda net: net[2].register_forward_pre_hook(lambda _module, x: (x[0] - 1,)),
    "backward hook": lambda net: net[0].register_full_backward_hook(
        lambda _module, given, _out: (5 * given[0],)
    ),
    "gradient hook": lambda net: net[0].weight.register_hook(lambda gradient: 7 * gradient),
    "another forward": lambda net: setattr(net[0], "forward", lambda x: 2 * x),
}


# Dynamo has no backward hooks of modules: that one is said, and run as plain PyTorch.
@pytest.mark.filterwarnings("ignore:overlapc runs the whole model unchanged:RuntimeWarning")
@pytest.mark.parametrize("change", HOOKED)
def test_optimize_sees_what_is_hooked_in_after_planning(change: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    twin = overlapc.optimize(net, solver="heu")
    twin(x).sum().backward()
    HOOKED[change](net)

    def gradients(model: nn.Module) -> list[Tensor | None]:
        for tensor in (x, *net.parameters()):
            tensor.grad = None
        model(x).sum().backward()
        return [x.grad, *[parameter.grad for parameter in net.parameters()]]

    for wanted, found in zip(gradients(net), gradients(twin), strict=True):
        assert (wanted is None and found is None) or torch.equal(wanted, found)


MINE = random.Random(1)
OF_ALL_MODULES: list[Any] = []


class Reads(nn.Module):
    """It reads what Dynamo by itself does not check again."""

    def __init__(self, read: Callable[[Reads], Any]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.Tanh()
        self.table: dict[str, float] = {}
        self.plain = Plain()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.linear(x)) * self.read(self)
        return out

    @classmethod
    def of_class(cls) -> float:
        return 2.0

    @staticmethod
    def static() -> float:
        return 2.0

    @property
    def computed(self) -> float:
        return 2.0


class Plain:
    def method(self) -> float:
        return 2.0

    def __iter__(self) -> Iterator[float]:
        yield 2.0

    def __call__(self) -> float:
        return 2.0


def key_or_two(model: Reads) -> float:
    try:
        return model.table["factor"]
    except KeyError:
        return 2.0


def attribute_or_two(model: Reads) -> float:
    try:
        return float(model.plain.factor)  # type: ignore[attr-defined]
    except AttributeError:
        return 2.0


def replaced(kind: type, name: str, value: Any) -> Callable[[Reads, pytest.MonkeyPatch], None]:
    return lambda _model, patch: patch.setattr(kind, name, value)


def hook_all(_model: Reads, patch: pytest.MonkeyPatch) -> None:
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _given, out: out * 3 if isinstance(module, nn.Tanh) else None
    )
    OF_ALL_MODULES.append(hook)


UNGUARDED: dict[str, tuple[Callable[[Reads], Any], Callable[[Reads, pytest.MonkeyPatch], Any]]] = {
    "a function of a module's class": (
        lambda m: 2.0,
        replaced(nn.Tanh, "forward", lambda _, x: x * 3),
    ),
    "a static method": (lambda m: m.static(), replaced(Reads, "static", staticmethod(lambda: 5.0))),
    "a class method": (
        lambda m: m.of_class(),
        replaced(Reads, "of_class", classmethod(lambda _: 5.0)),
    ),
    "a property": (lambda m: m.computed, replaced(Reads, "computed", property(lambda _: 5.0))),
    "a function of a class": (
        lambda m: m.plain.method(),
        replaced(Plain, "method", lambda _: 5.0),
    ),
    "__call__": (lambda m: m.plain(), replaced(Plain, "__call__", lambda _: 5.0)),
    "__iter__": (
        lambda m: [*m.plain][0],  # noqa: RUF015
        replaced(Plain, "__iter__", lambda _: iter([5.0])),
    ),
    "hooks of all modules": (lambda m: 2.0, hook_all),
    "a missing key": (key_or_two, lambda m, _: m.table.update(factor=5.0)),
    "a missing attribute": (attribute_or_two, lambda m, _: setattr(m.plain, "factor", 5.0)),
    "a variable of the environment": (
        lambda m: float(os.getenv("FACTOR_OF_THE_MODEL", "2")),
        lambda m, patch: patch.setenv("FACTOR_OF_THE_MODEL", "5"),
    ),
}


def gradients_of(step: Callable[[], Any], model: nn.Module) -> list[Tensor | None]:
    model.zero_grad()
    step()
    return [parameter.grad for parameter in model.parameters()]


def planned_step(door: str, model: nn.Module, x: Tensor) -> tuple[Callable[[], Any], Any]:
    options: dict[str, Any] = {"solver": "none", "profile": "estimate"}
    if door == "optimize":
        twin = overlapc.optimize(model, **options)
        return lambda: twin(x).sum().backward(), twin
    step = TrainStep(model, lambda model, x: model(x).sum(), **options)
    return lambda: step([x]), step


@pytest.fixture
def unhook_all() -> Iterator[None]:
    yield
    while OF_ALL_MODULES:
        OF_ALL_MODULES.pop().remove()


@pytest.mark.parametrize("door", ["optimize", "TrainStep"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=needs_torch("2.13")) if n == "__iter__" else n  # traced since then
        for n in UNGUARDED
    ],
)
@pytest.mark.usefixtures("unhook_all")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")
def test_what_dynamo_takes_for_granted(
    name: str, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, change = UNGUARDED[name]
    model, x = Reads(read), randn(3, 8)
    step, planned = planned_step(door, model, x)

    def plainly() -> None:
        model(x).sum().backward()

    before = gradients_of(step, model)
    assert all(map(torch.equal, before, gradients_of(plainly, model)))
    change(model, monkeypatch)
    expected = gradients_of(plainly, model)
    assert all(map(torch.equal, expected, gradients_of(step, model)))
    assert not all(map(torch.equal, expected, before))
    assert planned.fallbacks == []


@pytest.mark.parametrize("door", ["optimize", "TrainStep"])
@pytest.mark.usefixtures("unhook_all")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")
def test_hooks_of_all_modules_run_for_the_models_modules_alone(door: str) -> None:
    def hook(module: nn.Module, _given: Any, out: Any) -> Any:
        return out * 3

    model, x = Reads(lambda _: 2.0), randn(3, 8)
    OF_ALL_MODULES.append(nn.modules.module.register_module_forward_hook(hook))
    step, planned = planned_step(door, model, x)
    expected = gradients_of(lambda: model(x).sum().backward(), model)
    assert all(map(torch.equal, expected, gradients_of(step, model)))
    assert planned.fallbacks == []


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[None, None]
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("door", ["optimize", "TrainStep"])
def test_attention_runs_by_the_kernel_that_is_allowed(door: str) -> None:
    model, x = Attends(), randn(4, 8)
    step, planned = planned_step(door, model, x)
    attended = []
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            expected = gradients_of(lambda: model(x).sum().backward(), model)
            assert all(map(torch.equal, expected, gradients_of(step, model)))
        report = planned.graphs[-1] if door == "optimize" else planned.report
        names = " ".join(op.name for op in report.problem.trace.ops)
        attended.append("_scaled_dot_product_flash" in names)
    assert attended[:2] == [False, True]


@pytest.mark.parametrize("door", ["optimize", "TrainStep"])
@pytest.mark.parametrize(
    "draw",
    [lambda m: MINE.random(), lambda m: torch.from_numpy(np.random.rand(8).astype(np.float32))],
)
def test_numbers_of_other_generators_are_drawn_each_time(
    draw: Callable[[Reads], Any], door: str
) -> None:
    model, x = Reads(draw), randn(3, 8)
    step, planned = planned_step(door, model, x)

    def runs(step: Callable[[], Any]) -> list[list[Tensor | None]]:
        MINE.seed(7)
        np.random.seed(7)
        return [gradients_of(step, model) for _ in range(3)]

    expected = runs(lambda: model(x).sum().backward())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dynamo's, too
        found = runs(step)
    assert all(all(map(torch.equal, *pair)) for pair in zip(expected, found, strict=True))
    assert not all(map(torch.equal, *expected[:2]))
    if door == "TrainStep":
        assert len(planned.fallbacks) == 1
