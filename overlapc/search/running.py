"""`Running` is a search at work: layouts wait by their bounds, and processes plan them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from overlapc.search.cache import PlannedLayouts
from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import Found, Outcome, first_bound, lower_bound
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.memory import most_bytes, run_bytes
from overlapc.search.models.transformer import Model
from overlapc.search.partition import partitioned, stage_counts
from overlapc.search.tasks import Packed, as_it_runs_or_none, bounded, evaluated, tried
from overlapc.search.units import Unit, make_units
from overlapc.search.weights import held_bytes
from overlapc.solvers import has_one_plan, is_of_field

_LESS = (0.85, 0.7, 0.55)  # shares of the best layout's memory that are tried
_TRIES = 60  # layouts to try for the least memory that works


@dataclass
class Progress:
    """The state of a search: the best so far, a bound on the remaining layouts, and their number;
    `doing` is what goes on when none remains."""

    best: Found | None
    bound_ns: int
    tried: int
    left: int
    elapsed_s: float
    doing: str = ""

    @staticmethod
    def of(runs: Sequence[Running], elapsed_s: float, doing: str = "") -> Progress:
        """The state of searches of which the best is asked for."""
        bound = min((bound for run in runs for bound in run.bounds()), default=0)
        tried, left = sum(len(run.tried) for run in runs), sum(run.left for run in runs)
        return Progress(leading(runs).best, bound, tried, left, elapsed_s, doing)


def leading(runs: Sequence[Running]) -> Running:
    """The search with the best layout; without any, the one that lacks the least memory."""

    def key(run: Running) -> tuple[bool, bool, int, Layout] | tuple[bool]:
        first = run.best or min(run.tried, key=rank, default=None)
        return (True,) if first is None else (False, *rank(first))

    return min(runs, key=key)


def rank(found: Found) -> tuple[bool, int, Layout]:
    """The sort key of a layout: layouts that fit first, and among them the fastest."""
    return not found.fits, found.step_ns or found.smallest_bytes, found.layout


def together(runs: Sequence[Running], pool: ProcessPoolExecutor, workers: int) -> Iterator[None]:
    """Go on with several searches at once, which share the processes: the first ones first."""
    while any(run.heap or run.running for run in runs):
        for run in runs:
            while run.heap and sum(len(each.running) for each in runs) < workers:
                run.start(pool, *heapq.heappop(run.heap))
        running = [future for run in runs for future in run.running]
        if not running:
            continue
        done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
        for run in runs:
            for future in done & run.running.keys():
                run.end(future)
        yield


class Running:
    """A running search: layouts by their bounds. Until its blocks are captured, a layout has a
    first, rough bound. So many of the best layouts are `shown`; a layout is planned only if it may
    be one of them, or if None, always."""

    def __init__(
        self, model: Model, cluster: Cluster, solver: str, known: PlannedLayouts, shown: int | None
    ) -> None:
        self.model, self.cluster, self.solver = model, cluster, solver
        self.known, self.shown = known, shown
        self.units: dict[UnitKey, Unit] = {}
        self.packed: dict[UnitKey, Packed] = {}
        self.alike: dict[UnitKey, set[UnitKey]] = {}  # by all but their microbatches
        # Layouts that wait for a capture, with their bounds
        self.waiting: dict[UnitKey, list[tuple[int, Layout]]] = {}
        self.heap: list[tuple[int, Layout]] = []
        self.bounded: set[Layout] = set()  # by what their memory forces
        self.running: dict[Future[Any], tuple[int, Layout | Sequence[UnitKey]]] = {}
        self.passed: list[tuple[int, Layout]] = []  # layouts that cannot win
        self.best: Found | None = None
        self.outcome: Outcome | None = None  # plans of the best
        self.tried: list[Found] = []
        self.less: list[Found] = []
        self.certain = False  # is the named least memory known to work?
        self.bounds_in_slices: list[int] = []  # of layouts that were planned in slices
        self.least: dict[UnitKey, Unit] = {}  # with the least times of the solver's plans

    def add_all(self, layouts: Sequence[Layout]) -> None:
        for layout in layouts:
            self.add(layout)

    @property
    def is_done(self) -> bool:
        """Were layouts added, and all planned or left out?"""
        return bool(self.tried) and not self.heap and not self.running

    def add(self, layout: Layout) -> None:
        key = self.key(layout)
        self.alike.setdefault(replace(key, microbatch=0), set()).add(key)
        found = self.known.get(layout)
        if found is not None and found.is_final:
            self.take(found)
        elif found is not None:
            heapq.heappush(self.heap, (found.least_ns, layout))
        elif min(least := self.least_bytes(layout)) >= self.cluster.memory_bytes:
            stage = max(range(len(least)), key=least.__getitem__)
            self.take(Found(layout, self.solver, smallest_bytes=least[stage], blocking_stage=stage))
        else:
            bound = first_bound(self.model, self.cluster, layout)
            heapq.heappush(self.heap, (bound, layout))

    def least_bytes(self, layout: Layout) -> list[int]:
        """What each rank's run takes at least, with nothing but what it holds throughout."""
        static = held_bytes(self.model, self.cluster, layout)
        return [run_bytes(self.cluster, layout, size, size) for size in static]

    def take(self, found: Found, outcome: Outcome | None = None) -> None:
        self.tried.append(found)
        if found.fits and (self.best is None or rank(found) < rank(self.best)):
            self.best, self.outcome = found, outcome

    def improve(self, outcome: Outcome) -> None:
        """Take this as the best layout."""
        assert self.best is not None
        self.tried[self.tried.index(self.best)] = self.best = outcome.found
        self.outcome = outcome

    def start(self, pool: ProcessPoolExecutor, bound: int, layout: Layout) -> None:
        if self.shown is not None and self.best is not None and bound >= self.best.step_ns:
            self.passed.append((bound, layout))
            return
        key = self.key(layout)
        if key not in self.units:
            alike = replace(key, microbatch=0)
            if alike not in self.waiting:
                self.waiting[alike] = []
                keys = sorted(self.alike[alike], key=lambda key: key.microbatch)
                self.running[pool.submit(make_units, keys)] = bound, keys
            self.waiting[alike].append((bound, layout))
            return
        unit = self.units[key]
        if key not in self.least:
            self.least[key] = unit.planned_by(self.solver)
        placed = not is_of_field(self.solver)
        finer = lower_bound(self.model, self.cluster, layout, self.least[key], placed=placed)
        if finer > bound:
            heapq.heappush(self.heap, (finer, layout))
            return
        model, cluster, packed = self.model, self.cluster, self.pack(key)
        task: Future[Any]
        if self.in_order and layout not in self.bounded:
            self.bounded.add(layout)
            task = pool.submit(bounded, model, cluster, layout, packed, placed)
        else:
            worth_ns, solver = self.worth_ns, self.solver
            task = pool.submit(tried, model, cluster, layout, packed, solver, below_ns=worth_ns)
        self.running[task] = bound, layout

    @property
    def in_order(self) -> bool:
        """Do layouts wait by what their memory forces before they are planned? Some solvers bound
        them by their one plan already."""
        return self.shown is not None and not has_one_plan(self.solver)

    @property
    def worth_ns(self) -> float:
        """A layout of this step or longer is not shown."""
        steps = sorted(found.step_ns for found in self.tried if found.fits)
        if self.shown is None or len(steps) < max(1, self.shown):
            return math.inf
        return steps[max(1, self.shown) - 1]

    def end(self, future: Future[Any]) -> None:
        bound, what = self.running.pop(future)
        result = future.result()
        if not isinstance(what, Layout):
            self.units |= zip(what, result, strict=True)
            for waiting in self.waiting.pop(replace(what[0], microbatch=0)):
                heapq.heappush(self.heap, waiting)
        elif isinstance(result, int):  # a better bound
            heapq.heappush(self.heap, (max(bound, result), what))
        else:
            found, outcome = result
            self.take(found, outcome)
            self.known.put(found)

    def neighbours(self, pool: ProcessPoolExecutor) -> None:
        """Plan the next layouts by bound until as many fit as are shown beside the winner."""
        count = (self.shown or 0) - sum(found.fits for found in self.tried)
        close = sorted(p for p in self.passed if self.key(p[1]) in self.units)[: max(0, count)]
        tasks = [
            pool.submit(
                evaluated,
                self.model,
                self.cluster,
                layout,
                self.pack(self.key(layout)),
                self.solver,
                below_ns=0,
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
        unit = self.unit(key := self.key(even.layout), pool)
        model, cluster, layout = self.model, self.cluster, even.layout
        _, division = partitioned(model, cluster, layout, unit, pool, self.quick)
        layers = stage_counts(self.model, division)
        if division.slowest_ns is None or layers == even.layers:
            return
        task = pool.submit(tried, model, cluster, layout, self.pack(key), self.solver, layers)
        found, outcome = task.result()
        if outcome is not None and found.fits and found.step_ns < even.step_ns:
            found = replace(found, bound_ns=min(found.bound_ns, even.bound_ns))
            self.improve(replace(outcome, found=found))

    def look_again(self, pool: ProcessPoolExecutor, shown: int) -> None:
        """Plan the best layout whole, if the model has its ends and it fits; so far a few blocks
        stood for all. If others of those that are `shown` may then be faster, plan them whole, too,
        and take the fastest."""
        first = self.best
        assert first is not None
        best = first
        if not self.model.whole or is_of_field(self.solver):
            return
        others = sorted((found for found in self.tried if found.fits and found != first), key=rank)
        for found in [first, *others[: max(0, shown - 1)]]:
            if best.whole and found.step_ns >= best.step_ns:
                return
            outcome = pool.submit(as_it_runs_or_none, self.model, self.cluster, found).result()
            if outcome is None:
                if found == first:
                    return
                continue
            self.tried[self.tried.index(found)] = outcome.found
            if found == first or outcome.found.step_ns < best.step_ns:
                self.best = best = outcome.found
                self.outcome = outcome

    def squeeze(self, pool: ProcessPoolExecutor) -> dict[int, Future[Found]]:
        """Begin to plan the best layout with less memory, by bytes: what would that cost?"""
        best = self.best
        assert best is not None
        tasks: dict[int, Future[Found]] = {}
        static = held_bytes(self.model, self.cluster, best.layout, best.layers)
        most = most_bytes(self.cluster, best.layout, static, best.peak_bytes)
        for share in _LESS:
            size = round(most * share)
            known = self.known.get(best.layout, size)
            if known is not None:
                task: Future[Found] = Future()
                task.set_result(known)
            else:
                cluster = replace(self.cluster, memory_bytes=size)
                self.unit(key := self.key(best.layout), pool)
                packed = self.pack(key)
                task = pool.submit(
                    evaluated, self.model, cluster, best.layout, packed, self.quick, best.layers
                )
            tasks[size] = task
        return tasks

    def squeezed(self, tasks: Mapping[int, Future[Found]]) -> None:
        """Take what `squeeze` began."""
        for size, task in tasks.items():
            found = task.result()
            self.known.put(found, size)
            self.less.append(found)

    @property
    def quick(self) -> str:
        """The solver to use for many stages: heu instead of opt, which takes seconds for each."""
        return "heu" if self.solver == "opt" else self.solver

    def unit(self, key: UnitKey, pool: ProcessPoolExecutor) -> Unit:
        if key not in self.units:
            (self.units[key],) = pool.submit(make_units, [key]).result()
        return self.units[key]

    def pack(self, key: UnitKey) -> Packed:
        if key not in self.packed:
            self.packed[key] = Packed.of(self.units[key])
        return self.packed[key]

    def find_smallest(self, pool: ProcessPoolExecutor) -> None:
        """Nothing fits: find the least memory that surely works. The figures so far may be too
        small: later stages may need more than the one that failed first, or the figure covers
        weights alone."""
        sizes = [(found.smallest_bytes, found.layout) for found in self.tried]
        heapq.heapify(sizes)
        for _ in range(_TRIES):
            size, layout = heapq.heappop(sizes)
            cluster = replace(self.cluster, memory_bytes=size)
            self.unit(key := self.key(layout), pool)
            found: Found = pool.submit(
                evaluated, self.model, cluster, layout, self.pack(key), self.solver
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

    def bounds(self) -> list[int]:
        """Bounds on every layout that fits, with any plans of the solver: planned layouts have
        their own bounds, below their steps, or the only plan there is; left-out layouts are no
        better than the best step found."""
        left = [bound for bound, _ in self.heap] + [bound for bound, _ in self.running.values()]
        fitting = [found for found in self.tried if found.fits]
        only = has_one_plan(self.solver)
        found = [found.step_ns if only else found.bound_ns for found in fitting]
        return [*left, *found, *self.bounds_in_slices]

    @property
    def left(self) -> int:
        """The number of layouts that nobody has looked at yet."""
        running = sum(isinstance(what, Layout) for _, what in self.running.values())
        return len(self.heap) + running + sum(map(len, self.waiting.values()))
