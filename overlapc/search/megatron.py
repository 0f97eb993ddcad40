"""`megatron_arguments` writes a chosen layout as arguments of Megatron's scripts."""

from __future__ import annotations

from collections.abc import Iterator

from overlapc.search.layouts import Layout
from overlapc.solvers.partition import layout as layer_layout

RUN_BY_MEGATRON = ("1f1b", "interleaved")  # schedules that Megatron runs


def megatron_arguments(
    layout: Layout,
    layers: tuple[int, ...],
    microbatches: int,
    expert_ranks: int = 1,
    fp8: bool = False,
    experts: bool = False,
) -> Iterator[str]:
    """Return the arguments, `--flag value`, with which Megatron's scripts train in this layout."""
    yield f"--tensor-model-parallel-size {layout.tp}"
    if layout.sequence:
        yield "--sequence-parallel"
    if layout.cp > 1:
        yield f"--context-parallel-size {layout.cp}"
        yield "--cp-comm-type all_gather"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    if len(set(layers)) > 1:
        yield f"--pipeline-model-parallel-layout '{layer_layout(layers)}'"
    elif layout.stages > layout.pp:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.stages // layout.pp}"
    if expert_ranks > 1:
        yield f"--expert-model-parallel-size {expert_ranks}"
    if experts and layout.tp > 1:
        yield f"--expert-tensor-parallel-size {layout.etp}"  # by default as many as tp
    if fp8:
        yield "--fp8-format hybrid"
        yield "--fp8-recipe tensorwise"
    yield f"--micro-batch-size {layout.microbatch}"
    yield f"--global-batch-size {layout.microbatch * microbatches * layout.dp}"
