"""`captures` traces a few blocks and the head of a layout's rank, for several microbatches at once.

Traces of two sequences and of more differ in their sizes alone. So for all of them one is captured,
of `MANY` sequences (`passes/capture/batch.py`). A user's own blocks are captured for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Layout, expert_ranks
from overlapc.search.models.transformer import Model

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.profiler.estimate import Described


@dataclass(frozen=True)
class UnitKey:
    """Everything that a capture depends on."""

    model: Model
    hardware: str
    gpus: int
    tp: int
    expert_ranks: int
    microbatch: int
    sequence: bool = False
    costs: str = ""
    framework: str = "overlapc"
    cp: int = 1
    fp8: bool = False
    shares_experts: bool = False
    cp_comm_type: str = ""
    expert_step: int = 1  # how far apart the ranks are that divide the experts

    @staticmethod
    def of(model: Model, cluster: Cluster, layout: Layout) -> UnitKey:
        return UnitKey(
            find_framework(cluster.framework).of(model),
            cluster.hardware,
            cluster.gpus,
            layout.tp,
            expert_ranks(model, layout),
            layout.microbatch,
            layout.sequence,
            cluster.costs,
            cluster.framework,
            layout.cp,
            cluster.fp8,
            layout.shares_experts,
            layout.cp_comm_type if layout.cp > 1 else "",
            layout.expert_step if model.experts else 1,
        )


@dataclass(frozen=True)
class Module:
    """A captured module: all that its costs follow from, and its parameters' gradients."""

    described: Described
    gradients: tuple[str, ...]

    @staticmethod
    def of(captured: Captured, batch: int | None = None) -> Module:
        """`captured` as it is, or with the sizes of another batch."""
        from overlapc.passes.capture.batch import of_batch
        from overlapc.passes.emit.parts import parameter_gradients
        from overlapc.profiler.estimate import describe, device_of

        gradients = tuple(parameter_gradients(captured))
        if batch is None:
            return Module(describe(captured), gradients)
        with of_batch(captured, batch) as resized:
            return Module(describe(resized, device=device_of(captured)), gradients)


@dataclass(frozen=True)
class Captures:
    """What is captured of a key. No costs are in it."""

    count: int  # of blocks
    blocks: Module
    head: Module
    boundary_bytes: int  # of what a block takes and makes
    element_bytes: int


def captures(keys: Sequence[UnitKey], most: int) -> list[Captures]:
    """Capture the keys, which differ in their microbatches alone, with `most` so many blocks or one
    period. The process has no process groups before and after."""
    from overlapc.passes.capture.batch import MANY

    alike = [key.microbatch for key in keys if key.microbatch > 1 and _in_proportion(key)]
    found: dict[int, Captures] = {}
    with _groups(keys[0]) as groups:
        if len(alike) > 1:
            many = _Captured.of(replace(keys[0], microbatch=MANY), most, groups)
            found = {batch: many.captures(batch) for batch in alike}
        for key in keys:
            if key.microbatch not in found:
                found[key.microbatch] = _Captured.of(key, most, groups).captures()
    return [found[key.microbatch] for key in keys]


def _in_proportion(key: UnitKey) -> bool:
    """Are all sizes of two sequences or more in proportion to their number, and those of `MANY` no
    larger than PyTorch can count?"""
    from overlapc.passes.capture.batch import MANY

    model = key.model
    words = model.seq // key.cp // (key.tp if key.sequence else 1)
    largest = MANY * model.seq * max(model.heads * model.seq, model.vocab)
    return model.scales(words) and largest < 1 << 59  # elements; of bytes there are 1 << 63


@contextmanager
def _groups(key: UnitKey) -> Iterator[Any]:
    """The process groups of the key's rank, fake tensors, and the dtype of its model."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from overlapc.profiler.hardware import load_hardware
    from overlapc.search.groups import fake_groups

    dtype = torch.float16
    if "bfloat16" in load_hardware(key.hardware).peak_flops:
        dtype = torch.bfloat16
    before = torch.get_default_dtype()
    if not key.model.whole:
        torch.set_default_dtype(dtype)
    try:
        node = load_hardware(key.hardware).gpus_per_node
        groups = fake_groups(key.gpus, key.tp, key.expert_ranks, key.cp, key.expert_step, node)
        with groups as found, FakeTensorMode():
            yield found
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class _Captured:
    """A key's captured graphs."""

    count: int  # of blocks
    blocks: Captured
    head: Captured
    sequence_bytes: int  # of a sequence between blocks
    element_bytes: int
    microbatch: int

    @staticmethod
    def of(key: UnitKey, most: int, groups: Any) -> _Captured:
        import torch

        from overlapc.passes.capture.front import capture
        from overlapc.search.frameworks.context import Context
        from overlapc.search.models.modules import Head

        model, (tensor, expert, context) = key.model, groups
        behind = max(1, model.layers - model.dense_first)
        count = min(behind, max(most // model.period, 1) * model.period)
        part = model.seq // key.cp
        shape = (key.microbatch, part)
        if key.sequence:
            shape = (part // key.tp, key.microbatch)
        elif "attention" in getattr(model, "unfused", ""):
            shape = (model.seq, key.microbatch)
        x = torch.zeros(*shape, model.width, requires_grad=True)
        how = Context(context, key.cp_comm_type) if key.cp > 1 else None
        blocks = capture(
            model.blocks(count, tensor, expert, key.sequence, how, key.shares_experts), x
        )
        head = capture(Head(model, tensor, key.sequence), x)
        each = x.nbytes // key.microbatch
        return _Captured(count, blocks, head, each, x.element_size(), key.microbatch)

    def captures(self, batch: int | None = None) -> Captures:
        """What was captured, by default with its own batch."""
        blocks, head = (Module.of(graph, batch) for graph in (self.blocks, self.head))
        boundary = self.sequence_bytes * (batch or self.microbatch)
        return Captures(self.count, blocks, head, boundary, self.element_bytes)
