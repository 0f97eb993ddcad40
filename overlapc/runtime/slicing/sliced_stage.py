"""`SlicedStage` is a pipeline's stage that runs each microbatch in slices.

    F of all slices | R of all | I of all | W of all

What comes from other stages and goes to them stays the whole microbatch: it is cut when it has
come, and put together before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import CaptureError
from overlapc.core.merge import at
from overlapc.nn.layers import sliced
from overlapc.passes.capture.joint import Joint, Stop, capture
from overlapc.passes.capture.untraced import Raised
from overlapc.passes.draws import Draw
from overlapc.planning.report import Report
from overlapc.ranks.exchange import Exchange
from overlapc.runtime.call import Given
from overlapc.runtime.program import Program, State
from overlapc.runtime.slicing.compare import Compared, compared, draws_for, failing, refuse_whole
from overlapc.runtime.slicing.slices import SlicedProgram, Slices, Way, marked
from overlapc.runtime.stage import Form, InFlight, Shapes, Stage, has_gradient, leaves_of


class SlicedStage(Stage):
    """A stage in `count` slices, made of the `whole` stage, which has been traced.

    `trace` refuses a graph that shows that it sees the whole microbatch, `compare` a stage of which
    eager makes something else in slices. So a graph that comes up within a step is refused.
    """

    def __init__(self, whole: Stage, count: int) -> None:
        eager: Callable[..., Any] = whole.function if whole.last else whole.module
        function = _marked(eager) if whole.last else whole.function
        super().__init__(whole.number, whole.module, function, whole.incoming, whole.last)
        self.whole, self.slices, self._eager = whole, count, eager
        self.compared: Compared | None = None
        self._microbatch: tuple[Any, ...] = ()  # the call that runs
        self._slices: list[Given] = []  # its slices
        self._now = Slices(1)

    @property
    def outgoing(self) -> Shapes:
        return self.whole.outgoing

    @property
    def received(self) -> list[str]:
        return [at(name, k) for k in range(self.slices) for name in self.form.received]

    @property
    def ways(self) -> Sequence[Way]:
        return () if self.compared is None else self.compared.ways

    def trace(self, given: tuple[Any, ...], others: Sequence[tuple[Any, ...]] = ()) -> None:
        try:
            super().trace(given, others)
        except CaptureError as error:
            raised = error.__cause__
            if isinstance(raised, Raised):  # `whole` does not
                batch = Given(leaves_of(given, self.incoming), {})
                raise CaptureError(failing(raised, self.slices, batch)) from raised
            raise
        sent = [has_gradient(shape) for shape in self.form.outgoing]
        if sent != [has_gradient(shape) for shape in self.outgoing]:
            raise CaptureError(
                f"stage {self.number} gives {len(self.outgoing)} results for a microbatch and "
                f"{len(sent)} for a slice, or others of them require a gradient; expected the same"
            )

    def compare(self, given: tuple[Any, ...], exchange: Exchange | None) -> None:
        """Let eager compute a microbatch whole and in slices; raise, on all ranks of the exchange,
        if slices give anything else."""
        batch = Given(leaves_of(given, self.incoming), {})
        (whole,), each = (batch.cut(count, gradients=True) for count in (1, self.slices))

        def forward(part: Given) -> list[Any]:
            return tree_leaves(self._eager(*part.args))

        joint, draws = self.form.joint, self.draws
        with torch.enable_grad():
            self.compared = compared(self.module, forward, whole, each, joint, draws, exchange)

    def gradients_came(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        flight = self.states[microbatch].flight
        assert isinstance(flight.program, SlicedProgram)
        flight.program.gradients_came(flight.states, gradients, self.ways)

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        """Call the function with each slice; the call of the last runs all forwards."""
        self._microbatch = arguments
        self._slices = each = Given(arguments, {}).cut(self.slices, gradients=True)
        self._now = Slices(1, self._forwards, ways=self.ways)
        try:
            with sliced(self.slices):
                if self.report is None:
                    return super()._run(each[0].args)
                for one in each[:-1]:
                    with suppress(Stop):
                        super()._run(one.args)
                return super()._run(each[-1].args)
        finally:
            self._microbatch, self._slices, self._now = (), [], Slices(1)

    def _planned_for(self) -> list[Given]:
        others = [part for one in self._further for part in one.cut(self.slices, gradients=True)]
        return [*self._slices, *others]

    def _look_at(self, joint: Joint, state: State) -> None:
        refuse_whole(joint, state, self.module, self.slices)
        self.draws = self._drawn(joint)

    def _drawn(self, joint: Joint) -> dict[str, Draw]:
        microbatch = self._microbatch
        return draws_for(joint, self.slices, lambda: capture(self.whole.function, *microbatch))

    def _planned_within_a_step(self, joint: Joint, state: State) -> Report:
        raise CaptureError(
            f"stage {self.number} has become another graph within a step, whose slices were not "
            "compared with the whole microbatch; expected changes between steps: leave slices out"
        )

    def _program(self, joint: Joint, report: Report) -> Program:
        return SlicedProgram(joint, report, whole=self.last, draws=self._drawn(joint))

    def _forward(self, form: Form, program: Program, state: State) -> Sequence[Any]:
        return self._now.forward(program, state)

    def _forwards(
        self, program: SlicedProgram, states: Sequence[State], ways: Sequence[Way]
    ) -> list[Any]:
        microbatch, _ = self._at
        inputs = tuple(zip(*(one.args for one in self._slices), strict=True))  # each in slices
        flight = program.begin(states)
        self.states[microbatch] = InFlight(flight, (), inputs)
        return program.whole(flight, ways)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: marked(function(*args), args)
