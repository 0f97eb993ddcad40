"""`Stage` is a pipeline's stage on its rank: traced once, planned once, then run action by
action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import descriptors

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.joint import Joint, Run, Stop, Traced, owner_of
from overlapc.passes.capture.marks import mark
from overlapc.passes.capture.untraced import Raised
from overlapc.passes.draws import Draw
from overlapc.passes.trace import Captured
from overlapc.planning.report import Report
from overlapc.runtime.call import Given, inputs_of
from overlapc.runtime.program import Flight, Program, State, check_loss, refuse_owners
from overlapc.sharded.lowered import Lowered

Shape = tuple[tuple[int, ...], torch.dtype, bool]  # sizes, and whether it gets a gradient
Shapes = tuple[Shape, ...]


class Stage:
    """A stage, and the state of its microbatches in flight.

    `trace` captures the stage and runs nothing. Once `report` has its plan, an F calls the stage's
    function, whose graph runs by that plan. So Dynamo checks at every F what the graph depends on.
    If that has changed, a new graph of the same ops runs by the same plan. A graph of other ops is
    planned first: by all ranks, which call `changed` before each step, or, if it comes up within a
    step, by this rank's `plan` alone.
    """

    slices = 1

    def __init__(
        self,
        number: int,
        module: nn.Module,
        function: Callable[..., Any],
        incoming: Shapes,  # empty on the first stage
        last: bool,
    ) -> None:
        self.number, self.module, self.last = number, module, last
        self.incoming, self.function = incoming, function
        self.form: Form  # its last trace
        # while it is planned: the graph's inputs, of each microbatch (or slice) to plan for
        self.inputs: list[list[Any]] = []
        self.plan: Callable[[Captured, Sequence[Sequence[Any]]], Report]
        self.draws: dict[str, Draw] = {}  # what its slices draw together
        self.report: Report | None = None
        self.digest = ""  # of the planned graph
        self._others: dict[str, Report] = {}  # by digest: graphs that came up within a step
        self.states: dict[int, InFlight] = {}
        self._lowered = Lowered(module)
        check = self._lowered.check
        self._traced = Traced(function, self._adopt, module, ours=True, check=check)
        self._given: dict[int, tuple[Any, ...]] = {}  # by microbatch: its inputs
        self._arguments: tuple[Any, ...] = ()  # of the call that runs
        self._further: list[Given] = []  # calls that it is planned for, besides
        # the microbatch of F, and of the B merged with it
        self._at: tuple[int, int | None] = 0, None

    @property
    def differences(self) -> list[str]:
        """Lines of the module whose trace may give other results than eager."""
        return self._traced.differences

    @property
    def captured(self) -> Captured:
        return self.form.joint.captured

    @property
    def outgoing(self) -> Shapes:
        """The shapes that the stage sends; empty on the last stage."""
        return self.form.outgoing

    @property
    def received(self) -> list[str]:
        """Names of what other stages send, in the problem that the stage is planned by."""
        return self.form.received

    def changed(self, given: tuple[Any, ...]) -> bool:
        """Is the stage a graph other than the planned one? Runs nothing."""
        report, self.report = self.report, None
        try:
            self.trace(given)
        except CaptureError:
            return True
        finally:
            self.report = report
        self.inputs = []
        return self.digest != self.captured.trace.digest

    def planned(self, report: Report) -> None:
        self.report, self.digest, self.inputs = report, self.captured.trace.digest, []

    def trace(self, given: tuple[Any, ...], others: Sequence[tuple[Any, ...]] = ()) -> None:
        """Capture the stage of these arguments, to be planned for `others`, too."""
        self.begin(0, given)
        self._further = [Given(leaves_of(other, self.incoming), {}) for other in others]
        try:
            self._call(0)
        except Stop:
            return
        except Raised as error:
            raise CaptureError(
                f"stage {self.number} raises where it is traced: {error.reason}", error.place
            ) from error
        except CaptureError as error:
            hint = "a stage gives tensors, and has something to train itself or before it"
            raise CaptureError(
                f"stage {self.number}: {error.reason}; {hint}", error.place
            ) from error
        finally:
            self._given.clear()
            self._further = []

    def begin(self, microbatch: int, given: tuple[Any, ...]) -> None:
        self._given[microbatch] = leaves_of(given, self.incoming)

    def gradients_came(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        under_way = self.states[microbatch]
        under_way.flight.state.update(zip(under_way.tangents, gradients, strict=True))

    def do(self, kind: str, microbatch: int) -> Sequence[Tensor]:
        """Run one action; return what F, or I and B, send."""
        if kind == "F":
            self._at = microbatch, None
            return self._call(microbatch)
        self.states[microbatch].flight.run(kind)
        return self._gradients(kind, microbatch)

    def do_merged(self, forward: int, backward: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Run F of one microbatch and B of another, merged if both are of the same graph."""
        self._at = forward, backward
        results = self._call(forward)
        return results, self._gradients("B", backward)

    @property
    def merges(self) -> bool:
        return self.report is not None and self.report.merged is not None

    def _call(self, microbatch: int) -> Sequence[Tensor]:
        results = self._run(self._given[microbatch])
        if not self._traced.ran:
            raise CaptureError("torch.compile is switched off, and a Pipeline needs it")
        del self._given[microbatch]
        several = results if isinstance(results, tuple) else (results,)
        return [result.detach() for result in several]

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        self._arguments = arguments
        try:
            with self._lowered.aside(whole=True):
                return self._traced(*arguments)
        except CaptureError as error:
            if self._lowered.gather_first(error):
                return self._run(arguments)
            raise
        finally:
            self._arguments = ()

    def _adopt(self, joint: Joint) -> Run:
        """Return the code that runs in the place of a graph of the stage: the forward, by the
        stage's plan."""
        form = Form(joint, self._arguments[: len(self.incoming)], self.last)
        digest = joint.captured.trace.digest

        def run(state: State) -> Sequence[Any]:
            refuse_owners(joint, state, self.module)
            self._lowered.refuse_read(state[owner_of(name)].tensor for name in joint.leaves)
            if self.report is None:
                self.form, self.inputs = form, inputs_of(joint.inputs, state, self._planned_for())
                self._look_at(joint, state)
                raise Stop
            report = self.report if digest == self.digest else self._others.get(digest)
            if report is None:
                report = self._others[digest] = self._planned_within_a_step(joint, state)
            if form.program is None or form.program.report is not report:
                form.program = self._program(joint, report)
            return self._forward(form, form.program, state)

        return run

    def _planned_for(self) -> list[Given]:
        """The call that runs, and the others that the stage is planned for."""
        return [Given(self._arguments, {}), *self._further]

    def _look_at(self, joint: Joint, state: State) -> None:
        """Look at a graph that will be planned."""

    def _planned_within_a_step(self, joint: Joint, state: State) -> Report:
        return self.plan(joint.captured, [[state[name] for name in joint.inputs]])

    def _program(self, joint: Joint, report: Report) -> Program:
        return Program(joint, report, whole=self.last)

    def _forward(self, form: Form, program: Program, state: State) -> Sequence[Any]:
        microbatch, backward = self._at
        before = None if backward is None else self.states[backward].flight
        flight = program.begin([state], before)
        given = tuple((one,) for one in self._given[microbatch])
        self.states[microbatch] = InFlight(flight, form.tangents, given)
        return [one for (one,) in flight.results()]

    def _gradients(self, kind: str, microbatch: int) -> Sequence[Tensor]:
        """Return the gradients for the stage before, if this action made them, and drop finished
        microbatches. An input that the stage does not use gets a gradient of zeros, since the stage
        before waits for one."""
        flight, given = self.states[microbatch].flight, self.states[microbatch].given
        found = []
        for parts, shape in zip(given, self._incoming(kind), strict=False):
            if has_gradient(shape):
                gradient = flight.gradient_of(parts)
                found.append(blank(shape).detach() if gradient is None else gradient)
        if kind in "BW":
            flight.end()
            del self.states[microbatch]
        return found

    def _incoming(self, kind: str) -> Shapes:
        return self.incoming if kind in "BI" else ()


class Form:
    """A graph of the stage: its inputs, what it sends, and its plan."""

    def __init__(self, joint: Joint, given: Sequence[Any], last: bool) -> None:
        self.joint = joint
        if last:
            check_loss(joint)
        self.outgoing: Shapes = () if last else _outgoing(joint)
        self.tangents: tuple[str, ...] = () if last else _tangents(joint)
        self.received = _received(joint, given, self.tangents)
        self.program: Program | None = None


@dataclass
class InFlight:
    """A microbatch between its forward and the end of its backward."""

    flight: Flight
    tangents: tuple[str, ...]
    given: tuple[tuple[Any, ...], ...]  # each input, in slices


def sending(module: nn.Module) -> Callable[..., Any]:
    """Wrap a stage so that each result can be sent: contiguous, and a tensor of its own."""

    def sends(*args: Any) -> Any:
        results = module(*args)
        several = results if isinstance(results, (tuple, list)) else (results,)
        if not several or not all(isinstance(result, Tensor) for result in several):
            return results  # refused later, since no result is marked
        # Make each result a separate tensor: results may be views of one another, occur twice, or
        # be inputs.
        first, *more = several
        copied = any(first is arg for arg in args)
        sent = [mark(first, 0, Tensor.clone if copied else Tensor.contiguous)]
        return *sent, *(mark(each, 1 + i, _copy) for i, each in enumerate(more))

    return sends


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def with_loss(module: nn.Module, loss: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """Wrap a stage and its loss; the first `count` arguments are the stage's."""

    def ends(*args: Any) -> Any:
        result = loss(module(*args[:count]), *args[count:])
        return mark(result, 0, Tensor.contiguous) if isinstance(result, Tensor) else result

    return ends


def leaves_of(given: tuple[Any, ...], incoming: Shapes) -> tuple[Any, ...]:
    """What came of these shapes, as leaves that get a gradient where the shape says so."""
    received = [
        tensor.detach().requires_grad_(has_gradient(shape))
        for tensor, shape in zip(given, incoming, strict=False)
    ]
    return *received, *given[len(received) :]


def has_gradient(shape: Shape) -> bool:
    return shape[2]


def blank(shape: Shape) -> Tensor:
    """An empty tensor of that shape, which requires a gradient if the shape says so."""
    sizes, dtype, gradient = shape
    return torch.zeros(sizes, dtype=dtype).requires_grad_(gradient)


def _sent(joint: Joint) -> list[tuple[int, str]]:
    """For each result that is sent, its place among the results of Dynamo's graph, and its name."""
    plain = {
        desc.idx: name
        for name, desc in joint.results.items()
        if isinstance(desc, descriptors.PlainAOTOutput)
    }
    marked = [(number, i) for i, number in enumerate(joint.marks) if number is not None]
    if not marked:
        raise CaptureError(
            "it returns something else than tensors; expected a tensor, or a tuple of at least "
            "one tensor"
        )
    if any(i not in plain for _, i in marked):
        raise CaptureError("a result is a view of an input or a tensor subclass")
    return [(i, plain[i]) for _, i in sorted(marked)]


def _tangent_places(joint: Joint) -> dict[Any, str]:
    return {getattr(desc.output, "idx", None): name for name, desc in joint.tangents.items()}


def _outgoing(joint: Joint) -> Shapes:
    output = joint.captured.joint.graph.find_nodes(op="output")[0].args[0]
    with_gradient = _tangent_places(joint)
    found: list[Shape] = []
    for place, name in _sent(joint):
        val = output[int(name.removeprefix("result"))].meta["val"]
        found.append((tuple(val.shape), val.dtype, place in with_gradient))
    if sum(map(has_gradient, found)) != len(joint.tangents):
        raise CaptureError(
            "something that requires a gradient is kept by the module, or results are views of one "
            "another: expected tensors of their own, returned"
        )
    return tuple(found)


def _tangents(joint: Joint) -> tuple[str, ...]:
    """Names of the gradients that the next stage sends, in the order of the results sent to it."""
    places = _tangent_places(joint)
    return tuple(places[place] for place, _ in _sent(joint) if place in places)


def _received(joint: Joint, given: Sequence[Any], tangents: Sequence[str]) -> list[str]:
    places = [i for i, a in enumerate(joint.arguments) if any(a is tensor for tensor in given)]
    names = [n for n, place in zip(joint.inputs, joint.places, strict=True) if place in places]
    return [*names, *tangents]
