"""On a GPU, too, outputs, gradients, buffers and random states are those of eager, bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import overlapc
from examples.gpt.model import GPT, GPTConfig
from overlapc.core.errors import Infeasible
from overlapc.emulate import Fabric, Link, init_fabric
from overlapc.profiler.memory import measure_peak
from tests.torch.exact import DYNAMO_WARNINGS, Batch, differences, moved, train
from tests.torch.zoo import KINDS, Kind

pytestmark = [
    *DYNAMO_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
]
MINIMUM = "minimum"
CONFIGS: dict[str, dict[str, Any]] = {
    "least memory": {"memory_budget": MINIMUM, "solver": "overlap", "profile": "measure"},
    "heu": {"memory_budget": 0.7, "solver": "heu", "profile": "measure"},
    "torch": {"memory_budget": None, "solver": "torch", "profile": "estimate"},
}


def on_gpu(kind: Kind) -> nn.Module:
    torch.manual_seed(1)
    return kind.make().to("cuda")


def batches(kind: Kind) -> list[Batch]:
    return [Batch(*moved((batch.args, batch.kwargs), "cuda")) for batch in kind.batches()]


def optimized(make: Callable[[], nn.Module], run: Callable[[Any], Any], **options: Any) -> Any:
    """A model in the budget that was asked for, or in the one that the error names; and its run."""
    if options.get("memory_budget") == MINIMUM:
        options["memory_budget"] = 1
    for _ in range(4):
        model = overlapc.optimize(make(), **options)
        try:
            return model, run(model)
        except Infeasible as infeasible:
            options["memory_budget"] = infeasible.smallest_bytes
            torch._dynamo.reset()
    raise AssertionError("the budget that Infeasible names does not work")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str, config: str) -> None:
    kind = KINDS[name]
    with kind.world():
        expected = train(on_gpu(kind), batches(kind))
        again = train(on_gpu(kind), batches(kind))
        if differences(expected, again):
            pytest.skip("eager differs from itself")
        model, found = optimized(
            lambda: on_gpu(kind),
            lambda model: train(model, batches(kind)),
            dynamic=kind.dynamic,
            **CONFIGS[config],
        )
    assert differences(expected, found) == []
    assert model.fallbacks == []
    assert len(model.graphs) == kind.graphs


# ------------------------------------------------------------------ what only a GPU has


class Attention(nn.Module):
    """Blocks of attention by one of PyTorch's kernels, with dropout where the kernel has it."""

    def __init__(self, backend: SDPBackend, dropout: float) -> None:
        super().__init__()
        self.backend, self.dropout = backend, dropout
        self.qkv = nn.ModuleList(nn.Linear(256, 768) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).view(2, 128, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
            x = x + F.dropout(out(mixed.transpose(1, 2).reshape(2, 128, 256)), self.dropout)
        return x


@pytest.mark.parametrize("budget", [MINIMUM, 0.7])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
def test_attention(backend: str, dtype: torch.dtype, dropout: float, budget: Any) -> None:
    chosen = getattr(SDPBackend, backend)

    def make() -> nn.Module:
        torch.manual_seed(1)
        return Attention(chosen, dropout).to("cuda", dtype)

    x = torch.randn(2, 128, 256, device="cuda", dtype=dtype, requires_grad=True)
    given = [Batch((x,))] * 2
    with sdpa_kernel(chosen):
        expected, again = train(make(), given), train(make(), given)
        if differences(expected, again):
            pytest.skip("eager differs from itself")
        model, found = optimized(
            make, lambda m: train(m, given), memory_budget=budget, solver="heu", profile="measure"
        )
    assert differences(expected, found) == []
    assert model.fallbacks == []


PRECISIONS: dict[str, Callable[[], Any]] = {
    "float32": contextlib.nullcontext,
    "bf16 autocast": lambda: torch.autocast("cuda", torch.bfloat16),
    "fp16 autocast": lambda: torch.autocast("cuda", torch.float16),
    "tf32": lambda: tf32(),
}


@contextlib.contextmanager
def tf32() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def gpt(**sizes: Any) -> nn.Module:
    torch.manual_seed(1)
    given = {"vocab": 512, "layers": 4, "width": 256, "heads": 4, "max_seq": 256, "dropout": 0.1}
    with torch.device("cuda"):
        return GPT(GPTConfig(**given | sizes), None)


def words(batch: int = 4, length: int = 256, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    each = torch.randint(0, 512, (batch, length + 1), generator=generator).cuda()
    return each[:, :-1].contiguous(), each[:, 1:].contiguous()


@pytest.mark.parametrize("budget", [MINIMUM, 0.7, None])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions(precision: str, budget: Any) -> None:
    around = PRECISIONS[precision]
    given = [Batch(words())] * 2
    expected = train(gpt(), given, around=around)
    again = train(gpt(), given, around=around)
    assert differences(expected, again) == []
    run = partial(train, batches=given, around=around)
    model, found = optimized(gpt, run, memory_budget=budget, profile="measure")
    assert differences(expected, found) == []
    assert model.fallbacks == []


@pytest.mark.parametrize("kind", ["microbatches", "pairs", "slices"])
def test_train_step(kind: str) -> None:
    """Merged microbatches add up to the bits of accumulation; slices to those of slices."""
    init_fabric(Fabric(Link(1e-5, 20e9), mode="ideal"), world_size=4)
    try:
        group = torch.distributed.group.WORLD

        def make() -> nn.Module:
            torch.manual_seed(1)
            with torch.device("cuda"):
                return GPT(
                    GPTConfig(vocab=512, layers=2, width=256, heads=4, max_seq=256, dropout=0.0),
                    group,
                )

        def loss(model: nn.Module, *given: Tensor) -> Tensor:
            return model(*given) / 4

        each = [words(4, 256, seed) for seed in range(4)]
        plain = make()
        cut = [tuple(t.chunk(2)) for batch in each for t in [*batch]] if kind == "slices" else []
        torch.manual_seed(3)
        if kind == "slices":
            pairs = [zip(cut[2 * i], cut[2 * i + 1], strict=True) for i in range(4)]
            for batch in pairs:
                for tokens, targets in batch:
                    (loss(plain, tokens, targets) / 2).backward()
        else:
            for batch in each:
                loss(plain, *batch).backward()
        options: dict[str, Any] = (
            {"slices": 2}
            if kind == "slices"
            else {"schedule": "auto" if kind == "pairs" else "merged"}
        )
        step = overlapc.TrainStep(make(), loss, profile="measure", **options)
        torch.manual_seed(3)
        step(each)
        mine = dict(step.model.named_parameters())
        wrong = [
            name
            for name, parameter in plain.named_parameters()
            if not torch.equal(parameter.grad, mine[name].grad)
        ]
        assert step.report is not None, step.explain()
        assert wrong == []
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("budget", [MINIMUM, 0.6, None])
def test_the_peak_is_as_predicted(budget: Any) -> None:
    """And no more than the budget. The allocator's blocks are 512 bytes."""
    make = partial(gpt, width=512, layers=6, max_seq=512)
    tokens, targets = words(8, 512)

    def step(model: nn.Module) -> None:
        model(tokens, targets).backward()

    model, _ = optimized(make, step, memory_budget=budget, profile="measure")
    for _ in range(2):
        model.zero_grad()
        step(model)
    model.zero_grad()
    measured = measure_peak(lambda: step(model), "cuda")
    (report,) = model.graphs
    predicted = report.timeline.peak_bytes
    print(f"peak measured {measured:,}, predicted {predicted:,}: {predicted / measured:.4f}")
    assert measured <= predicted * 1.03
    assert predicted <= measured * 1.05
