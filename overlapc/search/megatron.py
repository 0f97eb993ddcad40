"""The layout that a search chose, in the words of Megatron: the arguments that its scripts take."""

from __future__ import annotations

from collections.abc import Iterator

from overlapc.search.layouts import Layout
from overlapc.solvers.partition import layout as layer_layout

RUN_BY_MEGATRON = ("1f1b", "interleaved")  # schedules


def megatron_arguments(
    layout: Layout, layers: tuple[int, ...], microbatches: int, expert_ranks: int = 1
) -> Iterator[str]:
    """Give the arguments with which Megatron's scripts train in this layout: `--flag value`."""
    yield f"--tensor-model-parallel-size {layout.tp}"
    if layout.sequence:
        yield "--sequence-parallel"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    if len(set(layers)) > 1:
        yield f"--pipeline-model-parallel-layout '{layer_layout(layers)}'"
    elif layout.stages > layout.pp:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.stages // layout.pp}"
    if expert_ranks > 1:
        yield f"--expert-model-parallel-size {expert_ranks}"
    yield f"--micro-batch-size {layout.microbatch}"
    yield f"--global-batch-size {layout.microbatch * microbatches * layout.dp}"
