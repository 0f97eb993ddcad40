"""A batch in slices: cut along dimension 0, run beside each other in one planned order.

    F of all slices | R, I and W of all slices

`TrainStep` runs both in one go: the first backwards may begin before the last forward has ended.

Each result of the batch is made of its slices' (`Way`): put together along a dimension, or a mean
over samples, of which the slices' are averaged. Gradients are added up in the order of slices, as
if slices ran one after the other. That is the uncut step up to rounding if every sample goes its
own way, or asks for what it needs of the others (`overlapc.nn.layers`); `compare.py` looks at
that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors
from torch.utils._pytree import tree_flatten, tree_unflatten

from overlapc.core.errors import CaptureError, OptionError
from overlapc.core.ir import Plan
from overlapc.passes.capture.joint import Joint, Stop
from overlapc.passes.capture.marks import mark
from overlapc.passes.draws import Draw
from overlapc.passes.emit.parts import Parts, cut
from overlapc.passes.trace import Captured
from overlapc.planning.report import Report
from overlapc.runtime.call import Given
from overlapc.runtime.program import Flight, Program, State
from overlapc.runtime.side_effects import of_parameters
from overlapc.state.objects import alike as equal
from overlapc.state.objects import ends_in, is_held, rebuilt, tensors_in

# How a result of the batch is made of its slices': put together along this dimension, their mean
# (a loss), any of them, because they are alike, or an object with the tensors of all in it.
Way = int | Literal["mean", "alike", "inside"]

_aten = torch.ops.aten
# What makes of a mean one: copies, and products with a number.
_PASS_ON = {_aten.clone, _aten.detach, _aten.alias, _aten._to_copy, _aten.mul, _aten.div, _aten.neg}
_PASS_ON |= {_aten.view, _aten._unsafe_view, _aten.contiguous}


# --------------------------------------------------------------------------- results


def way_of(name: str, whole: Any, part: Any, count: int) -> Way:
    """How the batch's result is made of its slices', of which `part` is one."""
    if is_held(whole) and type(whole) is type(part):
        return "inside"
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor) or whole.shape == part.shape:
        return "mean" if isinstance(whole, Tensor) and whole.requires_grad else "alike"
    differ = [d for d, size in enumerate(whole.shape) if part.shape[d : d + 1] != (size,)]
    if whole.dim() != part.dim() or len(differ) != 1:
        raise OptionError(
            f"slices={count}: {name} is of shape {tuple(part.shape)} for a slice and "
            f"{tuple(whole.shape)} for the batch; expected one dimension, the batch, that is "
            f"{count} times as large"
        )
    return differ[0]


def mean_of_numbers(way: Way, parts: Sequence[Any], is_mean: bool) -> Way:
    """The way of a result: a number that is another for each slice may be their mean, an accuracy
    say; the comparison tells. Of one that is 0 for all slices the graph does."""
    numbers = [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]
    is_number = len(numbers) == len(parts) and all(x.numel() == 1 for x in numbers)
    if way == "alike" and is_number and (is_mean or not all(equal(x, parts[0]) for x in parts)):
        return "mean"
    return way


def is_number(whole: Any, part: Any) -> bool:
    both = isinstance(whole, Tensor) and isinstance(part, Tensor) and whole.shape == part.shape
    return both and whole.is_floating_point() and whole.numel() == 1


def together(name: str, parts: Sequence[Any], way: Way) -> Any:
    """The batch's result, made of its slices'."""
    if isinstance(way, int):
        return torch.cat(tuple(parts), way)
    if way == "mean":
        return sum(part / len(parts) for part in parts)
    if all(equal(part, parts[0]) for part in parts):
        return parts[0]
    is_number = isinstance(parts[0], Tensor | int | float | complex | str | None)
    kind = "a number" if is_number else f"a {type(parts[0]).__name__}"
    raise OptionError(
        f"slices={len(parts)}: {name} is {kind} that is another for each slice; expected the "
        "loss, means over samples, numbers that are alike (as overlapc.nn.layers.total makes "
        "them), and tensors of which a dimension is the batch"
    )


def uneven(name: str, count: int, shapes: Sequence[Any]) -> OptionError:
    return OptionError(
        f"slices={count}: {name}, which requires a gradient, is of shapes "
        f"{' '.join(map(str, shapes))} in slices; expected one shape: leave out of the results "
        "what depends on data in its size"
    )


def apart(value: Tensor, way: Way, count: int) -> Sequence[Tensor]:
    """The gradient of a batch's result as those of its slices'."""
    if isinstance(way, int):
        return [part.contiguous() for part in value.chunk(count, way)]
    return [value / count] * count


def marked(results: Any, arguments: Any, loss: Tensor | None = None) -> Any:
    """Mark each tensor among a model's results by its place, so that the graph says which is
    which; those in objects that are results of their own come last (`ends_in`). Of a `loss`, that
    alone requires a gradient. This is traced."""
    leaves, spec = tree_flatten(results)
    ends = ends_in(leaves)
    seen = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]

    def made(leaf: Tensor, i: int) -> Tensor:
        # A number without a gradient may be a buffer, or be kept by the model.
        copied = not (leaf.dim() or leaf.requires_grad) or any(leaf is other for other in seen)
        seen.append(leaf)
        make = Tensor.clone if copied else Tensor.contiguous
        return mark(leaf if loss is None or leaf is loss else leaf.detach(), i, make)

    found = [made(leaf, i) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)]
    number = len(leaves)

    def is_end(tensor: Tensor) -> bool:
        return any(tensor is end for end in ends)

    def marked_there(tensor: Tensor) -> Tensor:
        nonlocal number
        if not is_end(tensor):
            return tensor
        number += 1
        return made(tensor, number - 1)

    for i, leaf in enumerate(leaves):
        if is_held(leaf) and any(map(is_end, tensors_in(leaf))):
            found[i] = rebuilt(leaf, marked_there)
    return tree_unflatten(found, spec)


def places(joint: Joint) -> tuple[dict[str, int], dict[int, str]]:
    """Result of the graph -> its place among the model's; and that place -> the name of its
    gradient. CaptureError for results that are no tensors of their own."""
    plain = {
        desc.idx: name
        for name, desc in joint.results.items()
        if isinstance(desc, descriptors.PlainAOTOutput)
    }
    place = {i: number for i, number in enumerate(joint.marks) if number is not None}
    if not plain.keys() >= place.keys() or any(joint.views[i] for i in place):
        raise CaptureError(
            "a result is a view of another or of an input, or a tensor subclass; expected tensors "
            "of their own: clone it"
        )
    tangents = {getattr(d.output, "idx", -1): name for name, d in joint.tangents.items()}
    if not place.keys() >= tangents.keys():
        raise CaptureError(
            "something that requires a gradient is kept by the model, or is in an object without a "
            "`__dict__`; expected it to be returned, or detached"
        )
    return {plain[i]: n for i, n in place.items()}, {place[i]: tangents[i] for i in tangents}


def means(joint: Joint) -> set[int]:
    """The places of results that are the mean of a tensor, in the graph, up to factors."""
    results = joint.captured.joint.graph.find_nodes(op="output")[0].args[0]
    named = dict(zip(joint.results, results, strict=False))  # gradients stand behind
    return {place for name, place in places(joint)[0].items() if _is_mean(named[name])}


def _is_mean(node: fx.Node) -> bool:
    while getattr(node.target, "overloadpacket", None) in _PASS_ON:
        inputs = [each for each in node.args if isinstance(each, fx.Node)]
        rounds = not node.meta["val"].is_floating_point() or node.kwargs.get("rounding_mode")
        if len(inputs) != 1 or rounds:
            return False
        (node,) = inputs
    if node.target is not torch.ops.aten.mean.default:
        return False
    return all(isinstance(size, int) for size in node.all_input_nodes[0].meta["val"].shape)


class SlicedProgram(Program):
    """A program whose microbatch is a batch in slices: it puts results together."""

    def __init__(
        self,
        joint: Joint,
        report: Report,
        whole: bool,
        draws: Mapping[str, Draw],
        cut: Callable[[Captured, Plan], Parts] = cut,
    ) -> None:
        super().__init__(joint, report, whole, draws, cut)
        self.draws = draws
        self.places, self.tangents = places(joint)
        self._lasting = of_parameters(joint)

    def forward(self, states: Sequence[State], ways: Sequence[Way]) -> list[Any]:
        """Run the forwards; return the batch's results."""
        return self.whole(self.begin(states), ways)

    def whole(self, flight: Flight, ways: Sequence[Way]) -> list[Any]:
        """Take the batch's results, which the states then no longer hold. Those that the model
        keeps and does not return are put together along dimension 0, if they depend on the
        batch."""

        def one(name: str, parts: Sequence[Any]) -> Any:
            if name in self.places:
                place = self.places[name]
                shapes = [tuple(part.shape) for part in parts if place in self.tangents]
                if len({*shapes}) > 1:  # `apart` cuts their gradient evenly
                    raise uneven(f"result {place}", self.count, shapes)
                return together(f"result {place}", parts, ways[place])
            batched = isinstance(parts[0], Tensor) and parts[0].dim() and name not in self._lasting
            return together("what the forward sets", parts, 0 if batched else "alike")

        pairs = zip(self.joint.results, flight.results(), strict=True)
        return [one(name, parts) for name, parts in pairs]

    def step(self, states: Sequence[State], ways: Sequence[Way]) -> list[Any]:
        """Run forward and backward of all slices; returns the results of the batch."""
        if self.at_once is None:
            flight = self.begin(states)
            results = self.whole(flight, ways)
            flight.run("B")
        else:
            flight = self.run_at_once(states)
            results = self.whole(flight, ways)
        flight.end()
        return results

    def gradients_came(
        self, states: Sequence[State], gradients: Sequence[Tensor], ways: Sequence[Way]
    ) -> None:
        """Give slices their part of the gradients of the batch's results, which come in the order
        of the results that get one."""
        pairs = zip(sorted(self.tangents.items()), gradients, strict=True)
        for (place, name), gradient in pairs:
            each = apart(gradient.contiguous(), ways[place], len(states))
            for state, part in zip(states, each, strict=True):
                state[name] = part


@dataclass
class Slices:
    """A batch that is running: `states` of the slices that have come. The last runs all, by
    `run`, and the batch's results are made in these `ways`."""

    count: int  # of microbatches
    run: Callable[[SlicedProgram, Sequence[State], Sequence[Way]], list[Any]] = SlicedProgram.step
    runs: bool = True
    ways: Sequence[Way] = ()
    each: Sequence[Given] = ()  # the slices' calls
    states: list[State] = field(default_factory=list)
    program: SlicedProgram | None = None
    report: Report | None = None

    def forward(self, program: Program, state: State) -> Sequence[Any]:
        assert isinstance(program, SlicedProgram)
        if self.states and program is not self.program:
            raise CaptureError("slices of one batch are graphs of their own")
        self.program = program
        self.states.append(state)
        if len(self.states) < program.count:
            raise Stop
        return self.run(program, self.states, self.ways)
