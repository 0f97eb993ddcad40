"""`slices="auto"`: each kind of batch whole, or in the slices that are predicted to be faster, as
far as they are not refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from overlapc.core.errors import CaptureError, Infeasible, OptionError
from overlapc.planning.options import Options
from overlapc.planning.report import Report
from overlapc.runtime.call import Given, alike, givens, kind_of
from overlapc.runtime.foreign import unmade, untraced
from overlapc.runtime.slicing.sliced import SlicedCalls, Uncut
from overlapc.runtime.slicing.step import SlicedStep
from overlapc.runtime.train_step import TrainStep

SLICES = (1, 2, 4)  # more were never faster in what was published


@dataclass
class _Ranking:
    """The numbers of slices for one kind of batch that may run, the fastest by plan first."""

    left: list[int]
    said: dict[int, str] = field(default_factory=dict)  # what is known of each number

    @staticmethod
    def of(plan: Callable[[int], Report]) -> _Ranking:
        """Plan all numbers of slices. What cannot be captured, or fits in no way, runs whole."""
        found: dict[int, int] = {}
        ranking = _Ranking([])
        for count in SLICES:
            try:
                report = plan(count)
            except (Infeasible, OptionError) as refused:
                ranking.said[count] = str(refused)
                continue
            except CaptureError as refused:
                ranking.said[count] = f"cannot be planned: {refused}"
                break
            found[count] = report.step_ns
            ranking.said[count] = f"{report.step_ns / 1e6:.3f} ms predicted"
            if not report.problem.trace.lanes:
                break  # nothing to hide
        ranking.left = sorted(found, key=lambda count: (found[count], count)) or [1]
        return ranking

    def run(self, run: Callable[[int], Any]) -> Any:
        """Run with the fastest number that is not refused, and with that from now on."""
        while True:
            count = self.left[0]
            try:
                results = run(count)
            except OptionError as refused:  # before anything ran in slices
                if len(self.left) == 1:
                    raise
                self.said[count] = str(refused)
                del self.left[0]
                continue
            del self.left[1:]
            return results

    def __str__(self) -> str:
        return "\n".join(f"{count} slices: {what}" for count, what in sorted(self.said.items()))


def _for(how: Mapping[str, Any], slices: int) -> dict[str, Any]:
    """Options of a step of so many slices: the schedule is of whole microbatches."""
    return dict(how) | {"slices": slices} | ({"schedule": "auto"} if slices > 1 else {})


def step_in(slices: Any) -> type[TrainStep]:
    """The class of `TrainStep(model, slices=...)`; what is no number of slices it refuses."""
    if slices == "auto":
        return AutoStep
    return SlicedStep if isinstance(slices, int) and slices > 1 else TrainStep


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
        schedule: str = "auto",
        results: bool = False,
        **options: Any,
    ) -> None:
        how: dict[str, Any] = {"schedule": schedule, "results": results} | options
        super().__init__(model, loss, **how | {"slices": 1})
        self._asked = how
        if self._options.plans:
            raise OptionError('plan: slices="auto" plans itself; expected the number of slices')
        self._make = lambda count: TrainStep(model, loss, **_for(how, count))
        self._steps: dict[int, TrainStep] = {}
        self._rankings: dict[Any, _Ranking] = {}
        self._now: tuple[TrainStep, _Ranking] | None = None  # what ran, or was planned, last

    @untraced
    def __call__(self, microbatches: Sequence[Any]) -> list[Any]:
        ranking = self._ranking(microbatches)
        results: list[Any] = ranking.run(lambda count: self._steps[count](microbatches))
        self._take(ranking)
        return results

    def predict(self, microbatches: Sequence[Any]) -> Report | None:
        ranking = self._ranking(microbatches)
        self._take(ranking)
        return self.report

    @property
    def graphs(self) -> list[Report]:
        return [] if self._now is None else self._now[0].graphs

    @property
    def differences(self) -> list[str]:
        return [] if self._now is None else self._now[0].differences

    def explain(self) -> str:
        if self._now is None:
            return super().explain()
        step, ranking = self._now
        return "\n\n".join([step.explain(), str(ranking)])

    def _take(self, ranking: _Ranking) -> None:
        count = ranking.left[0]
        self._now = self._steps[count], ranking
        self.report, self._fallbacks = self._steps[count].report, self._steps[count]._fallbacks
        wanted = {count for each in self._rankings.values() for count in each.left}
        self._steps = {count: step for count, step in self._steps.items() if count in wanted}

    def _ranking(self, microbatches: Sequence[Any]) -> _Ranking:
        if unmade(self.model):  # it is planned at the next step
            self._steps.setdefault(1, self._make(1))
            return _Ranking([1])
        each = givens(microbatches)
        key = len(each), alike(each)
        if key not in self._rankings:
            self._rankings[key] = _Ranking.of(lambda count: self._planned(count, microbatches))
        return self._rankings[key]

    def _planned(self, count: int, microbatches: Sequence[Any]) -> Report:
        if count not in self._steps:
            self._steps[count] = self._make(count)
        step = self._steps[count]
        return _there(step.predict(microbatches), step.fallbacks)


def _there(report: Report | None, unchanged: Sequence[str]) -> Report:
    if report is None:
        raise CaptureError("; ".join(unchanged) or "torch.compile is switched off")
    return report


class AutoCalls:
    """The same for calls of a model that `optimize` returned: one SlicedCalls for each number of
    slices. Whole batches run `uncut`."""

    def __init__(self, model: nn.Module, options: Options, uncut: Uncut) -> None:
        if options.plans:
            raise OptionError('plan: slices="auto" plans itself; expected the number of slices')
        self._uncut = uncut
        self._calls = {count: SlicedCalls(model, options, count, uncut) for count in SLICES}
        self._rankings: dict[Any, _Ranking] = {}

    def __call__(self, args: Any, kwargs: Any) -> Any:
        def run(count: int) -> Any:
            return self._uncut(args, kwargs) if count == 1 else self._calls[count](args, kwargs)

        ranking = self._ranking(args, kwargs)
        return ranking.run(run)

    def _ranking(self, args: Any, kwargs: Any) -> _Ranking:
        try:
            each = Given(args, kwargs).cut(1, gradients=True)
        except OptionError as refused:
            said = f"it cannot be cut: {str(refused).partition(': ')[2]}"
            return self._rankings.setdefault(said, _Ranking([1], {1: said}))
        key = kind_of(each[0]), torch.is_grad_enabled()
        if key not in self._rankings:

            def planned(count: int) -> Report:
                calls = self._calls[count]
                return _there(calls.plan(args, kwargs), calls.fallbacks)

            self._rankings[key] = _Ranking.of(planned)
        return self._rankings[key]

    @property
    def used(self) -> list[SlicedCalls]:
        """Those of the numbers of slices that run some kind of batch."""
        wanted = {ranking.left[0] for ranking in self._rankings.values()}
        return [calls for count, calls in self._calls.items() if count in wanted - {1}]

    def explain(self) -> str:
        return "\n\n".join(map(str, self._rankings.values()))
