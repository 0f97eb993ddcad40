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
from dataclasses import dataclass, field, replace
from pathlib import Path

from overlapc.core.errors import OptionError, OverlapcError
from overlapc.search.cache import PlannedLayouts
from overlapc.search.evaluate import Found, Outcome
from overlapc.search.in_slices import InSlices
from overlapc.search.layouts import ANY, Cluster, Fixed, Layout, layouts, stage_layers
from overlapc.search.megatron import check_modules
from overlapc.search.models.transformer import Model
from overlapc.search.pool import WORKERS, planners, stop
from overlapc.search.running import Progress, Running, leading, rank, together
from overlapc.search.tasks import Packed, evaluated
from overlapc.search.units import Unit
from overlapc.solvers import has_one_plan, is_of_field
from overlapc.tools.progress import stoppable

_OPT_SECONDS = 10.0  # time of opt for all stages, where it is only compared


@dataclass
class Result:
    """The result of a search. `tried` are the layouts that were planned as the best is; `pruned`
    could not win, and at `left` nobody has looked. `less` has the best layout with less memory;
    `rivals` has the best of other solvers, each on its own best layout. `ours` is the best that
    overlapc runs; `instead` is what the framework makes of the same layout by itself."""

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
    # All was looked at, and if nothing fits, the named least memory was tried
    certain: bool = True
    alone: tuple[str, ...] = ()  # solvers of what the framework runs by itself
    counted: int = 0  # plans of layouts by the solvers that the best is of
    left: int = 0
    ours: Found | None = None
    instead: Found | None = None


def search(
    model: Model,
    cluster: Cluster,
    fixed: Fixed = ANY,
    solver: str = "heu",
    *,
    alone: Sequence[str] = (),
    instead: Sequence[str] = (),
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
    that are shown or may be faster are planned whole, too; the fastest is the best.

    `alone` are solvers of what the framework runs by itself: the best is that of the best of them.
    What `solver` finds, if it is none of them, is `ours`, unless nothing else fits. Of the solvers
    `instead` the fastest that fits in the layout of `ours` is named."""
    _refuse(model, solver, (*alone, *rivals), slices)
    begin = time.monotonic()
    every = list(layouts(model, cluster, fixed))
    if not every:
        raise _none(model, cluster, fixed)

    def running(name: str, most: int | None = 1) -> Running:
        return Running(model, cluster, name, PlannedLayouts(cache, model, cluster, name), most)

    first, *others = [running(name, shown if prune else None) for name in alone or (solver,)]
    ours = [running(solver, shown)] if alone and solver not in alone else []
    field_of = [name for name in rivals if is_of_field(name) and name not in alone]
    against = [running(name) for name in field_of]
    for each in (*others, *ours, *against):
        each.units, each.packed = first.units, first.packed
    asked = _Asked(fixed, every, rivals, instead, shown, slices, workers, begin, progress)
    runs = _Searches(asked, [first, *others], ours, against)
    try:
        with stoppable(), planners(workers) as pool:
            try:
                runs.headline(pool)
                runs.others(pool)
            except KeyboardInterrupt:
                runs.interrupted = not runs.complete
                stop(pool)
    except KeyboardInterrupt:
        runs.interrupted = True
    except BrokenProcessPool as error:
        if not runs.complete:
            raise _ended(error) from None
    return replace(runs.result(), alone=tuple(alone))


@dataclass(frozen=True)
class _Asked:
    """What a search was asked for."""

    fixed: Fixed
    every: Sequence[Layout]
    rivals: Sequence[str]
    instead: Sequence[str]
    shown: int
    slices: Sequence[int]
    workers: int
    begin: float
    progress: Callable[[Progress], None]


@dataclass
class _Searches:
    """Searches of the same layouts by several solvers: the best of `mine` is the headline."""

    asked: _Asked
    mine: list[Running]
    ours: list[Running]  # the search of overlapc's own plan, if the headline is another's
    against: list[Running]
    planned: list[Found] = field(default_factory=list)  # by solvers without a search of their own
    unit: Unit | None = None
    instead: Found | None = None
    complete: bool = False  # the headline is found
    interrupted: bool = False

    def tell(self, doing: str) -> None:
        """Report the state of the search for the headline, and what goes on."""
        elapsed_s = time.monotonic() - self.asked.begin
        self.asked.progress(Progress.of(self.mine, elapsed_s, doing))

    def headline(self, pool: ProcessPoolExecutor) -> None:
        """Find the best of the framework's own plans; if none fits, the best of ours."""
        self.go(self.mine, pool)
        if leading(self.mine).best is None and self.ours:
            self.go(self.ours, pool)
            self.mine += self.ours
            self.ours = []
        run = leading(self.mine)
        if run.best is None:
            self.tell("looking for the least memory that works")
            run.find_smallest(pool)
            return
        self.refine(run, pool)
        self.complete = True
        self.unit = run.unit(run.key(run.best.layout), pool)

    def others(self, pool: ProcessPoolExecutor) -> None:
        """Plan what is shown beside the headline."""
        run = leading(self.mine)
        if run.best is None or self.unit is None:
            return
        others = [name for name in self.asked.rivals if not is_of_field(name)]
        tasks = _by_others(pool, run.model, run.cluster, run.best, self.unit, others)
        less = {} if has_one_plan(run.solver) else run.squeeze(pool)
        against = sorted([*self.ours, *self.against], key=_is_quick)
        for each in against:
            each.add_all(self.asked.every)
        for _ in together(against, pool, self.asked.workers):
            self.tell(_counted(against))
        for each in self.ours:
            if each.best is not None:
                self.refine(each, pool)
        self.tell("planning the fastest with less memory, and by other solvers")
        run.squeezed(less)
        self.planned += [task.result() for task in tasks.values()]
        self.find_instead(pool)

    def go(self, runs: Sequence[Running], pool: ProcessPoolExecutor) -> None:
        for run in runs:
            run.add_all(self.asked.every)
        for _ in together(runs, pool, self.asked.workers):
            self.tell("")

    def refine(self, run: Running, pool: ProcessPoolExecutor) -> None:
        asked = self.asked
        slices = () if is_of_field(run.solver) else asked.slices
        _refine(run, pool, asked.fixed, asked.shown, slices, self.tell)
        InSlices(run, pool, asked.every, slices, asked.shown).go(asked.workers)

    def find_instead(self, pool: ProcessPoolExecutor) -> None:
        """What runs in the layout of ours where overlapc does not."""
        run = leading(self.ours or self.mine)
        if run.best is None or not self.asked.instead:
            return
        unit = run.unit(run.key(run.best.layout), pool)
        tasks = _by_others(pool, run.model, run.cluster, run.best, unit, self.asked.instead)
        found = [each.result() for each in tasks.values()]
        found = [each for each in found if each.fits and each.layers == run.best.layers]
        self.instead = min(found, key=rank, default=None)

    def result(self) -> Result:
        run, begin = leading(self.mine), self.asked.begin
        state = Progress.of(self.mine, 0.0)
        beside = [each for each in (*self.mine, *self.against) if each is not run and each.is_done]
        every = len(self.asked.every) * sum(bool(each.tried or each.left) for each in self.mine)
        return Result(
            run.best,
            sorted(run.tried, key=rank),
            run.less,
            [each.best or min(each.tried, key=rank) for each in beside],
            [*self.planned, *(found for each in beside for found in each.tried)],
            self.unit,
            run.outcome,
            max(0, every - state.tried - state.left),
            state.bound_ns,
            interrupted=self.interrupted,
            certain=not self.interrupted and (run.best is not None or run.certain),
            seconds=time.monotonic() - begin,
            counted=state.tried,
            left=state.left,
            ours=next((each.best for each in self.ours if each.is_done), None),
            instead=self.instead,
        )


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
    """What the other solvers' own searches are at."""
    tried, left = sum(len(each.tried) for each in against), sum(each.left for each in against)
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
    layout, packed = chosen.layout, Packed.of(unit)
    return {
        (solver, layers): pool.submit(
            evaluated, model, cluster, layout, packed, solver, layers, limit
        )
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
