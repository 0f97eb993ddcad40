"""What PyTorch traces otherwise than eager runs it, and `exact/as_eager.py` mends: bit by bit."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.utils.checkpoint import checkpoint

import overlapc
from overlapc.passes.exact.as_eager import as_eager

aten = torch.ops.aten


class Called(nn.Module):
    """A linear layer around `call`, so that weights get gradients through it."""

    def __init__(self, call: Callable[[Tensor], Tensor], width: int = 24) -> None:
        super().__init__()
        self.call = call
        self.before = nn.Linear(width, width)
        self.after = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.call(self.before(x)))


class Image(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.before = nn.Conv2d(3, 4, 3, padding=1)
        self.after = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.call(self.before(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.body = getattr(nn, kind)(24, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if not isinstance(self.body, nn.RNNCellBase):
            return self.head(self.body(x)[0])
        state: Any = torch.zeros(x.shape[1], 24)
        if isinstance(self.body, nn.LSTMCell):
            state = (state, state)
        for row in x:
            state = self.body(row, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Twice(nn.Module):
    """One weight, two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 5, 24, dtype=dtype)


def image() -> Tensor:
    return torch.randn(2, 3, 12, 12)


def in_place_on_a_chunk(x: Tensor) -> Tensor:
    one, two, three = x.unsafe_chunk(3, -1)
    one.add_(two).sigmoid_()
    return torch.cat([one, two, three.tanh()], -1)


def in_place_on_a_slice(x: Tensor) -> Tensor:
    one, two = x * 1, x * 1
    one[..., :7].clamp_(max=3).exp_()
    two[..., 7:].mul_(0.5).tanh_()
    return one + two


def multiplied_on_a_slice(x: Tensor) -> Tensor:
    made = x * 1
    made[..., ::2].addcmul_(x[..., ::2].sin(), x[..., 1::2].cos(), value=0.37)
    made[..., ::2].addcdiv_(x[..., ::2].cos(), x[..., 1::2].exp(), value=0.37)
    return made


def noise_on_a_slice(x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    noise[..., 3:].normal_()
    noise[..., :3].bernoulli_(0.3)
    return x * noise


def margin(x: Tensor) -> Tensor:
    return F.multi_margin_loss(x.flatten(0, 1), torch.zeros(30, dtype=torch.long)) * x


def averaged(x: Tensor) -> Tensor:
    kept = [torch.ones(24)]
    with torch.no_grad():
        torch._foreach_lerp_(kept, [x[0, 0].detach()], 0.3)
    return x * kept[0]


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7).div_(0.7)


def transposed(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x.transpose(0, 1)).transpose(0, 1)


def channels_last(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x.to(memory_format=torch.channels_last))


def dropped(p: float, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.dropout(x, p, **options)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "dropout of 0.15": lambda: (Called(dropped(0.15)), rows()),
    "dropout in place": lambda: (Called(lambda x: F.dropout(x * 1, 0.2, inplace=True)), rows()),
    "dropout, transposed": lambda: (Called(transposed(dropped(0.2))), rows()),
    "dropout, channels last": lambda: (Image(channels_last(dropped(0.2))), image()),
    "dropout2d, channels last": lambda: (Image(channels_last(nn.Dropout2d(0.4))), image()),
    "alpha dropout": lambda: (Called(transposed(nn.AlphaDropout(0.2))), rows()),
    "drop path": lambda: (Called(drop_path), rows()),
    "rrelu": lambda: (Called(lambda x: F.rrelu(x, training=True)), rows()),
    "in place on a chunk": lambda: (Called(in_place_on_a_chunk), rows()),
    "in place on a slice": lambda: (Called(in_place_on_a_slice), rows()),
    "multiplied on a slice": lambda: (Called(multiplied_on_a_slice), rows()),
    "noise on a slice": lambda: (Called(noise_on_a_slice), rows()),
    "multi-margin loss": lambda: (Called(margin), rows()),
    "addcdiv": lambda: (
        Called(lambda x: torch.addcdiv(x, x.sin(), x.exp(), value=0.37)),
        rows(),
    ),
    "a list's average": lambda: (Called(averaged), rows()),
    "hardshrink": lambda: (Called(F.hardshrink), rows()),
    "softshrink": lambda: (Called(F.softshrink), rows()),
}
for half in (torch.bfloat16, torch.float16):
    MODELS[f"dropout in {half}"] = lambda dtype=half: (  # type: ignore[misc]
        Called(dropped(0.1)).to(dtype),
        rows(dtype),
    )
for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):

    def resized(x: Tensor, mode: str = mode) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode=mode)

    MODELS[mode] = lambda call=resized: (Image(call), image())  # type: ignore[misc]
    MODELS[f"{mode}, channels last"] = lambda call=resized: (  # type: ignore[misc]
        Image(channels_last(call)),
        image(),
    )
for kind in ("RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell"):
    MODELS[kind] = lambda kind=kind: (Recurrent(kind), torch.randint(0, 50, (4, 3)))  # type: ignore[misc]


def autocast(**options: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: torch.autocast("cpu", torch.bfloat16, **options)


def step(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, Any]:
    torch.manual_seed(5)
    with region():
        out = run(x)
        loss = (out.float() * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).pow(2).mean()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {"out": out.detach(), "state": torch.get_rng_state(), **found}


def different(
    model: nn.Module, x: Tensor, region: Any = contextlib.nullcontext, **options: Any
) -> list[str]:
    """What an optimized twin of the model does otherwise, with all recomputed that can be."""
    options = {"profile": "estimate", "solver": "full", "memory_budget": 100.0} | options
    planned = copy.deepcopy(model)
    expected = step(model, model, x, region)
    optimized = overlapc.optimize(planned, **options)
    found = step(planned, optimized, x, region)
    assert optimized.fallbacks == []
    assert len(optimized.graphs) == 1
    return [key for key in expected if not torch.equal(expected[key], found[key])]


@pytest.mark.parametrize("name", MODELS)
def test_bitwise(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    assert different(model, x) == []


class Frozen(nn.Module):
    """It scales by what it takes from its input, which needs no gradient."""

    def __init__(self, values: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        square = x @ x.mT + torch.eye(x.shape[-2])
        return self.linear(x) * self.values(square).unsqueeze(-1)


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "eigvals": lambda x: torch.linalg.eigvals(x).real,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", VALUES)
def test_values_without_vectors(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    assert different(Frozen(VALUES[name]), torch.randn(40, 12, 24)) == []


@pytest.mark.parametrize("name", VALUES)
def test_values_that_need_a_gradient(name: str) -> None:
    torch.manual_seed(0)

    def scaled(x: Tensor) -> Tensor:
        return x * VALUES[name](x @ x.mT + torch.eye(x.shape[-2])).unsqueeze(-1)

    assert different(Called(scaled), rows()) == []


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_a_cell_alone_without_a_batch(kind: type[nn.RNNCellBase]) -> None:
    """Its result is a view, which is traced behind the backward."""
    torch.manual_seed(0)
    cell = kind(5, 10)
    twin, x = overlapc.optimize(cell, solver="full", profile="estimate"), torch.randn(5)
    found = []
    for run in (cell, twin):
        cell.zero_grad()
        out = run(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        found.append([parameter.grad for parameter in cell.parameters()])
    assert twin.fallbacks == []
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["dropout, transposed", "bicubic", "GRU", "LSTM"])
def test_bitwise_as_measured(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    assert different(model, x, profile="measure", solver="heu", memory_budget=None) == []


@pytest.mark.parametrize("name", ["dropout in torch.bfloat16", "nearest", "GRU"])
def test_bitwise_in_merged_microbatches(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    planned = copy.deepcopy(model)

    def loss(one: nn.Module, x: Tensor) -> Tensor:
        return one(x).float().pow(2).mean()

    torch.manual_seed(1)
    for _ in range(3):
        loss(model, x).backward()
    torch.manual_seed(1)
    step = overlapc.TrainStep(planned, loss, solver="heu", profile="estimate")
    step([(x,)] * 3)
    assert step.report is not None
    for expected, found in zip(model.parameters(), planned.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


@pytest.mark.parametrize("name", ["dropout of 0.15", "nearest", "GRU", "in place on a slice"])
def test_sizes_that_are_symbols(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    assert different(model, x, dynamic=True) == []


def test_what_takes_no_symbols_runs_unchanged() -> None:
    """oneDNN's LSTM needs sizes that are numbers; PyTorch's decomposition is not bitwise."""
    model, x = MODELS["LSTM"]()
    planned = overlapc.optimize(model, dynamic=True)
    with pytest.warns(RuntimeWarning, match="dynamic=False"):
        planned(x)
    assert len(planned.fallbacks) == 1


@pytest.mark.parametrize("make", [Twice, lambda: Called(dropped(0.1)), lambda: Called(F.gelu)])
@pytest.mark.parametrize("region", [autocast(), autocast(cache_enabled=False)])
def test_autocast_around_the_forward(make: Callable[[], nn.Module], region: Any) -> None:
    torch.manual_seed(0)
    assert different(make(), rows(), region) == []


class Regions(nn.Module):
    """Autocast inside the model, twice: each region casts the weight for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layer(self.layer(x).tanh()) + self.layer.weight.to(torch.bfloat16)[0]
            x = x.float().sin()
        return x


@pytest.mark.parametrize("region", [contextlib.nullcontext, autocast()])
def test_autocast_inside_the_model(region: Any) -> None:
    torch.manual_seed(0)
    assert different(Regions(), rows(), region) == []


class Cast(nn.Module):
    """It casts its weight by itself, each time it needs it; `disabled`: where autocast is not."""

    def __init__(self, disabled: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.disabled, self.checkpointed = disabled, checkpointed
        self.weight = nn.Parameter(torch.randn(24, 24) * 0.2)

    def cast(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.bfloat16)
        return F.linear(x.to(torch.bfloat16), weight).float()

    def twice(self, x: Tensor) -> Tensor:
        off = torch.autocast("cpu", enabled=False) if self.disabled else contextlib.nullcontext()
        with off:
            x = self.cast(self.cast(x).tanh())
        return F.linear(F.linear(x, self.weight), self.weight).float()

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self.twice, x, use_reentrant=False) if self.checkpointed else self.twice(x)
        )


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("region", [contextlib.nullcontext, autocast()])
def test_what_the_model_casts_is_not_autocasts(
    disabled: bool, checkpointed: bool, region: Any
) -> None:
    """Eager casts anew each time, and adds the gradients in float32."""
    torch.manual_seed(0)
    assert different(Cast(disabled, checkpointed), rows(), region) == []


class Target(nn.Module):
    """It trains towards what it gave itself, without a gradient: the casts of those weights are
    taken again, with one."""

    def __init__(self, inside: bool, mode: Any) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(24, 24), nn.Linear(24, 24)
        self.inside, self.mode = inside, mode

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.inside else contextlib.nullcontext():
            with self.mode():
                target = self.layer(x).float()
            return (self.head(self.layer(x)) - target).square()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, contextlib.nullcontext])
def test_a_weight_that_was_cast_without_a_gradient_has_one(inside: bool, mode: Any) -> None:
    torch.manual_seed(0)
    region = contextlib.nullcontext if inside else autocast()
    assert different(Target(inside, mode), rows(), region) == []


def tables() -> list[Any]:
    ops = [getattr(aten, n) for n in dir(aten) if not n.startswith("__")]
    ops = [getattr(p, o) for p in ops if hasattr(p, "overloads") for o in p.overloads()]
    return [(op, dict(op.py_kernels), dict(op.python_key_table)) for op in ops]


def test_tables_are_put_back_whatever_happens() -> None:
    before, clear, enable = tables(), torch.clear_autocast_cache, torch.set_autocast_enabled

    def fail() -> None:
        with as_eager(), as_eager():
            assert DispatchKey.Autograd not in aten.gru.input.py_kernels
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert tables() == before
    assert torch.clear_autocast_cache is clear
    assert torch.set_autocast_enabled is enable


def test_threads_do_not_put_back_what_others_need() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with as_eager():
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with as_eager():
        thread.start()
        assert entered.wait(60)
    assert DispatchKey.Autograd not in aten.gru.input.py_kernels
    leave.set()
    thread.join()
    assert DispatchKey.Autograd in aten.gru.input.py_kernels
