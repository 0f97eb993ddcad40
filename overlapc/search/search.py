"""`search` finds the fastest layout: it tries all layouts, the best bound first.

A layout whose bound is no better than the best step so far is left out, so the winner is the same
as if all were tried. Layers are split evenly during the search; at the end the winner, if each rank
has one stage, gets its best split. Rows are placed where that could make a layout one of those that
are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from overlapc.errors import OptionError, OverlapcError
from overlapc.progress import stoppable
from overlapc.search.cache import Cache
from overlapc.search.evaluate import Found, Outcome
from overlapc.search.in_slices import InSlices
from overlapc.search.layouts import ANY, Cluster, Fixed, layouts, stage_layers
from overlapc.search.megatron import check_modules
from overlapc.search.models import Model
from overlapc.search.pool import WORKERS, planners, stop
from overlapc.search.running import Progress, Running, rank, together
from overlapc.search.tasks import Packed, evaluated
from overlapc.search.units import Unit
from overlapc.solvers import has_one_plan, is_of_field

_OPT_SECONDS = 10.0  # time of opt for all stages, where it is only compared


@dataclass
class Result:
    """The result of a search. `tried` are all layouts that were planned; `pruned` could not win.
    `less` has the best layout with less memory; `rivals` has the best of other solvers, each on its
    own best layout."""

    best: Found | None
    tried: list[Found] = field(default_factory=list)
    less: list[Found] = field(default_factory=list)
    rivals: list[Found] = field(default_factory=list)
    planned: list[Found] = field(default_factory=list)  # all layouts that the rivals tried
    unit: Unit | None = None  # the capture of the best
    outcome: Outcome | None = None  # plans of the best, unless it came from the cache
    pruned: int = 0
    bound_ns: int = 0  # a bound on every layout, tried or not
    seconds: float = 0.0
    interrupted: bool = False
    certain: bool = True  # if nothing fits: the named least memory was tried


def search(
    model: Model,
    cluster: Cluster,
    fixed: Fixed = ANY,
    solver: str = "heu",
    *,
    prune: bool = True,
    shown: int = 5,
    rivals: Sequence[str] = (),
    workers: int = WORKERS,
    cache: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    slices: Sequence[int] = (),
) -> Result:
    """Find the layout whose step is shortest with its stages' best plans, and so many `shown` to
    compare it with; and for each baseline among the rivals its own best layout. Other rivals plan
    the best layout meanwhile. Ctrl-C or SIGTERM ends the search with the best so far. `cache` is a
    folder that keeps planned layouts for later searches. In these numbers of `slices` the layouts
    that are shown or may be faster are planned whole, too; the fastest is the best."""
    _refuse(model, solver, rivals, slices)
    begin = time.monotonic()
    every = list(layouts(model, cluster, fixed))
    if not every:
        raise _none(model, cluster, fixed)
    known = Cache(cache, model, cluster, solver)
    run = Running(model, cluster, solver, known, shown if prune else None)
    run.add_all(every)
    against = [
        _rival(run, name, Cache(cache, model, cluster, name))
        for name in rivals
        if is_of_field(name)
    ]
    planned: list[Found] = []  # by other solvers
    unit: Unit | None = None
    tell = _teller(run, begin, progress)
    try:
        with stoppable(), planners(workers) as pool:
            try:
                for _ in run.go(pool, workers):
                    tell("")
                if run.best is None:
                    tell("looking for the least memory that works")
                    run.find_smallest(pool)
                else:
                    _refine(run, pool, fixed, shown, slices, tell)
                    InSlices(run, pool, every, slices, shown).go(workers)
                    run.complete = True
                    unit = run.unit(run.key(run.best.layout), pool)
                    others = [name for name in rivals if not is_of_field(name)]
                    tasks = _by_others(pool, model, cluster, run.best, unit, others)
                    less = run.squeeze(pool)
                    for rival in against:
                        rival.add_all(every)
                    for _ in together(sorted(against, key=_is_quick), pool, workers):
                        tell(_counted(against))
                    tell("planning the fastest with less memory, and by other solvers")
                    run.squeezed(less)
                    planned += [task.result() for task in tasks.values()]
            except KeyboardInterrupt:
                run.interrupted = not run.complete
                stop(pool)
    except KeyboardInterrupt:
        run.interrupted = True
    except BrokenProcessPool as error:
        if not run.complete:
            raise _ended(error) from None
    return Result(
        run.best,
        sorted(run.tried, key=rank),
        run.less,
        [rival.best or min(rival.tried, key=rank) for rival in against if rival.is_done],
        [*planned, *(each for rival in against for each in rival.tried)],
        unit,
        run.outcome,
        len(every) - len(run.tried),
        run.bound(),
        certain=run.best is not None or run.certain,
        seconds=time.monotonic() - begin,
        interrupted=run.interrupted,
    )


def _rival(run: Running, solver: str, known: Cache) -> Running:
    """The same search with another solver, by the same captures. Its best alone is shown."""
    rival = Running(run.model, run.cluster, solver, known, shown=1)
    rival.units, rival.packed = run.units, run.packed
    return rival


def _teller(
    run: Running, begin: float, progress: Callable[[Progress], None]
) -> Callable[[str], None]:
    """What reports the state of a search, and what it does."""
    return lambda doing: progress(run.progress(time.monotonic() - begin, doing))


def _refine(
    run: Running,
    pool: ProcessPoolExecutor,
    fixed: Fixed,
    shown: int,
    slices: Sequence[int],
    tell: Callable[[str], None],
) -> None:
    """Plan the layouts that are listed beside the best, the best's split of layers, and, if the
    model has its ends, the listed ones whole."""
    assert run.best is not None
    tell("planning layouts to list beside the fastest")
    run.neighbours(pool)
    if run.best.layout.stages == run.best.layout.pp > 1 and not any(fixed.ends):
        tell("dividing the layers of the fastest among its stages")
        run.divide(pool)
    if run.model.whole:
        tell("planning the listed layouts whole" + ", and more in slices" * bool(slices))
        run.look_again(pool, shown)


def _counted(against: Sequence[Running]) -> str:
    """What the baselines' own searches are at."""
    counts = [rival.progress(0.0) for rival in against]
    tried, left = sum(each.tried for each in counts), sum(each.left for each in counts)
    return f"searching layouts of {len(against)} baselines, {tried} planned, {left} left"


def _is_quick(rival: Running) -> bool:
    return has_one_plan(rival.solver)


def _refuse(model: Model, solver: str, rivals: Sequence[str], slices: Sequence[int]) -> None:
    """Raise OptionError for what these solvers cannot do with the model."""
    if slices and (not model.whole or is_of_field(solver)):
        raise OptionError(
            f"slices={','.join(map(str, slices))} with {model.name} and solver {solver!r}; "
            "expected a model of your own with what is before and behind its blocks, which is "
            "planned whole, and no baseline"
        )
    for name in (solver, *rivals):
        check_modules(model, name)


def _none(model: Model, cluster: Cluster, fixed: Fixed) -> OptionError:
    has = "" if fixed == ANY else f" has {fixed}"
    expected = [
        f"a product of tp, cp, pp and dp of {cluster.gpus}",
        model.hint(),
        f"a pp of at most {model.layers // model.period} over the stages of a rank",
        f"a dp times microbatch that divides {cluster.global_batch} sequences",
        "for interleaved stages a multiple of pp microbatches",
    ]
    if model.experts:
        expected.append(f"an ep that divides {model.experts} experts and the ranks of a stage")
    elif fixed.shares_experts or fixed.ep:
        expected.append("experts, of which this model has none")
    if any(fixed.ends):
        expected.append("ends that leave layers to the stages between them")
    if fixed.cp_comm_type == "a2a":
        expected.append("for a2a a tp times cp that divides all heads")
    return OptionError(
        f"found no layout of {model.name} on {cluster.gpus} GPUs, {cluster.gpus_per_node} a node, "
        f"that{has or ' the model and batch allow'}; expected {', '.join(expected[:-1])}, and "
        f"{expected[-1]}"
    )


def compare(
    model: Model,
    cluster: Cluster,
    chosen: Found,
    unit: Unit,
    solvers: Sequence[str],
    planned: Sequence[Found] = (),
) -> list[Found]:
    """Plan the chosen layout by each solver, with its layers divided as chosen or evenly, whichever
    is faster. Layouts among `planned` are not planned again."""
    known = {(f.solver, f.layers): f for f in planned if f.layout == chosen.layout}
    try:
        with planners() as pool:
            try:
                tasks = _by_others(pool, model, cluster, chosen, unit, solvers, known)
                known |= {key: task.result() for key, task in tasks.items()}
            except KeyboardInterrupt:
                stop(pool)
                raise
    except BrokenProcessPool as error:
        raise _ended(error) from None
    known[chosen.solver, chosen.layers] = chosen
    every = ((found for (name, _), found in known.items() if name == one) for one in solvers)
    return [min(found, key=rank) for found in every]


def _by_others(
    pool: ProcessPoolExecutor,
    model: Model,
    cluster: Cluster,
    chosen: Found,
    unit: Unit,
    solvers: Sequence[str],
    known: Container[tuple[str, tuple[int, ...]]] = (),
) -> dict[tuple[str, tuple[int, ...]], Future[Found]]:
    """Begin to plan the chosen layout by other solvers, the slowest first, by solver and layers."""
    splits = {chosen.layers, tuple(stage_layers(model, chosen.layout.stages, chosen.layout.ends))}
    limit = _OPT_SECONDS / (chosen.layout.pp * len(splits))
    where = model, cluster, chosen.layout, Packed.of(unit)
    return {
        (solver, layers): pool.submit(evaluated, *where, solver, layers, limit)
        for solver in sorted(solvers, key="opt".__ne__)
        for layers in splits
        if solver != chosen.solver and (solver, layers) not in known
    }


def _ended(error: BrokenProcessPool) -> OverlapcError:
    return OverlapcError(
        f"a process of the search ended by itself ({error}); expected it to plan on: see above for "
        "why, most often too little memory here, and start it again"
    )


__all__ = ["Progress", "Result", "compare", "search"]
