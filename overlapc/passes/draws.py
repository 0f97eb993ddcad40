"""Random numbers that the slices of a batch draw together: at once for the whole batch.

`draws_of` compares the graph of a slice with that of the whole batch. The first slice draws what
the whole batch draws at that place, and each slice reads its part: so masks are the whole batch's,
and so is the generator's state afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from overlapc.core.errors import OptionError
from overlapc.passes.nodes import is_random, is_seeded, module_of
from overlapc.passes.trace import Captured, changed_inputs

_DROPOUT = "aten.native_dropout.default"  # y, mask = native_dropout(x, p, train)
# Ops whose numbers depend on the sizes and strides that they are given, not on values.
_OF_SIZES = (
    "aten.bernoulli.p",
    "aten.exponential.default",
    "aten.normal_functional.default",
    "aten.rand.default",
    "aten.rand_like.default",
    "aten.randint.default",
    "aten.randint.low",
    "aten.randint_like.default",
    "aten.randint_like.low_dtype",
    "aten.randn.default",
    "aten.randn_like.default",
    "aten.uniform.default",
    "overlapc.bernoulli_in_place.float",
)


@dataclass(frozen=True)
class LikeTensor:
    """A tensor of whose values nothing depends."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> LikeTensor:
        return LikeTensor(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Draw:
    """A draw of the whole batch, and how it is cut: along `axis`, or not at all if that is None."""

    target: Any
    args: Any  # tensors as Like
    kwargs: dict[str, Any]
    axis: int | None
    part: LikeTensor
    through: tuple[Any, ...] = ()  # what calls the target, and its first arguments

    @property
    def is_dropout(self) -> bool:
        return str(self.target) == _DROPOUT

    def whole(self) -> Tensor:
        made = self.made(tree_map_only(LikeTensor, LikeTensor.empty, self.args), self.kwargs)
        found: Tensor = made[1] if self.is_dropout else made
        return found

    def made(self, args: Any, kwargs: Any) -> Any:
        """What the op makes of these arguments."""
        call, *given = *self.through, self.target
        return call(*given, *args, **kwargs)

    def of(self, whole: Tensor, k: int) -> Tensor:
        return part_of(whole, self.axis, k, self.part.size, self.part.stride)

    def nodes(self, graph: fx.Graph) -> fx.Node:
        """Put the draw into a graph."""

        def empty(like: LikeTensor) -> fx.Node:
            given = {"dtype": like.dtype, "device": like.device}
            return graph.call_function(torch.empty_strided, (like.size, like.stride), given)

        args = tree_map_only(LikeTensor, empty, self.args)
        call, *given = *self.through, self.target
        made = graph.call_function(call, (*given, *args), self.kwargs)
        return graph.call_function(second, (made,)) if self.is_dropout else made

    def node_of(self, graph: fx.Graph, whole: fx.Node, k: int, x: fx.Node | None) -> fx.Node:
        """Put a slice's part into a graph; of dropout, what that makes of `x` with it."""
        given = (whole, self.axis, k, self.part.size, self.part.stride)
        part = graph.call_function(part_of, given)
        if not self.is_dropout:
            return part
        return graph.call_function(dropped, (x, part, self.args[1]))


def second(made: Sequence[Tensor]) -> Tensor:
    return made[1]


def part_of(
    whole: Tensor, axis: int | None, k: int, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """The part of slice k, in memory of its own."""
    mine = whole if axis is None else whole.narrow(axis, k * size[axis], size[axis])
    return whole.new_empty_strided(tuple(size), tuple(stride)).copy_(mine)


def dropped(x: Tensor, mask: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """What `native_dropout` makes of its mask."""
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def draws_numbers(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Does the op draw random numbers that matter? Dropout that drops nothing does not."""
    if not is_seeded(target):
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name in ("p", "dropout_p"):
            given = args[place] if place < len(args) else argument.default_value
            return bool(kwargs.get(argument.name, given) != 0)
    return True


def drawing(captured: Captured) -> list[fx.Node]:
    """The nodes of a joint graph that draw random numbers that matter."""

    def found() -> Iterator[fx.Node]:
        for node in captured.joint.graph.nodes:
            if node.op == "call_function" and is_random(node):
                op = isinstance(node.target, torch._ops.OpOverload)
                if not op or draws_numbers(node.target, node.args, node.kwargs):
                    yield node

    return list(found())


def may_pair(captured: Captured) -> bool:
    """May the forwards of two microbatches run beside each other? Not if they draw random numbers
    or change buffers, for both have an order."""
    return not drawing(captured) and not changed_inputs(captured.joint)


def draws_of(captured: Captured, uncut: Captured, count: int) -> dict[str, Draw]:
    """The draws of a slice's graph by the names of their ops, in order; OptionError for those that
    cannot be cut."""
    mine, others = drawing(captured), drawing(uncut)
    targets = [str(node.target) for node in mine]
    if targets != [str(node.target) for node in others]:
        raise OptionError(
            f"slices={count}: the graph of a slice draws {len(mine)} times, that of the whole "
            f"batch {len(others)} times; expected the same draws"
        )
    return {a.name: _draw(a, b, captured, count) for a, b in zip(mine, others, strict=True)}


def _draw(node: fx.Node, whole: fx.Node, captured: Captured, count: int) -> Draw:
    name = str(node.target)
    if name not in (*_OF_SIZES, _DROPOUT) or not captured.trace.op[node.name].is_forward:
        raise _refusal(node, count, "that depend on other numbers, or are drawn in the backward")
    if any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves((whole.args, node.args))):
        raise _refusal(node, count, "of a size that depends on data")
    part, full = (_made(each) for each in (node, whole))
    differ = [d for d, size in enumerate(full.shape) if part.shape[d : d + 1] != (size,)]
    fits = part.dim() == full.dim() and len(differ) < 2
    if not fits or any(full.shape[d] != count * part.shape[d] for d in differ):
        raise _refusal(node, count, f"of shapes {tuple(part.shape)} and {tuple(full.shape)}")
    args = tree_map_only(fx.Node, lambda given: LikeTensor.of(given.meta["val"]), whole.args)
    axis = differ[0] if differ else None
    return Draw(whole.target, args, dict(whole.kwargs), axis, LikeTensor.of(part))


def _made(node: fx.Node) -> Tensor:
    val = node.meta["val"]
    found: Tensor = val[1] if isinstance(val, (tuple, list)) else val
    return found


def _refusal(node: fx.Node, count: int, what: str) -> OptionError:
    place = f" of {module_of(node)}" if module_of(node) else ""
    return OptionError(
        f"slices={count}: {node.name}{place} draws random numbers {what}; expected numbers that "
        "can be drawn at once for the whole batch, as those of dropout: leave it out, or slices"
    )


@dataclass(frozen=True)
class Whole:
    """What the whole batch draws, with the generator's states before and after."""

    drawn: Tensor
    before: Tensor
    after: Tensor


class Drawn(TorchDispatchMode):
    """While this is on, slice k reads its part of what the whole batch draws. All slices share
    `wholes`, which the first draws. The first finds the generator as the whole batch does, each
    other in states of its own: so a backward that runs a checkpointed forward again, of any slice,
    reads the same part again."""

    def __init__(self, draws: Sequence[Draw], wholes: list[Whole], k: int, count: int) -> None:
        super().__init__()
        self.draws, self.wholes, self.k, self.count, self.place = draws, wholes, k, count, 0
        if wholes:
            _set_state(draws[0], self.before(0, k))

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not draws_numbers(op, args, kwargs or {}):
            return op(*args, **(kwargs or {}))
        place = self.next()
        draw = self.draws[place]
        if place == len(self.wholes):
            if place:  # other slices may have run since
                _set_state(draw, self.wholes[-1].after)
            before = _state(draw)
            self.wholes.append(Whole(draw.whole(), before, _state(draw)))
        if not self.k:
            _set_state(draw, self.wholes[place].after)
        elif place + 1 < len(self.draws):
            _set_state(self.draws[place + 1], self.before(place + 1, self.k))
        part = draw.of(self.wholes[place].drawn, self.k)
        if draw.is_dropout:
            return dropped(args[0], part, args[1])
        return args[0].copy_(part) if op._schema.is_mutable else part

    def next(self) -> int:
        """The place of this draw: in a backward that of the forward that runs again."""
        if torch._C._current_graph_task_id() == -1:
            self.place += 1
            return self.place - 1
        for place, k in product(range(len(self.wholes)), range(self.count)):
            if torch.equal(self.before(place, k), _state(self.draws[place])):
                self.k = k
                return place
        raise OptionError("slices: a checkpoint draws other random numbers when it runs again")

    def before(self, place: int, k: int) -> Tensor:
        """The generator's state in which slice k comes to a draw."""
        if not k:
            return self.wholes[place].before
        generator = torch.Generator(self.draws[place].part.device)
        return generator.manual_seed((k << 32) + place).get_state()


def _state(draw: Draw) -> Tensor:
    device = draw.part.device
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(draw: Draw, state: Tensor) -> None:
    device = draw.part.device
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def random_states() -> list[Tensor]:
    """Of the default generators of the CPU and of each GPU in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def set_random_states(states: Sequence[Tensor]) -> None:
    """Put back what `random_states` has returned."""
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(list(states[1:]))
