"""A model chunk of this rank, from tokens to the loss of each token: `Chunk`.

It stands in the place of the model's innermost `forward` while Megatron runs a step. The first call
captures and plans the chunk; each call runs its planned forward, and hands Megatron a result whose
backward is the planned one. Where a backward strictly alternates with a forward, a backward that
is asked for is laid by, and runs merged with the next forward; the last runs at once.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from overlapc.errors import CaptureError, OverlapcError
from overlapc.megatron import tracing
from overlapc.megatron.gradients import (
    Receiver,
    deliver,
    fuse,
    fused_weights,
    gathered,
    not_last,
    receiver,
)
from overlapc.megatron.recompute import own_plan
from overlapc.passes.as_eager import as_eager
from overlapc.passes.capture import capture
from overlapc.passes.joint import Joint, Leaf, is_gradient, owner_of
from overlapc.passes.nodes import primal_nodes
from overlapc.passes.parts import cut, parameter_gradients
from overlapc.passes.trace import Captured
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import plan
from overlapc.runtime.exchange import busy
from overlapc.runtime.program import Flight, Program, State
from overlapc.runtime.ranks import exchange_of, together
from overlapc.runtime.train_step import adding

if TYPE_CHECKING:
    from overlapc.runtime.exchange import Exchange

_PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)
_OUT_OF_ORDER = (
    "a step of Megatron ended, and a backward that was laid by did not run; expected one forward "
    "and one backward of each microbatch: pass merge=False"
)


class Whole(nn.Module):
    """The chunk as a function of tensors alone: the stage's input, if it has one, scales of
    auxiliary losses, and the tensors among the arguments."""

    def __init__(self, chunk: Chunk, call: Call) -> None:
        super().__init__()
        self.model = chunk.module
        self.taps = tracing.Taps()
        self._original, self._call = chunk.original, call

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        tensors, call = list(given), self._call
        self.taps.clear()
        if call.has_input:
            self.model.set_input_tensor([tensors.pop(0)])
        for scaler in tracing.scalers()[: call.scales]:
            scaler.main_loss_backward_scale = tensors.pop(0)
        leaves = [tensors.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        out = self._original(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise CaptureError(f"forward returns a {type(out).__name__}, expected one tensor")
        if out._is_view() or any(out is one for one in given):
            out = out.clone()
        return (out, *self.taps.values)


@dataclass
class Call:
    """A call of the chunk: `tensors` are the stage's input, scales, and those of `leaves`."""

    tensors: list[Tensor]
    has_input: bool
    scales: int
    leaves: list[Any]
    spec: TreeSpec

    def key(self) -> Any:
        """What calls of one plan have in common."""
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        described = [(tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in self.tensors]
        return str(self.spec), repr(plain), tuple(described), self.has_input, self.scales

    def check(self) -> None:
        for leaf in self.leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise CaptureError(
                    f"forward is given a {type(leaf).__name__}, expected tensors and plain values"
                )


@dataclass
class Planned:
    """A captured and planned chunk: how to call its graph, and what its results are."""

    program: Program
    whole: Whole
    owners: dict[str, Receiver]
    scales: tuple[str, ...]  # inputs of the graph
    gradients: tuple[str, ...]  # of the call's tensors; "" where there is none
    out: str
    taps: tuple[str, ...]
    changed: tuple[tuple[str, int], ...]  # results that buffers become, by place
    tangent: str


@dataclass
class Backward:
    """A backward that was asked for."""

    planned: Planned
    flight: Flight
    tangent: Tensor
    scales: list[Tensor]  # as they are when it is asked for

    def begin(self) -> None:
        state = self.flight.state
        state[self.planned.tangent] = self.tangent
        for name, scale in zip(self.planned.scales, self.scales, strict=True):
            if name in state:
                state[name] = scale


class _Run(torch.autograd.Function):
    """The planned forward, under autograd: its backward asks for the planned one."""

    @staticmethod
    def forward(ctx: Any, chunk: Chunk, planned: Planned, call: Call, *tensors: Tensor) -> Tensor:
        ctx.chunk, ctx.planned = chunk, planned
        ctx.flight, out = chunk.run_forward(planned, call)
        return out

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
        flight, ctx.flight = ctx.flight, None
        gradients = ctx.chunk.ask_backward(ctx.planned, flight, tangents[0])
        return None, None, None, None, *gradients


class Chunk:
    """One model chunk, for as long as Megatron is patched."""

    def __init__(self, module: nn.Module, ddp: Any, options: Options, merge: bool) -> None:
        self.module, self.ddp = module, ddp
        self.original: Callable[..., Any] = module.forward
        self.why_plain: list[str] = []
        self.ran: dict[str, int] = {"planned": 0, "merged": 0, "plain": 0}
        self._options, self._merge = options, merge
        self._planned: dict[Any, Planned | None] = {}
        self._anchor = torch.zeros((), requires_grad=True)  # makes results require a gradient
        self._pending: Backward | None = None

    def begin(
        self, ranks: Sequence[int], microbatches: int, in_flight: int, alternating: bool
    ) -> None:
        """A step begins. `ranks` run the same chunk; `alternating`: each backward comes right after
        its forward."""
        self._ranks, self._microbatches, self._in_flight = ranks, microbatches, in_flight
        self._alternating = alternating and self._merge
        self._started = self._ended = 0
        self._state = _state_of(self.module)
        self._lasting = [*self.module.parameters(), *self.module.buffers()]

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            raise OverlapcError(_OUT_OF_ORDER)

    def explain(self) -> str:
        reports = [each.program.report.explain() for each in self._planned.values() if each]
        plain = [f"{reason} (runs as plain Megatron)" for reason in self.why_plain]
        counts = ", ".join(f"{count} {kind}" for kind, count in self.ran.items())
        return "\n\n".join([f"forwards: {counts}", *reports, *plain])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of `forward`."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        call = self._call(args, kwargs)
        key = call.key(), self._state, self._alternating, self._in_flight
        if key not in self._planned:
            self._planned[key] = self._prepare(call)
        planned = self._planned[key]
        if planned is None:
            self._run_pending()
            self.ran["plain"] += 1
            return self.original(*args, **kwargs)
        gathered(self.ddp)
        return _Run.apply(self, planned, call, self._anchor, *call.tensors)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = tree_flatten((args, kwargs))
        came = []
        if not getattr(self.module, "pre_process", True):
            came = [self.module.decoder.input_tensor]
        scales = self._scales()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return Call([*came, *scales, *tensors], bool(came), len(scales), leaves, spec)

    def _scales(self) -> list[Tensor]:
        """What the backward multiplies auxiliary losses by, now. (Before the first forward nobody
        has said.)"""
        config = self.module.config
        count = 2 if getattr(config, "mtp_num_layers", None) else 0
        if getattr(config, "num_moe_experts", None):
            count = max(count, 1)
        found = [scaler.main_loss_backward_scale for scaler in tracing.scalers()[:count]]
        device = self._lasting[0].device
        return [
            torch.ones(1, device=device) if scale is None else scale.detach().clone().reshape(1)
            for scale in found
        ]

    # Planning

    def _prepare(self, call: Call) -> Planned | None:
        """The plan of all ranks that run this chunk; None, on all of them, if one of them cannot
        capture it."""
        try:
            with busy("tracing"):
                found: Captured | CaptureError
                try:
                    whole = Whole(self, call)
                    found = self._capture(whole, call)
                except CaptureError as error:
                    found = error
            with exchange_of(self._ranks, self._options.timeout_s) as exchange:
                captured = together(exchange, "captured", found)
                report = self._plan(captured, call, exchange)
                emitted: Planned | CaptureError
                try:
                    emitted = self._emit(captured, whole, call, report)
                except CaptureError as error:
                    emitted = error
                return together(exchange, "emitted", emitted)
        except CaptureError as error:
            if str(error) not in self.why_plain:
                self.why_plain.append(str(error))
                warnings.warn(
                    f"overlapc runs a model chunk as plain Megatron: {error}",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return None

    def _capture(self, whole: Whole, call: Call) -> Captured:
        call.check()
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
        fakes = [
            mode.from_tensor(t.detach().requires_grad_(t.requires_grad), static_shapes=True)
            for t in call.tensors
        ]
        with contextlib.ExitStack() as stack:
            if getattr(self.ddp, "remove_forward_pre_hook_handles", None):
                self.ddp.disable_forward_pre_hook(param_sync=False)
                stack.callback(self.ddp.enable_forward_pre_hook)
            stack.enter_context(tracing.standing_in(self.module, whole.taps))
            stack.enter_context(as_eager())
            captured = capture(whole, *fakes)
        whole.taps.values.clear()
        return captured

    def _plan(self, captured: Captured, call: Call, exchange: Exchange | None) -> Report:
        lag = int(self._alternating)
        step = TrainingStep(
            "one microbatch",
            self._microbatches,
            lag,
            in_flight=1 if lag else self._in_flight,
            gradients=tuple(parameter_gradients(captured)),
            add_ns_per_kib=adding(self.module, self._options),
        )
        primals = [*self._lasting, *call.tensors]
        own = own_plan(captured)
        planned = plan(captured, self._options, step, primals=primals, exchange=exchange, own=own)
        return planned.report

    def _emit(self, captured: Captured, whole: Whole, call: Call, report: Report) -> Planned:
        joint = _described(captured)
        owners = {
            owner_of(name): receiver(self._lasting[leaf.place], self.ddp)
            for name, leaf in joint.leaves.items()
            if leaf.place < len(self._lasting)
        }
        parts = cut(captured, report.plan, deliver)
        tracing.in_streams(captured, parts.forward)
        if fused := fused_weights(self.module):
            fuse(parts.backward, owners, fused)
        names = dict(zip(joint.places, joint.inputs, strict=True))
        first = len(self._lasting)
        scaled = range(first + call.has_input, first + call.has_input + call.scales)
        plain, changed = _results(joint)
        return Planned(
            Program(joint, report, whole=False, parts=parts),
            whole,
            owners,
            tuple(names[place] for place in scaled),
            tuple(
                f"gradient{place}" if names[place] in joint.leaves else ""
                for place in range(first, first + len(call.tensors))
            ),
            plain[0],
            tuple(plain[1:]),
            changed,
            next(iter(joint.tangents)),
        )

    # Running

    def run_forward(self, planned: Planned, call: Call) -> tuple[Flight, Tensor]:
        """F, merged with a backward that was laid by, if there is one."""
        before, self._pending = self._pending, None
        flat = [*self._lasting, *call.tensors]
        state: State = dict(zip(planned.program.joint.inputs, flat, strict=True))
        state |= planned.owners
        with torch.no_grad(), torch._C._DisableAutocast():  # casts are in the graph
            if before is None:
                flight = planned.program.begin(state)
            else:
                before.begin()
                with not_last(self.ddp):
                    flight = planned.program.begin(state, before.flight)
                self._ended += 1
                self.ran["merged"] += 1
            for name, place in planned.changed:
                self._lasting[place].copy_(flight.state.pop(name))
            planned.whole.taps.replay([flight.state.pop(name) for name in planned.taps])
        self._started += 1
        self.ran["planned"] += 1
        # Megatron may free the result's memory as soon as it is sent.
        return flight, flight.state.pop(planned.out).detach()

    def ask_backward(
        self, planned: Planned, flight: Flight, tangent: Tensor
    ) -> list[Tensor | None]:
        """B, now or merged with the next forward; gradients of the call's tensors."""
        asked = Backward(planned, flight, tangent, self._scales() if planned.scales else [])
        follows = self._started < self._microbatches and self._started == self._ended + 1
        if follows and self._may_wait(planned):
            self._pending = asked
            return [None for _ in planned.gradients]
        self._run_pending()
        asked.begin()
        flight.run("B")
        self._ended += 1
        return [flight.state.pop(name, None) if name else None for name in planned.gradients]

    def _may_wait(self, planned: Planned) -> bool:
        merges = self._alternating and planned.program.merged is not None
        return merges and not any(planned.gradients)

    def _run_pending(self) -> None:
        """A backward that was laid by, alone."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.begin()
            with not_last(self.ddp):
                pending.flight.run("B")
            self._ended += 1


def _state_of(module: Any) -> Any:
    """What a trace depends on beside the arguments: modes, what is trained, the configuration."""
    config = module.config
    values = [getattr(config, f.name, None) for f in fields(config)] if is_dataclass(config) else []
    plain = [repr(v) for v in values if isinstance(v, (*_PLAIN, list, tuple))]
    modes = tuple(each.training for each in module.modules())
    trained = tuple(each.requires_grad for each in module.parameters())
    return tuple(plain), modes, trained


def _described(captured: Captured) -> Joint:
    """The joint graph of a capture of a module: inputs are parameters, buffers, arguments."""
    inputs = primal_nodes(captured.joint)
    output = captured.joint.graph.find_nodes(op="output")[0]
    count = captured.num_fwd_outputs
    gradients = output.args[0][count:]
    placeholders = captured.joint.graph.find_nodes(op="placeholder")
    tangents = {n.name: n.meta.get("desc") for n in placeholders if n not in inputs}
    if len(tangents) != 1:
        raise CaptureError(
            f"{len(tangents)} results of forward require a gradient, expected one: its output"
        )
    return Joint(
        captured,
        tuple(node.name for node in inputs),
        tuple(range(len(inputs))),
        {
            node.name: Leaf(place)
            for place, (node, gradient) in enumerate(zip(inputs, gradients, strict=True))
            if is_gradient(gradient)
        },
        tangents,
        {f"result{i}": output.meta["desc"][i] for i in range(count)},
        (),
    )


def _results(joint: Joint) -> tuple[list[str], tuple[tuple[str, int], ...]]:
    """Names of results that the chunk returns, in order, and of those that buffers become."""
    descs = [node.meta.get("desc") for node in primal_nodes(joint.captured.joint)]
    plain: dict[int, str] = {}
    changed = []
    for name, desc in joint.results.items():
        if isinstance(desc, descriptors.PlainAOTOutput):
            plain[desc.idx] = name
        elif isinstance(desc, descriptors.InputMutationAOTOutput):
            changed.append((name, descs.index(desc.mutated_input)))
        else:
            raise CaptureError(f"forward gives {desc}, expected tensors of their own")
    return [plain[i] for i in sorted(plain)], tuple(changed)
