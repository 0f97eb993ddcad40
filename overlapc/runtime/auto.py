"""`TrainStep(model, slices="auto")`: each kind of batch whole, or in the slices that are predicted
to be faster, as far as they are not refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from overlapc.errors import Infeasible, OptionError
from overlapc.planning.report import Report
from overlapc.runtime.foreign import unmade
from overlapc.runtime.given import alike, givens
from overlapc.runtime.train_step import TrainStep

SLICES = (1, 2, 4)  # more were never faster in what was published


@dataclass
class _Ranking:
    """The numbers of slices for one kind of batch that may run, the fastest by plan first."""

    left: list[int]
    said: dict[int, str] = field(default_factory=dict)  # what is known of each number


class AutoStep(TrainStep):
    """A TrainStep for each number of slices, of which one runs a step.

    All are planned when a kind of batch first comes, if there is communication to hide. The fastest
    runs; should its slices be refused, the next does. All ranks see the same predictions and the
    same refusals.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None = None,
        *,
        merge: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, loss, merge=merge, **options | {"slices": 1})
        if self._options.plans:
            raise OptionError('plan: slices="auto" plans itself; expected the number of slices')
        self._make = lambda count: TrainStep(
            model, loss, merge=merge, **options | {"slices": count}
        )
        self._steps: dict[int, TrainStep] = {}
        self._rankings: dict[Any, _Ranking] = {}
        self._now: tuple[TrainStep, _Ranking] | None = None  # what ran, or was planned, last

    def __call__(self, microbatches: Sequence[Any]) -> list[Any]:
        ranking = self._ranking(microbatches)
        while True:
            count = ranking.left[0]
            try:
                results = self._steps[count](microbatches)
            except OptionError as refused:  # before anything ran in slices
                if len(ranking.left) == 1:
                    raise
                ranking.said[count] = str(refused)
                del ranking.left[0]
                continue
            del ranking.left[1:]
            self._take(ranking)
            return results

    def plan(self, microbatches: Sequence[Any]) -> Report | None:
        ranking = self._ranking(microbatches)
        self._take(ranking)
        return self.report

    @property
    def differences(self) -> list[str]:
        return [] if self._now is None else self._now[0].differences

    def explain(self) -> str:
        if self._now is None:
            return super().explain()
        step, ranking = self._now
        said = (f"{count} slices: {what}" for count, what in sorted(ranking.said.items()))
        return "\n\n".join([step.explain(), "\n".join(said)])

    def _take(self, ranking: _Ranking) -> None:
        count = ranking.left[0]
        self._now = self._steps[count], ranking
        self.report, self.unchanged = self._steps[count].report, self._steps[count].unchanged
        wanted = {count for each in self._rankings.values() for count in each.left}
        self._steps = {count: step for count, step in self._steps.items() if count in wanted}

    def _ranking(self, microbatches: Sequence[Any]) -> _Ranking:
        if unmade(self.model):  # it is planned at the next step
            self._steps.setdefault(1, self._make(1))
            return _Ranking([1])
        each = givens(microbatches)
        key = len(each), alike(each)
        if key not in self._rankings:
            self._rankings[key] = self._ranked(microbatches)
        return self._rankings[key]

    def _ranked(self, microbatches: Sequence[Any]) -> _Ranking:
        """Plan all numbers of slices. What cannot be captured, or fits in no way, runs whole."""
        found: dict[int, int] = {}
        ranking = _Ranking([])
        for count in SLICES:
            if count not in self._steps:
                self._steps[count] = self._make(count)
            try:
                report = self._steps[count].plan(microbatches)
            except (Infeasible, OptionError) as refused:
                ranking.said[count] = str(refused)
                continue
            if report is None:
                break
            found[count] = report.step_ns
            ranking.said[count] = f"{report.step_ns / 1e6:.3f} ms predicted"
            if not report.problem.trace.lanes:
                break  # nothing to hide
        ranking.left = sorted(found, key=lambda count: (found[count], count)) or [1]
        return ranking
