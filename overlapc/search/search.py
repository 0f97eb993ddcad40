"""`search` finds the fastest layout: it tries all layouts, the best bound first.

A layout whose bound is no better than the best step so far is left out, so the winner is the same
as if all were tried. Layers are split evenly during the search; at the end the winner, if each rank
has one stage, gets its best split. Rows are placed where that could make a layout win.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overlapc.errors import OptionError, OverlapcError
from overlapc.progress import stoppable
from overlapc.search.cache import Cache
from overlapc.search.evaluate import Found, Outcome, first_bound, lower_bound
from overlapc.search.frameworks import find_framework
from overlapc.search.layouts import (
    ANY,
    Cluster,
    Fixed,
    Layout,
    layouts,
    stage_layers,
    static_bytes,
)
from overlapc.search.models import Model
from overlapc.search.partition import partitioned, stage_counts
from overlapc.search.pool import WORKERS, planners, stop
from overlapc.search.tasks import as_it_runs_or_none, evaluated, tried, warn_of_uncut
from overlapc.search.units import Unit, UnitKey, make_unit
from overlapc.solvers import FIELD

_LESS = (0.85, 0.7, 0.55)  # shares of the best layout's memory that are tried
_TRIES = 60  # layouts to try for the least memory that works
_OPT_SECONDS = 10.0  # time of opt for all stages, where it is only compared


@dataclass
class Progress:
    """The state of a search: the best so far, a bound on the remaining layouts, and their
    number."""

    best: Found | None
    bound_ns: int
    tried: int
    left: int
    elapsed_s: float


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
    """Find the layout whose step is shortest with its stages' best plans, and `top` layouts to
    compare it with; and for each solver among the rivals its own best layout. Ctrl-C or SIGTERM
    ends the search with the best so far. `cache` is a folder that keeps planned layouts for later
    searches. In these numbers of `slices` the layouts that are shown are planned whole, too; the
    fastest is the best."""
    if slices and (not model.whole or solver in FIELD):
        raise OptionError(
            f"slices={','.join(map(str, slices))} with {model.name} and solver {solver!r}; "
            "expected a model of your own with what is before and behind its blocks, which is "
            "planned whole, and no baseline"
        )
    begin = time.monotonic()
    every = list(layouts(model, cluster, fixed))
    if not every:
        raise _none(model, cluster, fixed)
    known = Cache(cache, model, cluster, solver)
    run = _Run(model, cluster, solver, known, prune)
    for layout in every:
        run.add(layout)
    found: list[Found] = []  # planned for the rivals
    planned: list[Found] = []
    unit: Unit | None = None
    try:
        with stoppable(), planners(workers) as pool:
            try:
                for _ in run.go(pool, workers):
                    progress(run.progress(time.monotonic() - begin))
                if run.best is None:
                    run.find_smallest(pool)
                else:
                    run.neighbours(pool, shown)
                    if run.best.layout.stages == run.best.layout.pp > 1 and not any(fixed.ends):
                        run.divide(pool)
                    run.look_again(pool)
                    run.cut(pool, slices, shown)
                    run.complete = True
                    unit = run.unit(run.key(run.best.layout), pool)
                    run.squeeze(pool)
                    for name in rivals:
                        rival = _rival(run, name, Cache(cache, model, cluster, name), every)
                        for _ in rival.go(pool, workers):
                            pass
                        found.append(rival.best or min(rival.tried, key=rank))
                        planned += rival.tried
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
        found,
        planned,
        unit,
        run.outcome,
        len(every) - len(run.tried),
        run.bound(),
        certain=run.best is not None or run.certain,
        seconds=time.monotonic() - begin,
        interrupted=run.interrupted,
    )


def _rival(run: _Run, solver: str, known: Cache, every: Sequence[Layout]) -> _Run:
    """The same search with another solver, by the same captures."""
    rival = _Run(run.model, run.cluster, solver, known, prune=True)
    rival.units = run.units
    for layout in every:
        rival.add(layout)
    return rival


def _none(model: Model, cluster: Cluster, fixed: Fixed) -> OptionError:
    return OptionError(
        f"no layout of {model.name} on {cluster.gpus} GPUs, {cluster.gpus_per_node} a node, "
        f"has {fixed}; expected {model.hint()}, a pp of at most "
        f"{model.layers // model.period} over the stages of a rank, a dp times "
        f"microbatch that divides {cluster.global_batch} sequences, and for interleaved "
        "stages a multiple of pp microbatches"
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
    splits = {chosen.layers, tuple(stage_layers(model, chosen.layout.stages, chosen.layout.ends))}
    known = {(f.solver, f.layers): f for f in planned if f.layout == chosen.layout}
    limit = _OPT_SECONDS / (chosen.layout.pp * len(splits))
    where = model, cluster, chosen.layout, unit
    try:
        with planners() as pool:
            try:
                tasks = {
                    (solver, s): pool.submit(evaluated, *where, solver, s, limit)
                    for solver in sorted(solvers, key="opt".__ne__)  # the slowest first
                    for s in splits
                    if solver != chosen.solver and (solver, s) not in known
                }
                known |= {key: task.result() for key, task in tasks.items()}
            except KeyboardInterrupt:
                stop(pool)
                raise
    except BrokenProcessPool as error:
        raise _ended(error) from None
    known[chosen.solver, chosen.layers] = chosen
    every = ((found for (name, _), found in known.items() if name == one) for one in solvers)
    return [min(found, key=rank) for found in every]


def _ended(error: BrokenProcessPool) -> OverlapcError:
    return OverlapcError(
        f"a process of the search ended by itself ({error}); expected it to plan on: see above for "
        "why, most often too little memory here, and start it again"
    )


def rank(found: Found) -> tuple[bool, int, Layout]:
    """The sort key of a layout: layouts that fit first, and among them the fastest."""
    return not found.fits, found.step_ns or found.smallest_bytes, found.layout


class _Run:
    """A running search: layouts by their bounds. Until its blocks are captured, a layout has a
    first, rough bound."""

    def __init__(
        self, model: Model, cluster: Cluster, solver: str, known: Cache, prune: bool
    ) -> None:
        self.model, self.cluster, self.solver = model, cluster, solver
        self.known, self.prune = known, prune
        self.units: dict[UnitKey, Unit] = {}
        self.waiting: dict[UnitKey, list[Layout]] = {}  # layouts that wait for a capture
        self.heap: list[tuple[int, Layout]] = []
        self.running: dict[Future[Any], tuple[int, Layout | UnitKey]] = {}
        self.passed: list[tuple[int, Layout]] = []  # layouts that cannot win
        self.best: Found | None = None
        self.outcome: Outcome | None = None  # plans of the best
        self.tried: list[Found] = []
        self.less: list[Found] = []
        self.interrupted = self.complete = False
        self.certain = False  # is the named least memory known to work?
        self.least: dict[UnitKey, Unit] = {}  # with the least times of the solver's plans

    def add(self, layout: Layout) -> None:
        found = self.known.get(layout)
        if found is not None and found.is_final:
            self.take(found)
        elif found is not None:
            heapq.heappush(self.heap, (found.least_ns, layout))
        elif min(static := self.static(layout)) >= self.cluster.memory_bytes:
            stage = max(range(len(static)), key=static.__getitem__)
            self.take(
                Found(layout, self.solver, smallest_bytes=static[stage], blocking_stage=stage)
            )
        else:
            bound = first_bound(self.model, self.cluster, layout)
            heapq.heappush(self.heap, (bound, layout))

    def static(self, layout: Layout) -> list[int]:
        framework = find_framework(self.cluster.framework)
        return static_bytes(self.model, layout, framework=framework)

    def take(self, found: Found, outcome: Outcome | None = None) -> None:
        self.tried.append(found)
        if found.fits and (self.best is None or rank(found) < rank(self.best)):
            self.best, self.outcome = found, outcome

    def improve(self, outcome: Outcome) -> None:
        """Take this as the best layout."""
        assert self.best is not None
        self.tried[self.tried.index(self.best)] = self.best = outcome.found
        self.outcome = outcome

    def go(self, pool: ProcessPoolExecutor, workers: int) -> Iterator[None]:
        while self.heap or self.running:
            while self.heap and len(self.running) < workers:
                self.start(pool, *heapq.heappop(self.heap))
            if not self.running:
                continue
            done, _ = wait(self.running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                self.end(future)
            yield

    def start(self, pool: ProcessPoolExecutor, bound: int, layout: Layout) -> None:
        if self.prune and self.best is not None and bound >= self.best.step_ns:
            self.passed.append((bound, layout))
            return
        key = self.key(layout)
        if key not in self.units:
            if key not in self.waiting:
                self.waiting[key] = []
                self.running[pool.submit(make_unit, key)] = bound, key
            self.waiting[key].append(layout)
            return
        unit = self.units[key]
        if key not in self.least:
            self.least[key] = unit.planned_by(self.solver)
        placed = self.solver not in FIELD
        finer = lower_bound(self.model, self.cluster, layout, self.least[key], placed=placed)
        if finer > bound:
            heapq.heappush(self.heap, (finer, layout))
            return
        where = self.model, self.cluster, layout, unit, self.solver
        most = math.inf if self.best is None else self.best.step_ns
        self.running[pool.submit(tried, *where, below_ns=most)] = bound, layout

    def end(self, future: Future[Any]) -> None:
        bound, what = self.running.pop(future)
        result = future.result()
        if isinstance(what, UnitKey):
            self.units[what] = result
            for layout in self.waiting.pop(what):
                heapq.heappush(self.heap, (bound, layout))
        else:
            found, outcome = result
            self.take(found, outcome)
            self.known.put(found)

    def neighbours(self, pool: ProcessPoolExecutor, count: int) -> None:
        """Plan the next layouts by bound until so many fit, to be shown beside the winner."""
        count -= sum(found.fits for found in self.tried)
        close = sorted(p for p in self.passed if self.key(p[1]) in self.units)[: max(0, count)]
        where = self.model, self.cluster
        tasks = [
            pool.submit(
                evaluated, *where, layout, self.units[self.key(layout)], self.solver, below_ns=0
            )
            for _, layout in close
        ]
        for task in tasks:
            self.take(task.result())
            self.known.put(task.result())

    def divide(self, pool: ProcessPoolExecutor) -> None:
        """Give the best layout its best split of layers; so far every layout had an even split."""
        even = self.best
        assert even is not None
        unit = self.unit(self.key(even.layout), pool)
        solver = self.quick
        where = self.model, self.cluster, even.layout, unit
        _, division = partitioned(*where, pool, solver)
        layers = stage_counts(self.model, division)
        if division.slowest_ns is None or layers == even.layers:
            return
        found, outcome = pool.submit(tried, *where, self.solver, layers).result()
        if outcome is not None and found.fits and found.step_ns < even.step_ns:
            found = replace(found, bound_ns=min(found.bound_ns, even.bound_ns))
            self.improve(replace(outcome, found=found))

    def look_again(self, pool: ProcessPoolExecutor) -> None:
        """Plan the best layout whole, if the model has its ends and it fits; so far a few blocks
        stood for all."""
        assert self.best is not None
        if self.model.whole and self.solver not in FIELD:
            outcome = pool.submit(as_it_runs_or_none, self.model, self.cluster, self.best).result()
            if outcome is not None:
                self.improve(outcome)

    def cut(self, pool: ProcessPoolExecutor, slices: Sequence[int], shown: int) -> None:
        """Plan the layouts that are shown in slices, whole, and take the fastest."""
        layouts = [found for found in sorted(self.tried, key=rank)[:shown] if found.fits]
        tasks = {
            pool.submit(as_it_runs_or_none, self.model, self.cluster, found, count): found
            for count in slices
            for found in layouts
            if count > 1 and found.layout.microbatch % count == 0
        }
        outcomes = [(found, task.result()) for task, found in tasks.items()]
        warn_of_uncut(slices, layouts, [each.found.slices for _, each in outcomes if each])
        for found, outcome in outcomes:
            if outcome and self.best and outcome.found.step_ns < self.best.step_ns:
                if found in self.tried:
                    self.tried.remove(found)
                self.take(outcome.found, outcome)

    def squeeze(self, pool: ProcessPoolExecutor) -> None:
        """Plan the best layout with less memory, to show what that would cost."""
        best = self.best
        assert best is not None
        tasks: list[Future[Found]] = []
        for share in _LESS:
            size = round(max(best.peak_bytes) * share)
            known = self.known.get(best.layout, size)
            if known is not None:
                task: Future[Found] = Future()
                task.set_result(known)
            else:
                cluster = replace(self.cluster, memory_bytes=size)
                where = self.model, cluster, best.layout, self.unit(self.key(best.layout), pool)
                task = pool.submit(evaluated, *where, self.quick, best.layers)
            tasks.append(task)
        for share, task in zip(_LESS, tasks, strict=True):
            found = task.result()
            self.known.put(found, round(max(best.peak_bytes) * share))
            self.less.append(found)

    @property
    def quick(self) -> str:
        """The solver to use for many stages: heu instead of opt, which takes seconds for each."""
        return "heu" if self.solver == "opt" else self.solver

    def unit(self, key: UnitKey, pool: ProcessPoolExecutor) -> Unit:
        if key not in self.units:
            self.units[key] = pool.submit(make_unit, key).result()
        return self.units[key]

    def find_smallest(self, pool: ProcessPoolExecutor) -> None:
        """Nothing fits: find the least memory that surely works. The figures so far may be too
        small: later stages may need more than the one that failed first, or the figure covers
        weights alone."""
        sizes = [(found.smallest_bytes, found.layout) for found in self.tried]
        heapq.heapify(sizes)
        for _ in range(_TRIES):
            size, layout = heapq.heappop(sizes)
            cluster = replace(self.cluster, memory_bytes=size)
            unit = self.unit(self.key(layout), pool)
            found: Found = pool.submit(
                evaluated, self.model, cluster, layout, unit, self.solver
            ).result()
            if found.fits:
                self.tried = [
                    replace(t, smallest_bytes=max(size + (t.layout != layout), t.smallest_bytes))
                    for t in self.tried
                ]
                self.certain = True
                return
            heapq.heappush(sizes, (found.smallest_bytes, layout))

    def key(self, layout: Layout) -> UnitKey:
        return UnitKey.of(self.model, self.cluster, layout)

    def bound(self) -> int:
        """A bound on every layout that fits, with any plans: planned layouts have their own bounds,
        below their steps; left-out layouts are no better than the best step found."""
        left = [bound for bound, _ in self.heap] + [bound for bound, _ in self.running.values()]
        found = [found.bound_ns for found in self.tried if found.fits]
        return min([*left, *found], default=0)

    def progress(self, elapsed_s: float) -> Progress:
        waiting = sum(map(len, self.waiting.values()))
        left = len(self.heap) + len(self.running) + waiting
        return Progress(self.best, self.bound(), len(self.tried), left, elapsed_s)


__all__ = ["Progress", "Result", "compare", "search"]
