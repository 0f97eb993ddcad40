"""Models whose ops are a GPU's own: kernels written in Triton, grouped products, cuDNN's attention
and RNNs, float8, flex attention, modules that no trace enters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import overlapc
from overlapc.core.errors import Infeasible
from tests.torch.exact import DYNAMO_WARNINGS, Batch, differences, randn, train

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    *DYNAMO_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
    pytest.mark.filterwarnings("ignore:overlapc runs as one op:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
]
WIDTH = 256


@triton.jit
def gated(x, gate, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    one = tl.load(x + at, mask=inside).to(tl.float32)
    by = tl.load(gate + at, mask=inside).to(tl.float32)
    tl.store(out + at, one * tl.sigmoid(by), mask=inside)


@triton.jit
def gated_backward(x, gate, given, dx, dgate, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    one = tl.load(x + at, mask=inside).to(tl.float32)
    by = tl.sigmoid(tl.load(gate + at, mask=inside).to(tl.float32))
    gradient = tl.load(given + at, mask=inside).to(tl.float32)
    tl.store(dx + at, gradient * by, mask=inside)
    tl.store(dgate + at, gradient * one * by * (1 - by), mask=inside)


def grid(size: int) -> tuple[int]:
    return (triton.cdiv(size, 1024),)


def run_gated(x: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty_like(x)
    gated[grid(x.numel())](x, gate, out, x.numel(), BLOCK=1024)
    return out


def run_gated_backward(x: Tensor, gate: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    size = x.numel()
    gated_backward[grid(size)](x, gate, given.contiguous(), dx, dgate, size, BLOCK=1024)
    return dx, dgate


class Gated(torch.autograd.Function):
    """As libraries of kernels write them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return run_gated(x, gate)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        return run_gated_backward(*ctx.saved_tensors, given)


@torch.library.custom_op("overlapc_tests::gated", mutates_args=())
def gated_op(x: Tensor, gate: Tensor) -> Tensor:
    return run_gated(x, gate)


@torch.library.custom_op("overlapc_tests::gated_backward", mutates_args=())
def gated_backward_op(x: Tensor, gate: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    return run_gated_backward(x, gate, given)


gated_op.register_fake(lambda x, gate: torch.empty_like(x))
gated_backward_op.register_fake(lambda x, gate, given: (torch.empty_like(x), torch.empty_like(x)))
gated_op.register_autograd(
    lambda ctx, given: gated_backward_op(*ctx.saved_tensors, given),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Two(nn.Module):
    """Two projections and a kernel over both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(self.a(x), self.b(x))


class ByTriton(Two):
    def kernel(self, x: Tensor, gate: Tensor) -> Tensor:
        return Gated.apply(x, gate)


class ByCustomOp(Two):
    def kernel(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_op(x, gate)


class Disabled(Two):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return Gated.apply(self.a(x), F.dropout(self.b(x), 0.1, self.training))


class Grouped(nn.Module):
    """Experts as one product over rows in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        ends = torch.arange(1, 5, device=x.device, dtype=torch.int32) * (len(rows) // 4)
        return torch._grouped_mm(rows, self.weight, offs=ends).view_as(x)


class Float8(torch.autograd.Function):
    """A product in float8 with the gradients of one in full."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        scales = [t.abs().amax().float().clamp(min=1e-6) / 448 for t in (x, weight)]
        small = [
            (t / scale).to(torch.float8_e4m3fn)
            for t, scale in zip((x, weight), scales, strict=True)
        ]
        return torch._scaled_mm(small[0], small[1].t(), *scales, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return given @ weight, given.t() @ x


class ByFloat8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return Float8.apply(x.reshape(-1, WIDTH), self.weight).view_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
        return self.mixed(q, k, v).transpose(1, 2).reshape(x.shape)


class ByCudnn(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Flex(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.01)


class Rnn(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


KINDS: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "triton": (ByTriton, torch.bfloat16),
    "triton in float32": (ByTriton, torch.float32),
    "a custom op": (ByCustomOp, torch.bfloat16),
    "disabled": (Disabled, torch.bfloat16),
    "grouped": (Grouped, torch.bfloat16),
    "float8": (ByFloat8, torch.bfloat16),
    "cudnn": (ByCudnn, torch.bfloat16),
    "flex": (Flex, torch.bfloat16),
    "lstm": (lambda: Rnn(nn.LSTM), torch.float32),
    "gru": (lambda: Rnn(nn.GRU), torch.float32),
    "conv": (Conv, torch.bfloat16),
}


# PyTorch cannot trace these on CUDA; they run as plain PyTorch, with a warning.
PLAIN = {"lstm", "gru"}


class Model(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.ins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner = nn.ModuleList(kind() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for linear, inner, norm in zip(self.ins, self.inner, self.norms, strict=True):
            x = x + inner(F.gelu(linear(norm(x))))
        return x.float().square().mean()


def make(name: str) -> nn.Module:
    kind, dtype = KINDS[name]
    torch.manual_seed(1)
    return Model(kind).to("cuda", dtype)


def batches(name: str, count: int) -> list[Batch]:
    dtype = KINDS[name][1]
    return [Batch((randn(4, 128, WIDTH, seed=s).to("cuda", dtype),)) for s in range(count)]


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What overlapc warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        told: list[str] = []
        yield told
    told += [str(w.message).splitlines()[0] for w in found if "overlapc" in str(w.message)]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [each.grad for each in model.parameters()]


@pytest.mark.parametrize("budget", [1, None])
@pytest.mark.parametrize("name", KINDS)
def test_optimize(name: str, budget: Any) -> None:
    given = batches(name, 2)
    expected, again = train(make(name), given), train(make(name), given)
    if differences(expected, again):
        pytest.skip("eager differs from itself")
    with said() as told:
        for _ in range(3):
            options = {"memory_budget": budget, "solver": "heu", "profile": "measure"}
            model = overlapc.optimize(make(name), **options)
            try:
                found = train(model, given)
                break
            except Infeasible as infeasible:
                budget = infeasible.smallest_bytes
                torch._dynamo.reset()
    print(f"{name}: {len(model.graphs)} graphs, unchanged {model.fallbacks}, told {told}")
    assert differences(expected, found) == []
    assert bool(model.fallbacks) == (name in PLAIN | {"disabled"})


@pytest.mark.parametrize("name", KINDS)
def test_train_step(name: str) -> None:
    given = batches(name, 3)
    one, two, three = make(name), make(name), make(name)
    for model in (one, two):
        torch.manual_seed(2)
        for batch in given:
            model(*batch.args).backward()
    if not all(map(torch.equal, gradients(one), gradients(two))):
        pytest.skip("eager differs from itself")
    step = overlapc.TrainStep(three, memory_budget=0.8, solver="heu", profile="measure")
    torch.manual_seed(2)
    with said() as told:
        step([batch.args for batch in given])
    print(f"{name}: unchanged {step.fallbacks}, told {told}")
    assert bool(step.fallbacks) == (name in PLAIN)
    assert all(map(torch.equal, gradients(one), gradients(three)))
