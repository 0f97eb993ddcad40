"""`partitioned` gives layers to a layout's stages, by each stage's own best plan; each rank has one
stage."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache

from overlapc.core.errors import Infeasible
from overlapc.search.layouts import Cluster, Layout, microbatches, stage_layers
from overlapc.search.models.transformer import Model
from overlapc.search.place import Place, planned
from overlapc.search.tasks import Packed
from overlapc.search.units import Unit
from overlapc.solvers.pipeline.partition import TOGETHER, Partition, best_partition, even

_ROUNDED = 4  # ns that rounding takes from the parts of a stage


def partitioned(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    unit: Unit,
    pool: Executor,
    solver: str = "heu",
) -> tuple[Partition, Partition]:
    """Return the even split of the model's periods, and the split whose slowest stage is fastest;
    plans are made in the pool."""
    count = microbatches(cluster, layout)
    schedule = layout.rows(min(count, 4 * layout.pp))
    periods = stage_layers(model, 1)[0] // model.period
    head_ns, packed = unit.head_ran.step_ns, Packed.of(unit)
    too_many = [model.layers + 1] * layout.pp  # by stage: so many layers do not fit, nor do more

    def place(stage: int, first: int, behind: int) -> Place | None:
        more = model.layers % model.period if behind == periods else 0
        counts = [0] * layout.pp  # those before all in one
        counts[0] += first * model.period
        counts[stage] = (behind - first) * model.period + more
        if counts[stage] >= too_many[stage]:
            return None
        return Place.of(model, cluster, layout, unit, schedule, stage, counts)

    def by_blocks(*segment: int) -> int | None:
        found = place(*segment)
        if found is None or found.room < 0:
            return None
        blocks_ns = unit.least_ns("whole", found.layers, sum(found.dense))
        return int(blocks_ns) + head_ns * (found.head is not None) - _ROUNDED

    def by_memory(*segment: int) -> int | None:
        found = place(*segment)
        return None if found is None else bounded(found)

    @cache
    def bounded(found: Place) -> int:
        parts = found.parts(unit)
        bound = sum(of.bound_ns(p.problem(of)) * p.layers // of.blocks for p, of in parts)
        return bound + head_ns * (found.head is not None) - _ROUNDED

    def by_plan(*segment: int) -> int | None:
        found = place(*segment)
        if found is None:
            return None
        took = solved(found)
        if took is None:
            too_many[found.rank] = min(too_many[found.rank], found.layers)
        return took

    @cache
    def solved(found: Place) -> int | None:
        return pool.submit(_microbatch_ns, found, packed, solver).result()

    with ThreadPoolExecutor(TOGETHER) as threads:
        split = even(periods, layout.pp, by_plan, threads.map)
        return split, best_partition(
            periods, layout.pp, by_plan, by_blocks, by_memory, run=threads.map
        )


def stage_counts(model: Model, partition: Partition) -> tuple[int, ...]:
    """Layers of each stage of a partition of periods."""
    *counts, last = (periods * model.period for periods in partition.layers)
    return *counts, last + model.layers % model.period


def _microbatch_ns(place: Place, packed: Packed, solver: str) -> int | None:
    try:
        return planned(place, packed.unit, solver, time_limit_s=10.0).microbatch_ns
    except Infeasible:
        return None
