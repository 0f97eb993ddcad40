"""A training step of several microbatches, with the forward of one merged with the backward of
the one before: `TrainStep`.

    F0    (F1; R0 I0 W0)   (F2; R1 I1 W1)   ...   R I W of the last

Each pair in brackets is one graph in a planned order: the forward's collectives run under the
backward's compute and the reverse.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import descriptors
from torch.utils._pytree import tree_flatten

from overlapc.errors import CaptureError, OptionError
from overlapc.files import StrPath
from overlapc.passes.capture import Captured, capture, without_ties
from overlapc.passes.parts import Part, accumulate, cut, parameter_gradients
from overlapc.planning import Options, StepReport, check_solver, plan_step
from overlapc.runtime.exchange import busy
from overlapc.runtime.ranks import exchange_for
from overlapc.runtime.seeds import warn_of_seeds

_Args = tuple[Any, ...]
Shape = tuple[tuple[int, ...], torch.dtype, bool]  # sizes, and whether it gets a gradient
Shapes = tuple[Shape, ...]


class TrainStep:
    """The gradients of several microbatches, added up in `.grad` as by plain accumulation:

        step = TrainStep(model, memory_budget="8GB")
        losses = step([(tokens, targets), ...])      # for each: model(*it).backward()

    and bitwise the same. `model` gives the loss, or `loss(model, *microbatch)` does; divide it
    by the number of microbatches there if a mean is wanted. All microbatches of a step have the
    same shapes. The first call plans; so does one with other shapes, another number of
    microbatches or another mode of the model. Options are those of `optimize`; the memory budget
    is for what the whole step allocates at its peak, gradients included. With `merge=False`, or a
    baseline as solver, microbatches run one after the other.

    What cannot be captured runs as plain PyTorch, with one warning. `report` and `explain()` tell
    what was decided.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None = None,
        *,
        memory_budget: int | float | str | None = None,
        solver: str = "overlap",
        merge: bool = True,
        profile: str = "measure",
        hardware: str = "cpu-gloo",
        timeout_s: float = 7.0,
        cache: bool | StrPath | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"TrainStep expects an nn.Module, found {type(model).__name__}")
        check_solver(solver)
        self._merge = merge
        self.model = model
        self._whole = without_ties(model if loss is None else _Whole(model, loss))
        self._options = Options(
            memory_budget, solver, "eager", profile, hardware, None, timeout_s, cache
        )
        self._known: dict[Any, _Program | None] = {}
        self.report: StepReport | None = None

    def __call__(self, microbatches: Sequence[Any]) -> list[Any]:
        """Add the gradients of all microbatches to `.grad`; returns what the model returned for
        each, detached."""
        each = _tuples(microbatches)
        program = self._program(each)
        return [_plain(self._whole, mb) for mb in each] if program is None else program.run(each)

    def plan(self, microbatches: Sequence[Any]) -> StepReport | None:
        """What a call with these microbatches would do; None if it would run as plain PyTorch.
        All ranks call this together."""
        program = self._program(_tuples(microbatches))
        return None if program is None else program.report

    def explain(self) -> str:
        if self.report is None:
            return "nothing planned yet: run a step first"
        return self.report.explain()

    def _program(self, each: Sequence[_Args]) -> _Program | None:
        key = (len(each), mode(self.model), alike(each))
        if key not in self._known:
            self._known[key] = self._prepare(each)
        program = self._known[key]
        if program is not None:
            self.report = program.report
        return program

    def _prepare(self, each: Sequence[_Args]) -> _Program | None:
        refuse_hooks(self.model, "TrainStep")
        try:
            with busy("tracing"):
                captured = capture(self._whole, *each[0])
                inputs = Inputs.of(captured, self._whole)
            with exchange_for(captured.trace.lanes, self._options.timeout_s) as exchange:
                primals = inputs.primals(each[0])
                captured, (report,) = plan_step(
                    captured,
                    self._options,
                    len(each),
                    lag=int(self._merge),
                    gradients=list(parameter_gradients(captured)),
                    add_ns_per_kib=adding(self._whole),
                    primals=primals,
                    exchange=exchange,
                )
                warn_of_seeds(captured, primals, exchange)
                return _Program.of(captured, report, inputs)
        except CaptureError as error:
            warnings.warn(
                f"overlapc runs the step as plain PyTorch: {error}", RuntimeWarning, stacklevel=4
            )
            return None


class _Whole(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *args: Any) -> Tensor:
        return self._loss(self.model, *args)


@dataclass
class _Program:
    """The parts of a planned step, and what they run on."""

    report: StepReport
    inputs: Inputs
    forward: Part
    backward: Part
    merged: Part | None

    @staticmethod
    def of(captured: Captured, report: StepReport, inputs: Inputs) -> _Program:
        parts = cut(captured, report.lone.plan)
        merged = None if report.merged is None else parts.merged(report.merged.plan)
        return _Program(report, inputs, parts.forward, parts.backward, merged)

    def run(self, each: Sequence[_Args]) -> list[Any]:
        shared = self.inputs.shared()
        states = [self.inputs.state(args) for args in each]
        results = []
        # The graphs hold the casts of autocast already, and the backward is in them.
        with torch.no_grad(), torch._C._DisableAutocast():
            for i, state in enumerate(states):
                if i and self.merged is not None:
                    self.merged.run(shared, state, states[i - 1])
                else:
                    self.forward.run(shared, state)
                returned = self.inputs.results(state)
                results.append(returned[0] if len(returned) == 1 else returned)
                if self.merged is None or i == len(states) - 1:
                    self.backward.run(shared, state)
            for args, state in zip(each, states, strict=True):
                self.inputs.gradients(args, state)
        return results


@dataclass
class Inputs:
    """Where the inputs of the graph come from, and where its results go; by names of nodes."""

    order: list[str]
    parameters: dict[str, Tensor]  # and buffers
    arguments: dict[str, int]  # place in the flat arguments
    tangents: dict[str, Tensor]
    updates: dict[str, Tensor]  # result -> the buffer that it is the new value of
    returned: list[str]
    shapes: Shapes = ()  # of what is returned

    @staticmethod
    def of(captured: Captured, module: nn.Module, ends: bool = True) -> Inputs:
        """`ends`: the module gives the loss, and its gradient is one; else both are the next
        stage's business."""
        tensors = dict(module.named_parameters(remove_duplicate=False))
        tensors |= dict(module.named_buffers(remove_duplicate=False))
        found = Inputs([], {}, {}, {}, {}, [])
        with_gradient = set()
        for node in captured.joint.graph.find_nodes(op="placeholder"):
            desc = node.meta.get("desc")
            if isinstance(desc, (descriptors.ParamAOTInput, descriptors.BufferAOTInput)):
                found.parameters[node.name] = tensors[desc.target]
            elif isinstance(desc, descriptors.PlainAOTInput):
                found.arguments[node.name] = desc.idx
            elif isinstance(desc, descriptors.TangentAOTInput):
                val = node.meta["val"]
                with_gradient.add(getattr(desc.output, "idx", None))
                found.tangents[node.name] = torch.ones(
                    val.shape, dtype=val.dtype, device=val.device
                )
            else:
                raise CaptureError(f"the model takes {desc}, expected plain tensors and numbers")
            if not isinstance(desc, descriptors.TangentAOTInput):
                found.order.append(node.name)
        shapes = [tuple(tangent.shape) for tangent in found.tangents.values()]
        if ends and (len(shapes) != 1 or shapes[0] not in ((), (1,))):
            raise CaptureError(
                f"the model returns {len(shapes)} results that require a gradient, of shapes "
                f"{shapes}; expected one number, the loss: detach the others"
            )
        if not shapes:
            raise CaptureError("nothing that the model returns requires a gradient")
        output = captured.joint.graph.find_nodes(op="output")[0]
        for i, desc in enumerate(output.meta["desc"][: captured.num_fwd_outputs]):
            if isinstance(desc, descriptors.PlainAOTOutput):
                found.returned.append(f"result{i}")
                val = getattr(output.args[0][i], "meta", {}).get("val")
                if isinstance(val, Tensor):
                    shape = tuple(val.shape), val.dtype, desc.idx in with_gradient
                    found.shapes = (*found.shapes, shape)
            elif isinstance(desc, descriptors.InputMutationAOTOutput) and isinstance(
                desc.mutated_input, (descriptors.ParamAOTInput, descriptors.BufferAOTInput)
            ):
                found.updates[f"result{i}"] = tensors[desc.mutated_input.target]
            else:
                raise CaptureError(f"the model gives {desc}, expected plain tensors")
        if sum(gradient for *_, gradient in found.shapes) != len(found.tangents):
            raise CaptureError("results are views of one another: expected tensors of their own")
        return found

    def argument(self, place: int) -> str:
        """The input that is the argument at this place."""
        return next(name for name, at in self.arguments.items() if at == place)

    def gradient_of(self, place: int) -> str:
        """What the gradient of the argument at this place is called in a state."""
        return f"gradient{self.order.index(self.argument(place))}"

    def primals(self, args: _Args) -> list[Any]:
        known = {**self.parameters, **self.state(args)}
        return [known[name] for name in self.order]

    def shared(self) -> dict[str, Any]:
        return {**self.parameters, **self.tangents}

    def state(self, args: _Args) -> dict[str, Any]:
        flat, _ = tree_flatten((args, {}))
        return {name: flat[place] for name, place in self.arguments.items()}

    def gradients(self, args: _Args, state: dict[str, Any]) -> None:
        """Add those of the arguments to their `.grad`."""
        flat, _ = tree_flatten((args, {}))
        for i, name in enumerate(self.order):
            if (gradient := state.pop(f"gradient{i}", None)) is not None:
                accumulate((flat[self.arguments[name]],), gradient)

    def results(self, state: dict[str, Any]) -> tuple[Any, ...]:
        """What the model returned, and its buffers brought up to date."""
        for name, buffer in self.updates.items():
            buffer.copy_(state.pop(name))
        return tuple(state.pop(name) for name in self.returned)


def _tuples(microbatches: Sequence[Any]) -> list[_Args]:
    each = [mb if isinstance(mb, tuple) else (mb,) for mb in microbatches]
    if not each:
        raise OptionError("TrainStep was given no microbatches; expected at least one")
    return each


def _plain(module: nn.Module, args: _Args) -> Any:
    result = module(*args)
    returned = result if isinstance(result, (tuple, list)) else (result,)
    next(r for r in returned if isinstance(r, Tensor) and r.requires_grad).backward()
    detached = tuple(r.detach() if isinstance(r, Tensor) else r for r in returned)
    return detached if isinstance(result, (tuple, list)) else detached[0]


def mode(module: nn.Module) -> tuple[Any, ...]:
    """What of the model's state, and of PyTorch's, a captured graph depends on; and which tensors
    it was captured with."""
    devices = ("cpu", "cuda")
    autocast = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices
    )
    return (
        tuple(part.training for part in module.modules()),
        tuple((id(p), p.dtype, p.requires_grad) for p in module.parameters()),
        tuple((id(b), b.dtype) for b in module.buffers()),
        autocast,
    )


def alike(each: Sequence[_Args]) -> Any:
    """What all microbatches must have in common, and have."""

    def describe(args: _Args) -> tuple[Any, ...]:
        flat, spec = tree_flatten(args)
        if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in flat):
            raise OptionError(
                "a microbatch holds a tensor that was computed under autograd; expected inputs: "
                "detach it, or make what computes it a part of the model"
            )
        return str(spec), tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in flat
        )

    first = describe(each[0])
    for i, args in enumerate(each):
        if (found := describe(args)) != first:
            raise OptionError(
                f"microbatch {i} is {found[1]}, microbatch 0 is {first[1]}; expected microbatches "
                "that are alike: pad them, or give those of other shapes to a step of their own"
            )
    return first


def refuse_hooks(module: nn.Module, who: str) -> None:
    """A captured graph would not run them."""
    for name, part in module.named_modules():
        if any(_hooks(part)):
            raise OptionError(
                f"{name or type(part).__name__} has hooks, which {who} would not run; expected "
                "none: remove them, or use overlapc.optimize"
            )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise OptionError(
                f"parameter {name} has hooks, which {who} would not run; expected none: "
                "reduce gradients after the step"
            )


def _hooks(part: nn.Module) -> Iterator[Any]:
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        yield getattr(part, kind, None)


def adding(module: nn.Module) -> float:
    """Nanoseconds that adding a KiB of gradients takes, measured on the largest parameter."""
    largest = max(module.parameters(), key=Tensor.numel, default=None)
    if largest is None:
        return 0.0
    one, other = (torch.zeros_like(largest, requires_grad=False) for _ in range(2))
    times = []
    for _ in range(5):
        _synchronize(largest.device)
        start = time.perf_counter_ns()
        one += other
        _synchronize(largest.device)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / max(1.0, largest.nbytes / 1024)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
