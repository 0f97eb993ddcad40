"""`Update` predicts the time of a step's update: gradients are summed over the replicas, the
optimizer runs, and the new weights are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from overlapc.profiler.hardware import load_hardware
from overlapc.search.frameworks.fp8 import CAST_BYTES
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Layout, expert_ranks, expert_replicas
from overlapc.search.models.transformer import Model
from overlapc.search.weights import (
    divides_optimizer,
    rank_parameters,
    sharing_ranks,
    stage_parameters,
)


@dataclass(frozen=True)
class Update:
    """A reduce-scatter sums the gradients of each stage. It begins when the stage's last gradient
    is made, or, if the framework waits for all gradients, after the last of all. The optimizer
    begins when the gradients of all ranks are summed, since it may scale by their norm. Each rank
    then gathers its weights in bf16. If a model is planned whole, or the framework does not shard
    the optimizer, all replicas get the sums and run the whole optimizer."""

    reduce_ns: tuple[int, ...]  # reduction of each stage
    optimizer_ns: int
    gather_ns: int
    late_ns: int = 0  # reductions that begin when all gradients are made
    # In buckets under the last backward, the reduction; under the first forward, the gathering
    under_backward_ns: int = 0
    under_forward_ns: int = 0
    bucket: float = 1.0  # a bucket's part of a rank's gradients
    passing: int = 1  # microbatches that pass a rank's stages in turn before the others
    # The first stage and the last sum their gradients of the table of words that they share
    shared_ns: int = 0

    @property
    def least_ns(self) -> int:
        """The least part that comes after the last backward, whose gradients are of one stage."""
        return min(self.reduce_ns) + self.after_ns

    @property
    def after_ns(self) -> int:
        """The part of the update that comes after all gradients."""
        return self.late_ns + self.shared_ns + self.optimizer_ns + self.gather_ns

    def uncovered_ns(self, forward_ns: int, backward_ns: int) -> int:
        """What is left of buckets' traffic, beside a microbatch's forward and backward. The last
        bucket to be summed is full when the backward ends, and the first forward waits for the
        first bucket that is gathered. Where stages are interleaved a bucket is a stage, and as many
        microbatches as there are ranks pass each stage before the next: their work hides it."""
        under = (self.under_forward_ns, forward_ns), (self.under_backward_ns, backward_ns)
        hides = self.passing * (1 - self.bucket if self.passing > 1 else 1)
        return sum(round(max(ns - hides * beside, ns * self.bucket)) for ns, beside in under)

    @staticmethod
    def of(
        model: Model, cluster: Cluster, layout: Layout, layers: Sequence[int] | None = None
    ) -> Update:
        """`layers` are those of each stage, by default an even split. Experts are reduced only over
        the replicas that hold them."""
        machine = load_hardware(cluster.hardware)
        here = machine.gpus_per_node // layout.tp  # replicas in a node
        alike = machine.gpus_per_node // (layout.expert_step * expert_ranks(model, layout))
        groups = (layout.replicas, here), (expert_replicas(model, layout), alike)

        def takes(
            kind: Literal["all_reduce", "reduce_scatter", "all_gather"],
            parameters: tuple[int, int],
            size: int,
        ) -> int:
            each = [
                machine.collective_ns(kind, count * size, ranks, max(1, min(ranks, near)))
                for count, (ranks, near) in zip(parameters, groups, strict=True)
            ]
            return sum(each)

        of_rank = rank_parameters(model, layout, layers)
        framework = find_framework(cluster.framework)
        if framework.gathers:
            (held,) = of_rank
            ranks = sharing_ranks(layout, framework, machine.gpus_per_node)
            moved = _moved(cluster, layout, held, (ranks, 1))
            return Update((0,) * layout.stages, round(machine.memory_ns(moved)), 0)
        of_stage = stage_parameters(model, layout, layers)
        shards = divides_optimizer(model, framework)
        whole = framework.sums_all or not shards
        kind: Literal["all_reduce", "reduce_scatter"] = "all_reduce" if whole else "reduce_scatter"
        size = framework.summed_bytes or framework.gradient_bytes
        copied = framework.summing_moves if layout.replicas > 1 else 0
        sums = [
            takes(kind, held, size) + round(machine.memory_ns(sum(held) * copied))
            for held in of_stage
        ]
        late_ns = 0
        if not framework.hides_reduction:
            late_ns = max(sum(sums[s] for s in layout.stages_of(r)) for r in range(layout.pp))
            sums = [0 for _ in sums]
        sharing = [ranks if shards else 1 for ranks, _ in groups]
        gather_ns = max(takes("all_gather", held, 2) for held in of_rank) if shards else 0
        moved = max(_moved(cluster, layout, held, sharing) for held in of_rank)
        optimizer_ns = round(machine.memory_ns(moved))
        shared_ns = _shared_ns(model, cluster, layout, size)
        fewest, each = framework.buckets
        if not fewest:
            return Update(tuple(sums), optimizer_ns, gather_ns, late_ns, shared_ns=shared_ns)
        bucket = min(1.0, max(fewest, each * layout.dp) / max(map(sum, of_rank)))
        stages, passing = layout.stages // layout.pp, 1
        if layout.schedule == "interleaved" and stages > 1:
            # Megatron starts all of a stage's buckets at once (--no-align-grad-reduce is not the
            # default) when the last microbatch has passed it (grad_sync_func in its schedules.py).
            bucket, passing = max(bucket, 1 / stages), layout.pp
        return Update(
            tuple(sums), optimizer_ns, 0, 0, late_ns, gather_ns, bucket, passing, shared_ns
        )


def _moved(
    cluster: Cluster, layout: Layout, held: tuple[int, int], sharing: Sequence[int]
) -> float:
    """The bytes that the update moves of what a rank holds, of which so many ranks share the
    optimizer's part."""
    framework = find_framework(cluster.framework)
    kept = framework.held_moves + (framework.scaling_moves if layout.replicas > 1 else 0)
    kept += cluster.fp8 * CAST_BYTES  # weights become FP8 once a step
    kept *= not framework.gathers  # of which a rank holds its part alone, and casts what it gathers
    each = (framework.optimizer_moves / by + kept for by in sharing)
    return sum(count * moves for count, moves in zip(held, each, strict=True))


def _shared_ns(model: Model, cluster: Cluster, layout: Layout, size: int) -> int:
    """The sum of the gradients of words that the first stage and the last share."""
    if not model.tied or model.whole or layout.stages - 1 in layout.stages_of(0):
        return 0
    machine = load_hardware(cluster.hardware)
    words = model.vocab * model.width // layout.tp * size
    near = 1 if cluster.gpus > machine.gpus_per_node else 2
    return machine.collective_ns("all_reduce", words, 2, near)
