"""What each rank of a layout holds: `stage_parameters` and `rank_parameters` count its parameters,
`static_bytes` the memory that weights, gradients and optimizer take."""

from __future__ import annotations

from collections.abc import Sequence

from overlapc.search.frameworks.framework import Framework
from overlapc.search.frameworks.known import OURS, find_framework
from overlapc.search.layouts import (
    Cluster,
    Layout,
    dense_layers,
    expert_ranks,
    replicas,
    stage_layers,
)
from overlapc.search.models.transformer import Model

# bf16 weight, float32 gradient (or the framework's); float32 weight and both moments
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12


def stage_parameters(
    model: Model, layout: Layout, layers_of: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """(dense, of experts) that one rank holds of each stage; with an even split by default."""
    found = []
    counts = layers_of or stage_layers(model, layout.stages, layout.ends)
    last = len(counts) - 1
    alone = last in layout.stages_of(0)  # also has the embedding, which tied weights need only once
    firsts = dense_layers(model, counts)
    for stage, (layers, first) in enumerate(zip(counts, firsts, strict=True)):
        ranks = expert_ranks(model, layout)
        dense, experts = model.held(layers, layout.tp, ranks, first, layout.etp)
        if stage == 0:
            dense += model.vocab * model.width // layout.tp + model.position_parameters
        if stage == last:
            twice = model.tied and alone
            dense += model.norm_parameters + (not twice) * (model.vocab * model.width // layout.tp)
        found.append((dense, experts))
    return found


def layer_and_ends(model: Model, layout: Layout) -> tuple[int, int]:
    """The parameters that a rank without a pipeline has of one of its equal layers; and of all that
    is before and behind them."""
    ((dense, _),) = stage_parameters(model, layout)
    layers, _ = model.held(model.layers, layout.tp, 1)
    return layers // model.layers, dense - layers


def rank_parameters(
    model: Model, layout: Layout, layers_of: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """(dense, of experts) that each rank of the pipeline holds in all its stages."""
    of_stage = stage_parameters(model, layout, layers_of)
    found = []
    for rank in range(layout.pp):
        mine = [of_stage[stage] for stage in layout.stages_of(rank)]
        found.append((sum(dense for dense, _ in mine), sum(experts for _, experts in mine)))
    return found


def static_bytes(
    model: Model,
    layout: Layout,
    layers_of: Sequence[int] | None = None,
    framework: Framework = OURS,
    node: int = 8,
) -> list[int]:
    """Count the bytes of weights, gradients and optimizer on each rank of the pipeline, in nodes of
    so many GPUs."""
    alike, of_experts = replicas(model, layout)
    if framework.gathers:
        return [_sharded_bytes(model, layout, framework, node)]
    if not divides_optimizer(model, framework):
        alike = of_experts = 1
    held = WEIGHT_BYTES + framework.gradient_bytes
    return [
        (dense + experts) * held
        + dense * OPTIMIZER_BYTES // alike + experts * OPTIMIZER_BYTES // of_experts
        for dense, experts in rank_parameters(model, layout, layers_of)
    ]  # fmt: skip


def held_bytes(
    model: Model, cluster: Cluster, layout: Layout, layers_of: Sequence[int] | None = None
) -> list[int]:
    """`static_bytes` on a cluster, as its framework runs the model."""
    framework = find_framework(cluster.framework)
    return static_bytes(model, layout, layers_of, framework, cluster.gpus_per_node)


def _sharded_bytes(model: Model, layout: Layout, framework: Framework, node: int) -> int:
    """The same where weights are divided, too: of float32 weights, gradients and both moments a
    rank has its part. Whole are the weights of the ends and of two layers, or of all that are
    gathered once; and gradients of the ends and of a layer, as they are made and as they are
    summed."""
    layer, ends = layer_and_ends(model, layout)
    of_rank = layer * model.layers + ends
    layers = model.layers if framework.gathers == "once" else min(2, model.layers)
    whole = WEIGHT_BYTES * (layers * layer + ends)
    size = framework.summed_bytes or framework.gradient_bytes
    made = (layer + ends) * (WEIGHT_BYTES + (size if size != WEIGHT_BYTES else 0))
    parts = of_rank * (OPTIMIZER_BYTES + framework.gradient_bytes)
    return whole + made + parts // sharing_ranks(layout, framework, node)


def sharing_ranks(layout: Layout, framework: Framework, node: int) -> int:
    """Over how many replicas weights are divided, in nodes of so many GPUs."""
    return layout.replicas_near(node) if framework.in_node else layout.replicas


def divides_optimizer(model: Model, framework: Framework) -> bool:
    """Is the optimizer's part divided over all replicas that hold the same weights (a distributed
    optimizer)? A model that is planned whole has the user's own optimizer, which is not divided."""
    return framework.shards_optimizer and not model.whole
