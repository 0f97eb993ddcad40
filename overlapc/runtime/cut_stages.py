"""`CutStages` cuts the stages of a rank in slices, and compares these with a whole microbatch.

The first microbatch goes through the pipeline once, by eager: each stage computes it whole and in
slices, and hands the whole result to the next. So stages see real inputs before anything runs in
slices, and a refusal is an error on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from overlapc.errors import CaptureError, Infeasible, OptionError
from overlapc.planning.options import Options
from overlapc.planning.report import Report
from overlapc.planning.rows import StageFigures
from overlapc.runtime.auto import SLICES
from overlapc.runtime.exchange import Exchange, busy
from overlapc.runtime.ranks import exchange_for, together
from overlapc.runtime.row import Links, Run
from overlapc.runtime.sliced_stage import SlicedStage
from overlapc.runtime.snapshot import as_it_was
from overlapc.runtime.stage import Shapes, Stage, blank, leaves_of
from overlapc.schedule import Schedule


@dataclass(frozen=True)
class Candidate:
    """A planned stage, which is chosen together with those of all other stages."""

    stage: Stage
    report: Report
    figures: StageFigures

    @property
    def microbatch_ns(self) -> int:
        cost = self.figures.cost
        return self.figures.merged_ns or cost.takes("F") + cost.takes("B")


class CutStages:
    """The stages of this rank in slices, as the options of each ask: `found` by stage, and what is
    `said` of those that are not."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        options: Mapping[int, Options],
        links: Links,
    ) -> None:
        self.schedule, self.stages, self.links = schedule, stages, links
        self.counts = {stage: _counts(options[stage], made) for stage, made in stages.items()}
        self.is_auto = {stage: options[stage].slices == "auto" for stage in stages}
        self.found: dict[int, list[SlicedStage]] = {stage: [] for stage in stages}
        self.said: dict[int, dict[int, str]] = {stage: {} for stage in stages}

    def cut(
        self,
        shapes: Mapping[int, Shapes],
        inputs: Sequence[tuple[Any, ...]],
        targets: Sequence[tuple[Any, ...]],
    ) -> None:
        """Cut the stages; `shapes` are those that every stage sends. All ranks call this together.
        OptionError on all if slices that were asked for are refused."""
        cut = [stage for told in self._told("slices", self.counts) for stage in told if told[stage]]
        if not cut:
            return
        end = max(map(int, cut))
        here: tuple[Any, ...] = ()
        for stage in range(end + 1):
            if stage in self.stages:
                given = inputs[0] if stage == 0 else here
                last = stage == self.schedule.stages - 1
                with busy("comparing slices", self.links.timeout_s):
                    here = self._through(
                        stage, (*given, *targets[0]) if last else given, stage < end
                    )
            self._told(
                f"stage {stage} is compared", {}
            )  # ranks that wait so are not taken for lost
            if stage < end:
                with busy("handing results on", self.links.timeout_s):
                    here = self._handed_on(stage, here, shapes[stage])
        refused = {s: [*said.values()] for s, said in self.said.items() if not self.is_auto[s]}
        for told in self._told("refused slices", refused):
            for name, reasons in told.items():
                for reason in reasons:
                    raise OptionError(f"stage {name}: {reason}")

    def planned(
        self, stage: int, plan: Callable[[Stage], list[Candidate]]
    ) -> list[list[Candidate]]:
        """Plan a stage in two ways, of which all stages run the same: in the slices that it is to
        have, or with which a microbatch takes the least; and, if they were not asked for, whole. If
        it has one way, that is both."""
        whole, cut = self.stages[stage], self.found[stage]
        if not self.is_auto[stage]:
            return [plan(cut[0] if cut else whole)] * 2
        ways: dict[int, list[Candidate]] = {}
        refused: list[Infeasible] = []
        for made in (whole, *cut):
            try:
                ways[made.slices] = plan(made)
                said = f"{ways[made.slices][0].microbatch_ns / 1e6:.3f} ms a microbatch, predicted"
            except Infeasible as error:
                refused.append(error)
                said = str(error)
            if cut:
                self.said[stage][made.slices] = said
        if not ways:
            raise refused[0]
        quickest = min(ways, key=lambda count: (ways[count][0].microbatch_ns, count))
        return [ways[quickest], ways.get(1, ways[quickest])]

    def _through(self, stage: int, given: tuple[Any, ...], goes_on: bool) -> tuple[Any, ...]:
        """Cut a stage and compare; return what it gives for the whole microbatch."""
        whole = self.stages[stage]
        for count in self.counts[stage]:
            try:
                self.found[stage].append(self._compared(whole, count, given))
            except (CaptureError, OptionError) as error:
                self.said[stage][count] = str(error)
        if not goes_on:
            return ()
        with as_it_was(whole.module), torch.no_grad():
            results = whole.module(*leaves_of(given, whole.incoming))
        several = results if isinstance(results, (tuple, list)) else (results,)
        return tuple(result.detach().contiguous() for result in several)

    def _compared(self, whole: Stage, count: int, given: tuple[Any, ...]) -> SlicedStage:
        made = SlicedStage(whole, count)
        found: SlicedStage | CaptureError = made
        try:
            made.trace(given)
        except CaptureError as error:
            found = error
        with exchange_for(whole.captured.trace.lanes, self.links.timeout_s) as exchange:
            together(exchange, "captured in slices", found)
            made.compare(given, exchange)
        return made

    def _handed_on(self, stage: int, results: tuple[Any, ...], shapes: Shapes) -> tuple[Any, ...]:
        """Hand a stage's results to the next stage; return what this rank has of them."""
        source, target = (self.schedule.rank_of[s] for s in (stage, stage + 1))
        if source == target or self.links.rank not in (source, target):
            return results
        sends = self.links.rank == source
        how, peer = (dist.isend, target) if sends else (dist.irecv, source)
        tensors = results if sends else tuple(blank(shape).detach() for shape in shapes)
        run = Run(self.schedule, (), {}, {}, self.links)
        run.at = what = f"comparing slices: the results of stage {stage}"
        try:
            for which, tensor in enumerate(tensors):
                tag = run.tag((stage + 1, True, 0, which))
                run.wait(run.post(how, tensor, tag, peer, what), what)
        finally:
            run.waiter.close()
        return tensors

    def _told(self, what: str, mine: Mapping[int, Any]) -> list[dict[str, Any]]:
        """What each rank says of its stages."""
        ranks = dist.get_process_group_ranks(self.links.group)
        with Exchange(ranks, self.links.timeout_s) as exchange:
            return [json.loads(data) for data in exchange.gather(what, json.dumps(mine).encode())]


def _counts(options: Options, stage: Stage) -> tuple[int, ...]:
    """The numbers of slices that a stage may be cut in."""
    if options.slices != "auto":
        return () if options.slices == 1 else (options.slices,)
    if options.plans:
        raise OptionError('plan: slices="auto" plans itself; expected the number of slices')
    return SLICES[1:] if stage.captured.trace.lanes else ()  # or there is nothing to hide
