"""`CutStages` cuts the stages of a rank in slices, and compares these with a whole microbatch.

Before, the first microbatch goes through the pipeline once (`dry_run.py`). So stages see real
inputs before anything runs in slices, and a refusal is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from overlapc.core.errors import CaptureError, Infeasible, OptionError
from overlapc.planning.options import Options
from overlapc.planning.report import Report
from overlapc.planning.rows import StageFigures
from overlapc.ranks.exchange import busy
from overlapc.ranks.groups import exchange_for, together
from overlapc.runtime.dry_run import Arguments, told
from overlapc.runtime.executor import Links
from overlapc.runtime.foreign import refuse_slices
from overlapc.runtime.slicing.auto import SLICES
from overlapc.runtime.slicing.sliced_stage import SlicedStage
from overlapc.runtime.stage import Stage


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
        stages: Mapping[int, Stage],
        options: Mapping[int, Options],
        links: Links,
    ) -> None:
        self.stages, self.links = stages, links
        self.counts = {stage: _counts(options[stage], made) for stage, made in stages.items()}
        self.is_auto = {stage: options[stage].slices == "auto" for stage in stages}
        self.found: dict[int, list[SlicedStage]] = {stage: [] for stage in stages}
        self.said: dict[int, dict[int, str]] = {stage: {} for stage in stages}

    def cut(self, given: Mapping[int, Sequence[Arguments]]) -> None:
        """Cut the stages, each of which is `given` these microbatches, and compare the first whole
        and in slices. All ranks call this together. OptionError on all if slices that were asked
        for are refused."""
        for stage, each in given.items():
            for count in self.counts[stage]:
                try:
                    with busy("comparing slices"):
                        self.found[stage].append(self._compared(self.stages[stage], count, each))
                except (CaptureError, OptionError) as error:
                    self.said[stage][count] = str(error).removeprefix(f"stage {stage}: ")
        refused = {s: [*said.values()] for s, said in self.said.items() if not self.is_auto[s]}
        for of_rank in told(self.links, "refused slices", refused):
            for name, reasons in of_rank.items():
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

    def forget_inputs(self) -> None:
        """Free what the stages were planned with."""
        for stage, whole in self.stages.items():
            for made in (whole, *self.found[stage]):
                made.inputs = []

    def _compared(self, whole: Stage, count: int, each: Sequence[Arguments]) -> SlicedStage:
        refuse_slices(whole.module, count)
        made = SlicedStage(whole, count)
        found: SlicedStage | CaptureError = made
        try:
            made.trace(each[0], each[1:])
        except CaptureError as error:
            found = error
        with exchange_for(whole.captured.trace.groups, self.links.timeout_s) as exchange:
            together(exchange, "captured in slices", found)
            made.compare(each[0], exchange)
        return made


def _counts(options: Options, stage: Stage) -> tuple[int, ...]:
    """The numbers of slices that a stage may be cut in."""
    if options.slices != "auto":
        return () if options.slices == 1 else (options.slices,)
    if options.plans:
        raise OptionError('plan: slices="auto" plans itself; expected the number of slices')
    return SLICES[1:] if stage.captured.trace.lanes else ()  # or there is nothing to hide
