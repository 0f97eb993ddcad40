"""`Program` and `Flight` run F, R, I and W of a planned graph, for all front doors alike.

A `Program` is the graph of one microbatch, or of the slices of one, cut into parts by its plan. A
`Flight` is a microbatch between its forward and the end of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from overlapc.core.errors import CaptureError, OptionError
from overlapc.core.ir import Plan
from overlapc.core.merge import at, of_slice
from overlapc.core.stages import turns
from overlapc.passes.capture.joint import Joint, owner_of
from overlapc.passes.capture.watched import other_dtype
from overlapc.passes.draws import Draw
from overlapc.passes.emit.parts import Part, Parts, accumulate, cut, join
from overlapc.passes.trace import Captured, changed_with_gradient
from overlapc.planning.report import Report

State = dict[str, Any]


class Program:
    """A graph and its parts: of one microbatch, or of the slices that its plan has, which draw
    random numbers together (`draws`, by op). A `whole` graph ends in the loss; others receive
    gradients of their results. `cut` makes the parts of one slice by its plan."""

    def __init__(
        self,
        joint: Joint,
        report: Report,
        whole: bool,
        draws: Mapping[str, Draw] | None = None,
        cut: Callable[[Captured, Plan], Parts] = cut,
    ) -> None:
        self.joint, self.report, self.count = joint, report, report.slices
        # Forwards and backwards as one graph, where the plan crosses the border between them.
        self.at_once: Part | None = None
        if self.count == 1:
            self._parts = cut(joint.captured, report.plan)
        else:
            self._join(_each(joint.captured, report, cut), draws or {})
        self.merged: Part | None = None
        if report.merged is not None:
            self.merged = self._parts.merged(report.merged.plan)
        self._with: WeakKeyDictionary[Program, Part] = WeakKeyDictionary()
        self._beside: WeakKeyDictionary[Program, tuple[Part, Part]] = WeakKeyDictionary()
        self.shared: State = loss_gradient(joint, self.count) if whole else {}  # read by all
        self.free = {  # gradients that the graph does not add to `.grad` itself
            f"gradient{i}": owner_of(name)
            for i, name in enumerate(joint.inputs)
            if name in joint.leaves and i not in set(joint.captured.static_inputs)
        }

    def _join(self, each: Sequence[Parts], draws: Mapping[str, Draw]) -> None:
        """Join the parts of all slices in the plan's order."""
        order, problem = self.report.plan.order, self.report.problem
        forwards, backwards = [one.forward for one in each], [one.backward for one in each]
        self._parts = Parts(
            join(forwards, order, at, draws),
            join(backwards, order, at),
            turns(problem.trace, order),
        )
        if len(problem.phases) == 1:
            states = (*range(self.count), *range(self.count))
            self.at_once = join((*forwards, *backwards), order, at, draws, states=states)

    def move(self, actions: Mapping[str, str]) -> bool:
        """Let the pieces of the backward be those of `actions`, if any of these runs early or
        late; do they?"""
        moved = any(action != "I" for action in actions.values())
        if moved:
            self._parts.actions = actions
        return moved

    @property
    def taken(self) -> set[str]:
        """The inputs and saved values, by name, that a backward takes."""
        return {name.rpartition(":")[2] for name in self._parts.backward.takes}

    @cached_property
    def _pieces(self) -> Mapping[str, Part]:
        return self._parts.pieces()

    def begin(self, states: Sequence[State], before: Flight | None = None) -> Flight:
        """Run F of a microbatch, which has a state for each slice. If there is a merged graph for
        it and B of the microbatch `before`, run that; else run that B first, which frees memory."""
        merged = None if before is None else self._merged_with(before.program)
        if before is not None and merged is not None:
            merged.run(self.shared, *states, before.state)
        else:
            if before is not None:
                before.run("B")
            self._parts.forward.run(self.shared, *states)
        return Flight(self, states)

    def run_at_once(self, states: Sequence[State]) -> Flight:
        """Run F and B of a microbatch in the plan's one graph."""
        assert self.at_once is not None
        with torch.no_grad(), torch._C._DisableAutocast():  # casts are in the graph
            self.at_once.run(self.shared, *states)
        return Flight(self, states)

    @property
    def pairs(self) -> bool:
        """Do the first two forwards of a step run as one graph, and its last two backwards?"""
        return self.report.pair is not None

    def pair_with(self, second: Program) -> tuple[Part, Part] | None:
        """F of two microbatches as one graph, and B: of this graph, and of this or another one that
        has the same plan. None if there is no such plan."""
        mine, theirs = self.report.pair, second.report.pair
        if mine is None or theirs is None or mine.plan.order != theirs.plan.order:
            return None
        if second not in self._beside:
            self._beside[second] = self._parts.pair(mine.plan, second._parts)
        return self._beside[second]

    def _merged_with(self, before: Program) -> Part | None:
        """Merge F of this graph with B of a graph of other shapes."""
        mine, theirs = self.report.merged, before.report.merged
        if before is self or mine is None or theirs is None:
            return self.merged if before is self else None
        if mine.plan.order != theirs.plan.order:
            return None
        if before not in self._with:
            both = Parts(self._parts.forward, before._parts.backward, {})
            self._with[before] = both.merged(mine.plan)
        return self._with[before]

    def parts(self, kind: str, again: bool) -> list[Part]:
        """The parts that B, R, I or W runs; `again`: recompute has run already."""
        if kind == "B":
            return [self._pieces["I"], self._pieces["W"]] if again else [self._parts.backward]
        if kind == "I" and not again:
            return [self._pieces["R"], self._pieces["I"]]
        return [self._pieces[kind]]


def _each(
    captured: Captured, report: Report, cut: Callable[[Captured, Plan], Parts]
) -> list[Parts]:
    """The parts of each slice. Where slices keep the same, only the order of their ops is another,
    and that is the plan's."""
    slices = [of_slice(report.plan, k, captured.trace.digest) for k in range(report.slices)]
    made: dict[tuple[frozenset[str], frozenset[str]], Parts] = {}
    found = []
    for plan in slices:
        key = frozenset(plan.saved), frozenset(plan.recomputed)
        if key not in made:
            made[key] = cut(captured, plan)
        found.append(made[key])
    return found


def begin_pair(programs: Sequence[Program], states: Sequence[State]) -> list[Flight]:
    """Run F of two microbatches as one graph; nothing, if there is none."""
    first, second = programs
    if (pair := first.pair_with(second)) is None:
        return []
    with torch.no_grad(), torch._C._DisableAutocast():  # casts are in the graph
        pair[0].run(first.shared, *states)
    return [Flight(program, [state]) for program, state in zip(programs, states, strict=True)]


def end_pair(flights: Sequence[Flight]) -> bool:
    """Run B of two microbatches as one graph, if there is one; is there? Nothing of the backward
    has run."""
    first, second = (flight.program for flight in flights)
    if (pair := first.pair_with(second)) is None:
        return False
    with torch.no_grad(), torch._C._DisableAutocast():  # casts are in the graph
        pair[1].run(first.shared, *(flight.state for flight in flights))
    for flight in flights:
        flight.end()
    return True


@dataclass
class Flight:
    """A microbatch between its forward and the end of its backward, with a state for each slice."""

    program: Program
    states: Sequence[State]
    again: bool = False  # has R run?

    @property
    def state(self) -> State:
        """The state of a microbatch that is not cut."""
        (state,) = self.states
        return state

    def results(self) -> list[tuple[Any, ...]]:
        """Take the graph's results, each of all slices; once."""
        return [
            tuple(state.pop(name) for state in self.states) for name in self.program.joint.results
        ]

    def run(self, kind: str) -> None:
        """Run an action of the backward."""
        with torch.no_grad(), torch._C._DisableAutocast():  # casts are in the graph
            for part in self.program.parts(kind, self.again):
                part.run(self.program.shared, *self.states)
        self.again = self.again or kind == "R"

    def gradient_of(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Take the gradient of an input of the microbatch, which was cut into these parts; once."""
        pairs = zip(self.states, parts, strict=True)
        found = [self._gradient_of(state, part) for state, part in pairs]
        made = [gradient for gradient in found if gradient is not None]
        return torch.cat(made) if len(made) > 1 else next(iter(made), None)

    def _gradient_of(self, state: State, tensor: Tensor) -> Tensor | None:
        for name, owner in self.program.free.items():
            if owner in state and state[owner].tensor is tensor:
                found: Tensor | None = state.pop(name, None)
                return found
        return None

    def end(self) -> None:
        """Add the remaining gradients, which the graph does not add itself and nobody took, to
        `.grad` of their owners."""
        for state in self.states:
            for name, owner in self.program.free.items():
                if (gradient := state.pop(name, None)) is not None:
                    accumulate((state[owner],), gradient)


def check_loss(joint: Joint) -> None:
    """The model must return one number that requires a gradient."""
    shapes = [tuple(value.shape) for value in _tangents(joint).values()]
    if changed := changed_with_gradient(joint.captured.joint):
        raise CaptureError(
            f"the model changes {len(changed)} parameters or inputs in its forward, of shapes "
            f"{changed}; expected none to be changed before the optimizer's step: change them "
            "after the backward"
        )
    if len(shapes) != 1 or shapes[0] not in ((), (1,)):
        raise CaptureError(
            f"the model returns {len(shapes)} results that require a gradient, of shapes {shapes}; "
            "expected one number, the loss: detach the others"
        )
    if any(value.is_complex() for value in _tangents(joint).values()):
        raise OptionError("the loss is complex; expected a real number: its .real or .abs(), say")


def loss_gradient(joint: Joint, slices: int) -> State:
    """The gradient of the loss, with which the backward begins: of a slice's, whose mean it is."""
    return {
        name: torch.ones(value.shape, dtype=value.dtype, device=value.device) / slices
        for name, value in _tangents(joint).items()
    }


def _tangents(joint: Joint) -> dict[str, Tensor]:
    placeholders = joint.captured.joint.graph.find_nodes(op="placeholder")
    values = {node.name: node.meta["val"] for node in placeholders if node.name in joint.tangents}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class NotOurs(CaptureError):
    """The graph's gradient cannot go straight into `.grad`: hooks or autograd need it."""


def refuse_owners(joint: Joint, state: State, module: nn.Module) -> None:
    """Raise NotOurs for gradients that must go further than into `.grad`."""
    for name in joint.leaves:
        tensor = state[owner_of(name)].tensor
        if tensor.grad_fn is not None:
            raise NotOurs(
                "the model reads a tensor that was computed under autograd before; expected it to "
                "be detached, or computed in the model"
            )
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise NotOurs(f"{_name(tensor, module)} has hooks on its gradient")
        if kept := other_dtype(tensor):
            raise NotOurs(f"{_name(tensor, module)} keeps its gradient as {kept} (grad_dtype)")


def _name(tensor: Tensor, module: nn.Module) -> str:
    names = (name for name, parameter in module.named_parameters() if parameter is tensor)
    return next(names, "an input")
