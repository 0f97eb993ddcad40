"""`Chunk` runs a model chunk of this rank, from tokens to the loss of each token, by a plan.

It replaces the model's innermost `forward` while Megatron runs a step. The first call captures and
plans the chunk. Each call runs its planned forward, and returns a result whose backward is the
planned one. Where forwards and backwards strictly alternate, a backward that Megatron asks for is
deferred and runs merged with the next forward; the last one runs at once. In a pipeline parts of a
backward are deferred until Megatron waits for another stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from overlapc.core.errors import OptionError, OverlapcError
from overlapc.megatron import tracing
from overlapc.megatron.gradients import as_then, gathered, reduces
from overlapc.megatron.planned import ChunkCall, Planned
from overlapc.megatron.planning import ChunkStep, Planning
from overlapc.megatron.waits import Waits
from overlapc.planning.options import Options
from overlapc.runtime.program import Flight
from overlapc.state.described import (
    EACH_TIME,
    UNREAD,
    as_trained,
    forward_as,
    modes_of,
    settle,
    state_of,
    tensors_of,
    unplanned,
)
from overlapc.state.known import settled_by
from overlapc.state.module_state import Describer, members_of
from overlapc.tools.told import Told, warn

_OUT_OF_ORDER = (
    "a step of Megatron ended, and a backward that was laid by did not run; expected one forward "
    "and one backward of each microbatch: pass merge=False"
)
_LEFT_OUT = (
    "the loss leaves out a tensor that the model's forward returns: gradients would be zeros where "
    "Megatron has none; expected every result that requires a gradient in the loss: leave out the "
    "head that makes it (--bert-no-binary-head)"
)
_CHANGED = (
    "a parameter, buffer or constant of shape {} that a backward reads changed after its forward; "
    "expected the same until the backward has run, which may be beside a later forward: give the "
    "model what changes with each microbatch as an argument, or pass merge=False, fill=False"
)
_CACHED = (
    "forward runs as plain Megatron and has met a tensor of overlapc's trace, which it had put "
    "into a cache that overlapc does not know; expected a cache in a module of the script, or one "
    "that is filled before training: run a validation step first"
)
_SAMPLED, _SAMPLES = 2, 64  # steps in which values are compared, too; values of a tensor
_SEVERAL = (
    "overlapc: a model is called more than once for a microbatch; its gradients arrive in as many "
    "parts, so sums may differ from Megatron's in the last bits; expected one call: pass what it "
    "is called with as one batch, or call overlapc.megatron.unpatch()"
)
_AGAIN = (
    "a backward ran twice through a model's forward; expected once: call the model again, or call "
    "overlapc.megatron.unpatch()"
)
_IN_PART = (
    "torch.autograd.grad, or a backward with `inputs`, asks for some gradients of a model alone, "
    "and a planned backward makes all; expected loss.backward(): call overlapc.megatron.unpatch()"
)
_TWICE = (
    "a backward through a model is to be differentiated again (create_graph=True), which a plan "
    "is not; expected loss.backward(): call overlapc.megatron.unpatch()"
)
_ELSEWHERE = (
    "overlapc: a parameter of shape {} of a planned model is also used outside of its forward; its "
    "gradient arrives in two parts, so sums may differ from Megatron's in the last bits, and with "
    "gradient_accumulation_fusion Megatron may drop the other part; expected its use in the "
    "forward alone, or call overlapc.megatron.unpatch()"
)
_PLAIN = "overlapc runs a call of a model chunk as plain Megatron: {}"
_NEVER = (
    "overlapc: a step has not called a model's `forward`, so that it ran as plain Megatron; "
    "expected `model(...)` in the forward step, and no GPTModel.forward(model, ...)"
)


class Read(NamedTuple):
    """A tensor that a backward reads, and what tells whether it has changed."""

    tensor: Tensor
    version: int
    sample: Tensor | None  # of its values: writing past autograd, to `.data`, leaves the version

    @staticmethod
    def of(tensor: Tensor, samples: bool) -> Read:
        return Read(tensor, tensor._version, _sample(tensor).clone() if samples else None)

    @property
    def has_changed(self) -> bool:
        if self.tensor._version != self.version or self.sample is None:
            return self.tensor._version != self.version
        now = _sample(self.tensor)
        return not bool(((now == self.sample) | (now.isnan() & self.sample.isnan())).all())


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES)]


@dataclass
class Backward:
    """A backward that Megatron has asked for."""

    planned: Planned
    flight: Flight
    tangents: Sequence[Tensor]
    scales: list[Tensor]  # as they are at the time of asking
    reduces: list[bool]  # whether its gradients let DDP reduce buckets
    modes: Any  # `modes_of` the model, then
    read: list[Read]  # what lasts, as it was behind the forward

    def check(self) -> None:
        for each in self.read:
            if each.has_changed:
                raise OverlapcError(_CHANGED.format(tuple(each.tensor.shape)))

    def begin(self) -> None:
        self.check()
        self.planned.ask(self.flight, self.tangents, self.scales)


class _Run(torch.autograd.Function):
    """The autograd Function of the planned forward: its backward asks for the planned backward."""

    @staticmethod
    def forward(
        ctx: Any, chunk: Chunk, planned: Planned, call: ChunkCall, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.chunk, ctx.planned = chunk, planned
        ctx.flight, outs = chunk.run_forward(planned, call)
        ctx.read = chunk.versions(planned)
        named = zip(outs, planned.tangents, strict=True)
        ctx.mark_non_differentiable(*(out for out, name in named if not name))
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        anchor = ctx.next_functions[0][0]
        for found, said in (
            (torch.is_grad_enabled(), _TWICE),
            (not torch._C._will_engine_execute_node(anchor), _IN_PART),
            (ctx.flight is None, _AGAIN),
        ):
            if found:
                raise OverlapcError(said)
        flight, ctx.flight = ctx.flight, None
        named = zip(tangents, ctx.planned.tangents, strict=True)
        came = [tangent for tangent, name in named if name and tangent is not None]
        if len(came) < sum(map(bool, ctx.planned.tangents)):
            raise OverlapcError(_LEFT_OUT)
        ctx.chunk.warn_of_others(ctx.planned)
        gradients = ctx.chunk.ask_backward(ctx.planned, flight, came, ctx.read)
        return None, None, None, None, *gradients


class Chunk:
    """One model chunk while Megatron is patched."""

    def __init__(self, module: nn.Module, ddp: Any, options: Options, within: str = "") -> None:
        self.module, self.ddp = module, ddp
        self._within = within  # the model whose language model it is
        self.original: Callable[..., Any]
        self._begun = 0  # steps
        self._told = False  # that the model is called several times, or never
        self._told_others = False  # that a parameter is used past it
        self.refused: OptionError | None = None  # slices: raised when the step has ended
        # Counts: planned forwards, merged ones, plain ones; recompute and weight gradients that ran
        # while Megatron waited.
        self.ran = {"planned": 0, "merged": 0, "plain": 0, "early": 0, "late": 0}
        self._options = options
        self._planned: dict[Any, Planned | None] = {}
        self._plain_for: dict[str, int] = {}  # why calls ran plain, with the last step of each
        self._planning = Planning(module, ddp, options)
        # an input that makes results require a gradient
        self._anchor = torch.zeros((), requires_grad=True)
        self._scalers = tracing.scalers()
        self._pending: Backward | None
        # flights whose parts run apart, the oldest first
        self._flights: list[Flight] = []
        self._step: ChunkStep

    def begin(self, step: ChunkStep, waits: Waits | None) -> None:
        self._step, self._waits = step, waits
        self._begun += 1
        self._started = self._ended = 0
        self._gradient: Tensor | None = None  # of the stage's input, made by a merged backward
        self._flights.clear()
        self._pending = None
        self.original = self._planning.original = self.module.forward
        settle(self.module, _device(self.module))
        self._planning.step = step
        self._own = vars(self.module).get("forward")
        self._look()

    def _look(self) -> None:
        """Look at the state on which the chunk's graphs depend, as the script has it."""
        self._changed = False
        members = members_of(self.module)
        self._attributes = tensors_of(members)
        with forward_as(self.module, self._own):
            state, describer = state_of(members, self._attributes)
        self._state, _ = self._planning.states.setdefault(state, (state, describer.held))
        self._mutable = [*describer.mutable.values()]
        self._contents = self._said()
        alone = [places[0] for places in self._attributes if not places[1:]]
        self._places = {(id(owner), name) for owner, name in alone}
        self._inside = set(map(id, [*members.modules, *describer.others]))
        self._lasting = members.lasting
        self._planning.lasting = self._lasting

    def _said(self) -> list[Any]:
        """What is in the containers and configurations that its modules have: no attribute is set
        where one of these changes."""
        return [*map(Describer(UNREAD).said_of, self._mutable)]

    def notice(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute was set within a step. (A tensor in a known place is another input.)"""
        is_input = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        known = is_input and (id(vars(module)), name) in self._places
        read = name not in EACH_TIME and name not in settled_by(module)
        if id(module) in self._inside and read and not known:
            self._changed = True

    @property
    def reports(self) -> list[Any]:
        return [each.report for each in self._planning.agreed.values() if each]

    @property
    def why_plain(self) -> Told:
        return self._planning.why_plain

    def gradient_of(self, given: Tensor) -> Tensor | None:
        """The gradient of the stage's input that the last backward made."""
        found, self._gradient = self._gradient, None
        return given.grad if found is None else found

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            raise OverlapcError(_OUT_OF_ORDER)
        told = _SEVERAL if self._started > self._step.microbatches else ""
        told = told or ("" if self._started else _NEVER)
        if told and not self._told:
            self._told = True
            warn(told)

    def explain(self) -> str:
        agreed, said = self._planning.agreed.values(), self._planning.said
        each_said = ("\n".join([each.report.explain(), *each.opaque]) for each in agreed if each)
        reports = [*dict.fromkeys(each_said)]
        more = len([each for each in self._planned.values() if each]) - len(reports)
        reports += [f"{more} other shapes or states run by these plans"] if more else []
        reports += [f"{count} slices: {what}" for count, what in sorted(said.items())]
        plain = [f"{reason} ({self._how_plain(reason)})" for reason in self.why_plain]
        if self._planning.settled:
            plain.append(
                f"{self._planning.settled} (one call ran as plain Megatron, to settle that)"
            )
        counts = ", ".join(f"{count} {kind}" for kind, count in self.ran.items())
        if self._within and reports:
            plain.append(
                f"planned is the language model of a {self._within}; what runs before it runs as "
                "plain Megatron"
            )
        return "\n\n".join([f"ran: {counts}", *reports, *plain])

    def _how_plain(self, reason: str) -> str:
        last = self._plain_for.get(reason, self._begun)
        if last == self._begun:
            return "runs as plain Megatron"
        return f"ran as plain Megatron up to step {last}, planned since"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the model's `forward`."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        members = members_of(self.module)
        why = unplanned(members)
        if why is not None:
            self.why_plain.tell(why, _PLAIN.format(why))
            self._plain_for[why] = self._begun
            return self._plainly(args, kwargs)
        same = [*map(id, members.lasting)] == [*map(id, self._lasting)]
        if self._changed or not same or self._said() != self._contents:
            self._look()
        call = ChunkCall.of(self.module, self._scales(), self._attributes, args, kwargs)
        step = self._step.lag, self._step.in_flight
        modes = modes_of(members)
        if self._pending is not None and self._pending.modes != modes:
            with as_trained(members.parameters, self._pending.modes):
                self._run_pending()
        scales = [each.main_loss_backward_scale for each in self._scalers]
        numbers = tuple(each for each in scales if isinstance(each, (int, float)))
        form = call.form(), self._state, (modes, numbers), step
        key = form, call.shapes()
        if key not in self._planned:
            try:
                planned = self._planning.prepare(call, form)
                if self._planning.settles:
                    return self._settled(args, kwargs)
                self._planned[key] = planned
            except OptionError as error:
                if self._step.slices == (1,):
                    raise
                self._planned[key], self.refused = None, error
                if not self._step.begins:  # others may have nothing to refuse
                    self._step.refuse(error)
                    if self._planning.joins_others():
                        raise  # as plain Megatron it would issue other collectives than they do
        planned = self._planned[key]
        if planned is None:
            self._plain_for[self._planning.reasons.get(form, "")] = self._begun
            return self._plainly(args, kwargs)
        self._changed = False  # by tracing
        gathered(self.ddp)
        outs = _Run.apply(self, planned, call, self._anchor, *call.tensors)
        return planned.returned.made(outs)

    def _settled(self, args: Any, kwargs: Any) -> Any:
        """Run a call as plain Megatron in which a module sets what it has from then on."""
        out = self._plainly(args, kwargs)
        self._changed = True
        return out

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        self._run_pending()
        self.ran["plain"] += 1
        self._started += 1  # its backward comes before that of any forward that follows it
        self._ended += 1
        try:
            out = self.original(*args, **kwargs)
        except RuntimeError as error:
            if "FunctionalTensor" in str(error):
                raise OverlapcError(_CACHED) from error
            raise
        self._changed = False  # by `forward`, for which it is plain
        return out

    def _scales(self) -> dict[Any, Tensor]:
        """The current factors of auxiliary losses in the backward, by class. (Before the first
        forward they are not set, or on the CPU.)"""
        found = {each: each.main_loss_backward_scale for each in self._scalers}
        device = _device(self.module)
        return {
            each: torch.ones(1, device=device)
            if scale is None
            else scale.detach().clone().view(1).to(device, non_blocking=True)
            for each, scale in found.items()
            if not isinstance(scale, (int, float))
        }

    def run_forward(self, planned: Planned, call: ChunkCall) -> tuple[Flight, list[Tensor]]:
        """Run F, merged with a deferred backward, if there is one."""
        before, self._pending = self._pending, None
        flat = [*self._lasting, *call.tensors]
        with torch.no_grad(), torch._C._DisableAutocast():  # casts are in the graph
            if before is None:
                flight, outs = planned.begin(flat)
            else:
                before.begin()
                with as_then(self.ddp, before.reduces):
                    flight, outs = planned.begin(flat, before.flight)
                self._ended += 1
                self.ran["merged"] += 1
                self._gradient = _handed(before)
        self._started += 1
        self.ran["planned"] += 1
        if planned.apart:
            self._flights.append(flight)
        return flight, outs

    def versions(self, planned: Planned) -> list[Read]:
        """Parameters, buffers and constants that the backward reads, with their versions; in the
        first steps with samples of their values."""
        read = [self._lasting[place] for place in planned.lasting] + list(planned.constants)
        samples = self._begun <= _SAMPLED and bool(self._step.lag or planned.apart)
        return [Read.of(each, samples) for each in read if not each.is_inference()]

    def warn_of_others(self, planned: Planned) -> None:
        """Warn, in the first steps, of a parameter that this backward also reaches past the
        chunk. (Its accumulation is a node of the backward then.)"""
        if self._begun > _SAMPLED or self._told_others:
            return
        for name, owner in planned.owners.items():
            with torch.enable_grad():
                node = get_gradient_edge(owner.tensor).node
            if name not in planned.shared and torch._C._will_engine_execute_node(node):
                self._told_others = True
                shape = tuple(owner.tensor.shape)
                warn(_ELSEWHERE.format(shape))
                return

    def ask_backward(
        self,
        planned: Planned,
        flight: Flight,
        tangents: Sequence[Tensor],
        read: list[Read],
    ) -> list[Tensor | None]:
        """Run B now, or defer it to the next forward; return gradients of the call's tensors."""
        scales = [*self._scales().values()]
        modes = modes_of(members_of(self.module))
        asked = Backward(planned, flight, tangents, scales, reduces(self.ddp), modes, read)
        if self._may_wait(planned):
            self._pending = asked
            return [None for _ in planned.gradients]
        self._run_pending()
        asked.begin()
        if planned.apart and self._waits is not None:
            self._flights = [each for each in self._flights if each is not flight]
            flight.run("I")
            self._waits.later(partial(self._weights, asked))
        else:
            flight.run("B")
        self._ended += 1
        return planned.handed(flight)

    def again(self) -> None:
        """Run R of the microbatch whose gradient Megatron waits for."""
        for flight in self._flights[:1]:
            if not flight.again:
                flight.run("R")
                self.ran["early"] += 1

    def _weights(self, asked: Backward) -> None:
        """Run a deferred W."""
        asked.check()
        with as_then(self.ddp, asked.reduces):
            asked.flight.run("W")
        self.ran["late"] += 1

    def _may_wait(self, planned: Planned) -> bool:
        """Does a forward follow with which a backward can run?"""
        follows = self._started < self._step.microbatches
        in_order = self._started == self._ended + self._step.lag
        merges = self._step.lag and planned.program.merged is not None
        gradients = planned.gradients
        if self._step.hands and not getattr(self.module, "pre_process", True):
            gradients = gradients[1:]  # Megatron takes that of the stage's input by `gradient_of`
        return bool(merges and follows and in_order and not planned.draws and not any(gradients))

    def _run_pending(self) -> None:
        """Run a deferred backward alone."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.begin()
            with as_then(self.ddp, pending.reduces):
                pending.flight.run("B")
            self._ended += 1
            self._gradient = _handed(pending)


def _device(module: nn.Module) -> torch.device:
    """Where the module is. (A stage of a pipeline may have no parameters.)"""
    first = next(module.parameters(), None)
    return torch.device(torch.cuda.current_device()) if first is None else first.device


def _handed(ran: Backward) -> Tensor | None:
    return next((each for each in ran.planned.handed(ran.flight) if each is not None), None)
