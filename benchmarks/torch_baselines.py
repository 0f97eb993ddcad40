"""What PyTorch itself can do about recompute and overlap, at its best, as `torch.compile` backends.

`Baseline(budget)` is PyTorch's budgeted min-cut: it saves the fraction `budget` of activations
and recomputes the rest. `Baseline(budget, overlap=True)` then lets PyTorch's own overlap
scheduler, `schedule_overlap_bucketing`, order the forward and backward graphs. Both are given
*measured* costs of every op, collectives included, which PyTorch alone would not have here.
Graphs run as written (no Inductor), boxed, as overlapc's `backend="eager"` runs its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx.graph import _BoxedCodeGen
from torch.utils._pytree import tree_map

COLLECTIVES = "_c10d_functional"


class MeasuredCosts:
    """Milliseconds of one op of a graph: run alone, on the device at hand, the same on all ranks.

    All ranks measure together, so every rank must come with the same ops in the same order:
    `learn` a whole graph first, then ask in any order. `unknown_size` stands for a size that
    is only known at run time.
    """

    def __init__(self, unknown_size: int = 1, repeats: int = 5) -> None:
        self.unknown_size, self.repeats = unknown_size, repeats
        self.known: dict[str, float] = {}
        self._clean = ThreadPoolExecutor(max_workers=1)

    def learn(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            self(node)

    def __call__(self, node: fx.Node, override_size: int | None = None) -> float:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return 0.0
        args, kwargs = tree_map(self._describe, (node.args, node.kwargs))
        key = f"{node.target}{args}{kwargs}"
        if key not in self.known:
            # A thread of its own has none of the compiler's modes. With them, waiting for gloo
            # keeps the GIL, which gloo's thread then needs to finish: a deadlock.
            measured = self._clean.submit(self._measure, node.target, args, kwargs)
            self.known[key] = measured.result()
        return self.known[key]

    def _measure(self, target: Any, args: Any, kwargs: Any) -> float:
        if target is torch.ops._c10d_functional.wait_tensor.default:
            return 0.0
        collective = target.namespace == COLLECTIVES
        args, kwargs = tree_map(_materialize, (args, kwargs))
        seconds = []
        with torch.no_grad():
            for _ in range(self.repeats):
                if collective:
                    dist.barrier()
                start = time.perf_counter()
                try:
                    result = target(*args, **kwargs)
                except RuntimeError:  # needs values, not just shapes: routing, and cheap
                    seconds = [0.0, 0.0]
                    break
                if collective:
                    torch.ops._c10d_functional.wait_tensor(result)
                seconds.append(time.perf_counter() - start)
            agreed = torch.tensor(statistics.median(seconds[1:]) * 1e3)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed.item()

    def _describe(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape = tuple(map(self._size, value.shape))
            stride = tuple(map(self._size, value.stride()))
            return _Like(shape, stride, value.dtype, value.device)
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _size(self, size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        if size.node.has_hint():
            return int(size.node.hint)
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, self.unknown_size)))


@dataclass(frozen=True, slots=True)
class _Like:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _materialize(value: Any) -> Any:
    if not isinstance(value, _Like):
        return value
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
    # Indices must stay in range; values must not be denormal, which would be slow.
    return tensor.fill_(0.5) if value.dtype.is_floating_point else tensor.zero_()


@dataclass(frozen=True, slots=True)
class Baseline:
    """PyTorch's own choice of what to save, and with `overlap` its own order too."""

    budget: float
    costs: MeasuredCosts
    overlap: bool = False

    def compile(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        backend = aot_autograd(
            fw_compiler=self._compile, bw_compiler=self._compile, partition_fn=self._partition
        )
        return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)

    def _partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        self.costs.learn(joint.graph)
        with (
            functorch_config.patch(activation_memory_budget=self.budget),
            patch.object(partitioners, "estimate_runtime", self.costs),
        ):
            return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        if self.overlap:
            self.costs.learn(graph.graph)
            with patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", self.costs):
                graph = overlap_scheduling.schedule_overlap_bucketing(
                    graph,
                    custom_runtime_estimation=self.costs,
                    compute_estimator="analytical",
                    max_memory_increase_gb=64.0,
                    max_memory_increase_ratio=1.0,
                )
        graph.graph.set_codegen(_BoxedCodeGen())
        graph.recompile()

        def run(args: list[Any]) -> Any:
            return graph.forward(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run
