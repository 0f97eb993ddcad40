"""A batch in slices: cut along dimension 0, run beside each other in one planned order.

    F of all slices | R, I and W of all slices

The loss of the batch is the mean of its slices' losses, and gradients are added up in the order of
slices, bitwise as by `for each in slices: (model(*each) / len(slices)).backward()`. That is the
uncut step up to rounding if every sample goes its own way, or asks for what it needs of the others
(`overlapc.layers`). What a graph shows to see the whole
batch is refused when it is planned (`refuse_whole`); the rest shows when a first batch is run both
ways (`refuse_different`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from overlapc.errors import CaptureError, OptionError
from overlapc.layers import in_turn
from overlapc.merge import at, of_slice
from overlapc.passes.joint import Joint, Stop, outer
from overlapc.passes.nodes import is_random, module_of
from overlapc.passes.parts import cut, join
from overlapc.passes.trace import changed_inputs
from overlapc.planning.report import Report
from overlapc.runtime.exchange import Exchange
from overlapc.runtime.program import Flight, Program, State
from overlapc.runtime.snapshot import as_it_was

# How far slices may be from the uncut batch, relative to a tensor's largest number, by the coarsest
# type that the graph works with.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
_NOISE = 0.01  # of that, relative to the largest number of all gradients: where one should be zero
Run = Callable[[Any, int], tuple[Tensor, list[Any]]]  # a part, of how many -> loss, other results


def cut_batch(arguments: Any, count: int) -> list[Any]:
    """Cut the arguments of a call: tensors along dimension 0; every slice has all others."""
    flat, spec = tree_flatten(arguments)
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = {leaf.shape[0] for leaf in tensors}
    if len(sizes) != 1 or sizes.pop() % count:
        raise OptionError(
            f"slices={count}: found inputs of shapes {[tuple(leaf.shape) for leaf in tensors]}; "
            "expected one size of dimension 0, the batch, that it divides"
        )
    if any(leaf.requires_grad for leaf in tensors):
        raise OptionError(f"slices={count}: an input requires a gradient; expected it detached")
    each = [
        leaf.chunk(count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count
        for leaf in flat
    ]
    return [tree_unflatten(leaves, spec) for leaves in zip(*each, strict=True)]


def whole(name: str, parts: Sequence[Any]) -> Any:
    """The batch's result of its slices', which is no loss."""
    first = parts[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(tuple(parts))
    if all(bool(part == first) for part in parts):
        return first
    raise OptionError(
        f"slices={len(parts)}: {name} is a number that is another for each slice; expected the "
        "loss, numbers that are alike, and tensors whose dimension 0 is the batch"
    )


class SlicedProgram(Program):
    """A graph of one slice, and the two parts that all slices of a batch run together."""

    def __init__(self, joint: Joint, report: Report) -> None:
        captured, plan, self.count = joint.captured, report.plan, report.slices
        first, *others = (of_slice(plan, k, captured.trace.digest) for k in range(self.count))
        parts = cut(captured, first)
        super().__init__(joint, report, whole=True, parts=parts)
        # Where another slice keeps the same, only the order of its ops is another: the plan's.
        each = [parts]
        for other in others:
            alike = set(other.saved) == set(first.saved)
            alike = alike and set(other.recomputed) == set(first.recomputed)
            each.append(parts if alike else cut(captured, other))
        self._forwards = join([one.forward for one in each], plan.order, at)
        self._backwards = join([one.backward for one in each], plan.order, at)
        self.shared = {name: value / self.count for name, value in self.shared.items()}
        losses = {outer(tangent).output for tangent in joint.tangents.values()}
        self._losses = {name for name, desc in joint.results.items() if outer(desc) in losses}

    def step(self, states: Sequence[State]) -> list[Any]:
        """Run forward and backward of all slices; returns the results of the batch."""
        flights = [Flight(self, state) for state in states]
        self._forwards.run(self.shared, *states)
        results = zip(*(flight.results() for flight in flights), strict=True)
        named = dict(zip(self.joint.results, results, strict=True))
        self._backwards.run(self.shared, *states)
        for flight in flights:
            flight.end()
        return [
            sum(part / self.count for part in parts) if name in self._losses else whole(name, parts)
            for name, parts in named.items()
        ]


@dataclass
class Slices:
    """A batch that is running: `states` of the slices that have come. The last runs all."""

    count: int
    runs: bool = True
    states: list[State] = field(default_factory=list)
    program: SlicedProgram | None = None

    def forward(self, program: Program, state: State) -> Sequence[Any]:
        assert isinstance(program, SlicedProgram)
        if self.states and program is not self.program:
            raise CaptureError("slices of one batch are graphs of their own")
        self.program = program
        self.states.append(state)
        if len(self.states) < program.count:
            raise Stop
        return program.step(self.states)


# --------------------------------------------------------------------------- what may be cut


def refuse_whole(joint: Joint, state: State, model: nn.Module, count: int) -> None:
    """Raise for what would run once for each slice and should once for the batch."""
    captured = joint.captured
    if changed := changed_inputs(captured.joint):
        written = {id(state.get(name)) for name in changed}
        names = [name for name, buffer in model.named_buffers() if id(buffer) in written]
        raise OptionError(
            f"slices={count}: the forward changes {', '.join(names) or 'an input'}, once for each "
            "slice; expected buffers and inputs that it only reads"
        )
    for node in captured.joint.graph.nodes:
        if node.op == "call_function" and _draws(node):
            place = f" of {module_of(node)}" if module_of(node) else ""
            raise OptionError(
                f"slices={count}: {node.name}{place} draws random numbers, others in slices than "
                "for the whole batch; expected none: leave dropout out, or slices"
            )


def _draws(node: fx.Node) -> bool:
    """Does it draw random numbers that matter? Dropout that drops nothing does not."""
    if not is_random(node):
        return False
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema else ()):
        if argument.name in ("p", "dropout_p"):
            given = node.args[place] if place < len(node.args) else argument.default_value
            return bool(node.kwargs.get(argument.name, given) != 0)
    return True


def refuse_different(
    model: nn.Module,
    run: Run,
    batch: Any,
    each: Sequence[Any],
    joint: Joint,
    exchange: Exchange | None,
) -> None:
    """Raise, on all ranks, if eager computes anything else for the slices than for the batch."""

    def first(what: str, mine: str) -> str:
        """What the first rank says that has anything to say."""
        told = [mine]
        if exchange is not None:
            told = [data.decode() for data in exchange.gather(what, mine.encode())]
        return next(filter(None, told), "")

    tolerance = _tolerance(joint)
    found = first("in slices", _different(model, run, batch, each, tolerance))
    if found:
        place = first("whole batch", _first_module(model, run, batch, each, tolerance))
        raise OptionError(
            f"slices={len(each)}: {found}; {place and f'{place}; '}expected a loss that is a mean "
            "over samples of which each goes its own way: leave slices out"
        )


def _different(
    model: nn.Module, run: Run, batch: Any, each: Sequence[Any], tolerance: float
) -> str:
    """What of loss, results and gradients is another for the slices than for the whole batch, as
    eager computes both; "" if nothing is."""

    def left(parts: Sequence[Any]) -> dict[str, Any]:
        with as_it_was(model):
            losses, others = zip(*_in_turn(run, parts), strict=True)
            found = {"the loss": sum(losses)}
            for i, results in enumerate(zip(*others, strict=True)):
                found[f"result {i}"] = whole(f"result {i}", results)
            gradients = {f"the gradient of {n}": p.grad for n, p in model.named_parameters()}
        return found | gradients

    expected, found = left([batch]), left(each)
    gradients = [p for name, p in expected.items() if "gradient" in name and p is not None]
    noise = _NOISE * tolerance * max([_largest(gradient) for gradient in gradients], default=0.0)
    for name, value in expected.items():
        if not _agree(value, found[name], tolerance, noise if "gradient" in name else 0.0):
            far = _distance(value, found[name])
            return f"{name} is another in slices ({far}, expected at most {tolerance:g})"
    return ""


def _in_turn(run: Run, parts: Sequence[Any]) -> list[tuple[Tensor, list[Any]]]:
    """Run the slices one after the other, each with what those before it counted."""
    found = []
    with in_turn(len(parts)) as begin:
        for part in parts:
            begin()
            found.append(run(part, len(parts)))
    return found


def _tolerance(joint: Joint) -> float:
    """How far slices of this graph may be from the batch."""
    nodes = joint.captured.joint.graph.nodes
    kinds = {n.meta["val"].dtype for n in nodes if isinstance(n.meta.get("val"), Tensor)}
    if torch.get_float32_matmul_precision() != "highest":
        kinds.add(torch.float16)
    return max([TOLERANCE[kind] for kind in kinds if kind in TOLERANCE], default=0.0)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _agree(one: Any, other: Any, tolerance: float, noise: float = 0.0) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    return _largest(one.double() - other.double()) <= max(tolerance * _largest(one), noise)


def _distance(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return f"{other!r} for {one!r}"
    if one.shape != other.shape:
        return f"of shape {tuple(other.shape)} for {tuple(one.shape)}"
    far = _largest(one.double() - other.double()) / (_largest(one) or 1.0)
    return f"{far:.2g} of its largest number apart"


def _first_module(
    model: nn.Module, run: Run, batch: Any, each: Sequence[Any], tolerance: float
) -> str:
    """The first module that makes of the same inputs other results in slices; "" if none does."""

    def calls(parts: Sequence[Any]) -> list[list[tuple[str, list[Any], list[Any]]]]:
        each: list[list[tuple[str, list[Any], list[Any]]]] = []
        with as_it_was(model), ExitStack() as stack:
            for name, module in model.named_modules():

                def note(_module: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                    each[-1].append((name, _tensors((args, kwargs)), _tensors(out)))

                hook = module.register_forward_hook(note, with_kwargs=True)
                stack.callback(hook.remove)

            def begun(part: Any, count: int) -> tuple[Tensor, list[Any]]:
                each.append([])
                return run(part, count)

            _in_turn(begun, parts)
        return each

    def agree(one: Tensor, parts: Sequence[Tensor]) -> bool:
        if one.dim() and sum(part.shape[0] for part in parts if part.dim()) == one.shape[0]:
            return _agree(one, torch.cat(tuple(parts)), tolerance)
        return all(_agree(one, part, tolerance) for part in parts)

    (whole_batch,), in_slices = calls([batch]), calls(each)
    for (name, taken, made), *others in zip(whole_batch, *in_slices, strict=False):
        given = [agree(one, [o[1][i] for o in others]) for i, one in enumerate(taken)]
        results = [agree(one, [o[2][i] for o in others]) for i, one in enumerate(made)]
        if all(given) and not all(results):
            module = model.get_submodule(name)
            return f"{name or 'the model'} ({type(module).__name__}) sees the whole batch"
    return ""


def _tensors(values: Any) -> list[Any]:
    return [leaf.detach().clone() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
