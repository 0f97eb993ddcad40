"""`InSlices` plans layouts in slices, when the best with whole microbatches is known."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from overlapc.search.evaluate import Found, Outcome, first_bound, lower_bound
from overlapc.search.layouts import Layout, microbatches, stage_layers
from overlapc.search.running import Running, rank
from overlapc.search.tasks import as_it_runs_or_none, warn_of_uncut


class InSlices:
    """The layouts that are shown, and all whose bound in slices is below the best step, are planned
    whole in these numbers of slices, the best bound first.

    In slices a collective may hide that nothing hides in a whole microbatch. So a layout that was
    left out may be the fastest; its bound counts compute, and each lane's communication, alone.
    """

    def __init__(
        self,
        run: Running,
        pool: ProcessPoolExecutor,
        every: Sequence[Layout],
        slices: Sequence[int],
        shown: int,
    ) -> None:
        self.run, self.pool = run, pool
        self.slices = [count for count in dict.fromkeys(slices) if count > 1]
        self.shown = [found for found in sorted(run.tried, key=rank)[:shown] if found.fits]
        self.known = {found.layout: found for found in run.tried}
        self.listed = {found.layout for found in self.shown}
        self.heap = [(self.bound(layout), count, layout) for layout, count in self.of(every)]
        heapq.heapify(self.heap)

    def of(self, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, int]]:
        """The layouts that can be cut, with each number of slices."""
        for layout in layouts:
            for count in self.slices:
                if layout.microbatch % count == 0:
                    yield layout, count

    def bound(self, layout: Layout) -> int:
        """A bound on the layout's step in any number of slices: a rough one until its blocks are
        captured."""
        run, key = self.run, self.run.key(layout)
        if key not in run.units:
            return first_bound(run.model, run.cluster, layout)
        return lower_bound(run.model, run.cluster, layout, run.units[key].cut)

    def go(self, workers: int) -> None:
        """Plan, and take what is faster."""
        cut: set[int] = set()  # numbers of slices in which something was planned
        running: dict[Future[Outcome | None], Layout] = {}
        while self.heap or running:
            while self.heap and len(running) < workers:
                bound, count, layout = heapq.heappop(self.heap)
                if self.may_win(bound, layout) and not self.put_back(bound, count, layout):
                    self.run.bounds_in_slices.append(bound)
                    model, cluster, uncut = self.run.model, self.run.cluster, self.uncut(layout)
                    task = self.pool.submit(as_it_runs_or_none, model, cluster, uncut, count)
                    running[task] = layout
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for task in done:
                layout, outcome = running.pop(task), task.result()
                if outcome is not None:
                    cut.add(outcome.found.slices)
                    self.take(layout, outcome)
        warn_of_uncut(self.slices, self.shown, cut)

    def may_win(self, bound: int, layout: Layout) -> bool:
        """Is the layout shown, or may it be the fastest?"""
        run, best = self.run, self.run.best
        assert best is not None
        if layout in self.listed:
            return True
        return bound < best.step_ns and min(run.least_bytes(layout)) < run.cluster.memory_bytes

    def put_back(self, bound: int, count: int, layout: Layout) -> bool:
        """Does the layout wait by a finer bound, of its captured blocks?"""
        self.run.unit(self.run.key(layout), self.pool)
        if (finer := self.bound(layout)) > bound:
            heapq.heappush(self.heap, (finer, count, layout))
        return finer > bound

    def uncut(self, layout: Layout) -> Found:
        """What is known of the layout with whole microbatches."""
        found = self.known.get(layout)
        if found is not None and found.fits:
            return found
        layers = tuple(stage_layers(self.run.model, layout.stages, layout.ends))
        number = microbatches(self.run.cluster, layout)
        return Found(layout, self.run.solver, layers=layers, microbatches=number)

    def take(self, layout: Layout, outcome: Outcome) -> None:
        """Take the layout in slices if it is the fastest."""
        run, best = self.run, self.run.best
        if best is None or outcome.found.step_ns >= best.step_ns:
            return
        run.tried = [found for found in run.tried if found.layout != layout]
        run.take(outcome.found, outcome)
