"""`SlicedStep` is a `TrainStep` that cuts each microbatch into slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import CaptureError
from overlapc.nn.layers import sliced
from overlapc.passes.capture.joint import Joint, Stop
from overlapc.passes.draws import Draw
from overlapc.passes.trace import Captured
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.runtime.call import Given, kind_of, like_these
from overlapc.runtime.loss import checked_loss, loss_of
from overlapc.runtime.program import Program, State
from overlapc.runtime.slicing.compare import (
    Compared,
    compared,
    draws_for,
    refuse_failing,
    refuse_whole,
)
from overlapc.runtime.slicing.slices import SlicedProgram, Slices, marked
from overlapc.runtime.train_step import TrainStep
from overlapc.state.objects import detached


class SlicedStep(TrainStep):
    """`TrainStep(model, slices=k)`. The traced function is that of a slice, and all slices of a
    microbatch run as one program."""

    @property
    def _count(self) -> int:
        count: int = self._options.slices
        return count

    def _run(self, each: Sequence[Given]) -> list[Any]:
        for one in each:  # refused before anything runs
            one.cut(self._count)
        return self._replicas.in_turn(each, lambda one: self._in_slices(one, len(each)))

    def _in_slices(self, given: Given, microbatches: int) -> Any:
        """Run forward and backward of a microbatch in slices; the call of the last slice runs
        all."""
        self._given = given
        each = given.cut(self._count)
        key = self._key((kind_of(each[0]), True))
        if key in self._plain:
            return self._plainly(given)

        def begin() -> Slices:
            self._step = step = Slices(microbatches, each=each)
            for one in each[:-1]:
                with suppress(Stop):
                    self._traced[key](*one.args, **one.kwargs)
            return step

        try:
            with self._tracing(key), sliced(len(each)):
                step = begin()
                found, is_new = self._compare(step, given, each, key)
                if is_new:
                    step = begin()  # counters of the model have changed meanwhile
                step.ways = found.ways
                return detached(self._traced[key](*each[-1].args, **each[-1].kwargs))
        except CaptureError as error:
            self._attempts.refused(error)
            self._refuse_failing(error)
            result = self._plainly(given)
            self._refused(key, error)
            return result
        finally:
            self._step = None

    def _compare(
        self, step: Slices, given: Given, each: Sequence[Given], key: Any
    ) -> tuple[Compared, bool]:
        """Compare the slices of a first batch with the whole batch, and raise on all ranks if they
        differ. Also return whether this was a first batch."""
        if step.program is None:
            raise CaptureError("torch.compile is switched off")
        joint = step.program.joint
        trace = joint.captured.trace
        if (known := self._compared.get((key, trace.digest))) is not None:
            return known, False

        def forward(part: Given) -> list[Any]:
            result = self._whole(*part.args, **part.kwargs)
            checked_loss(result)
            return tree_leaves(result)

        with self._attempts.exchange_for(trace.groups, self._options.timeout_s) as exchange:
            draws = step.program.draws
            found = compared(self.model, forward, given, each, joint, draws, exchange)
        self._compared[key, trace.digest] = found
        return found, True

    def _function(self, *args: Any, **kwargs: Any) -> Any:
        result = self._whole(*args, **kwargs)
        loss = result if isinstance(result, Tensor) else loss_of(result)
        return marked(result, (args, kwargs), loss)

    # Planning

    def _runs(self, each: Sequence[Given]) -> list[tuple[Any, Sequence[Given]]]:
        return [((kind_of(each[0].cut(self._count)[0]), True), each)]

    def _dry(self, each: Sequence[Given]) -> Slices:
        return Slices(len(each), runs=False, each=each[0].cut(self._count))

    def _refuse_failing(self, error: CaptureError) -> None:
        refuse_failing(error, self._count, self._given, self._uncut)

    def _place(self) -> tuple[int, int]:
        assert isinstance(self._step, Slices)
        return len(self._step.states), self._count

    def _draws(self, joint: Joint, state: State) -> dict[str, Draw]:
        refuse_whole(joint, state, self.model, self._count)
        return draws_for(joint, self._count, self._uncut)

    def _alike(self, each: Sequence[Given]) -> Sequence[Given]:
        return like_these(each, self._given, self._all)

    def _to_plan(self, captured: Captured, count: int, draws: Mapping[str, Draw]) -> TrainingStep:
        return replace(
            super()._to_plan(captured, count, draws),
            name=f"one microbatch in {self._count} slices",
            lag=0,
            slices=self._count,
            draws=tuple(draws),
            at_once=True,
        )

    def _made(self, joint: Joint, report: Report, draws: Mapping[str, Draw]) -> Program:
        return SlicedProgram(joint, report, whole=True, draws=draws)
