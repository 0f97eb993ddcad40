"""`Chunk` runs a model chunk of this rank, from tokens to the loss of each token, by a plan.

It replaces the model's innermost `forward` while Megatron runs a step. The first call captures and
plans the chunk. Each call runs its planned forward, and returns a result whose backward is the
planned one. Where forwards and backwards strictly alternate, a backward that Megatron asks for is
deferred and runs merged with the next forward; the last one runs at once. In a pipeline parts of a
backward are deferred until Megatron waits for another stage.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overlapc.errors import CaptureError, OverlapcError
from overlapc.megatron import tracing
from overlapc.megatron.gradients import as_then, gathered, reduces
from overlapc.megatron.planned import Call, Planned, Whole, emitted, traced
from overlapc.megatron.recompute import own_plan
from overlapc.megatron.refused import foreign_hooks
from overlapc.megatron.state import modes_of, state_of, tensors_of
from overlapc.megatron.waits import Waits, apart
from overlapc.passes.parts import parameter_gradients
from overlapc.passes.trace import Captured
from overlapc.planning.carried import actions_of, carried
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep, tangent_bytes
from overlapc.planning.report import Report
from overlapc.planning.road import plan
from overlapc.runtime.exchange import busy
from overlapc.runtime.program import Flight, State
from overlapc.runtime.ranks import exchange_of, ranks_of, together
from overlapc.runtime.train_step import adding

if TYPE_CHECKING:
    from overlapc.runtime.exchange import Exchange

_OUT_OF_ORDER = (
    "a step of Megatron ended, and a backward that was laid by did not run; expected one forward "
    "and one backward of each microbatch: pass merge=False"
)
_STATES = 16  # Python states of the model, after which it runs plain


@dataclass(frozen=True)
class Step:
    """What a chunk knows of the step that begins."""

    ranks: Sequence[int]  # ranks that run the same chunk
    peers: Sequence[int]  # those that run it on the same microbatches
    microbatches: int
    in_flight: int  # microbatches held at a time
    lag: int  # a backward may merge with the forward so many microbatches later; 0: none
    hands: bool  # Megatron takes gradients of the stage's inputs by `gradient_of`
    first: bool  # is it the pipeline's first stage?
    waits: Waits | None  # set in a pipeline


@dataclass(frozen=True)
class Agreed:
    """The plan of all ranks that run the same chunk, for the shapes of the first rank's
    microbatch."""

    planned: Planned
    shapes: Any
    actions: Mapping[str, str]  # of a pipeline: what may run early or late

    @property
    def report(self) -> Report:
        return self.planned.program.report

    @property
    def gradients(self) -> Mapping[str, Sequence[str]]:
        return parameter_gradients(self.planned.program.joint.captured)


@dataclass
class Backward:
    """A backward that Megatron has asked for."""

    planned: Planned
    flight: Flight
    tangent: Tensor
    scales: list[Tensor]  # as they are at the time of asking
    reduces: list[bool]  # whether its gradients let DDP reduce buckets

    def begin(self) -> None:
        state = self.flight.state
        state[self.planned.tangent] = self.tangent
        for name, scale in zip(self.planned.scales, self.scales, strict=True):
            if name in state:
                state[name] = scale


class _Run(torch.autograd.Function):
    """The autograd Function of the planned forward: its backward asks for the planned backward."""

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
    """One model chunk while Megatron is patched."""

    def __init__(self, module: nn.Module, ddp: Any, options: Options) -> None:
        self.module, self.ddp = module, ddp
        self.original: Callable[..., Any] = module.forward
        self.why_plain: list[str] = []
        # Counts: planned forwards, merged ones, plain ones; recompute and weight gradients that ran
        # while Megatron waited.
        self.ran = {"planned": 0, "merged": 0, "plain": 0, "early": 0, "late": 0}
        self._options = options
        self._planned: dict[Any, Planned | None] = {}
        self._reports: dict[Any, Report] = {}  # by digest and step
        # By the form of calls, without shapes; None: all ranks run these calls as plain Megatron.
        self._agreed: dict[Any, Agreed | None] = {}
        self._states: dict[Any, list[Any]] = {}  # states so far, and objects that must live as long
        # an input that makes results require a gradient
        self._anchor = torch.zeros((), requires_grad=True)
        self._pending: Backward | None
        self._flights: list[Flight] = []  # flights whose parts run apart, the oldest first
        self._step: Step

    def begin(self, step: Step) -> None:
        self._step = step
        self._started = self._ended = 0
        self._gradient: Tensor | None = None  # of the stage's input, made by a merged backward
        self._flights.clear()
        self._pending = None
        self._state, held = state_of(self.module)
        self._states.setdefault(self._state, held)
        self._attributes = tensors_of(self.module)
        self._lasting = [*self.module.parameters(), *self.module.buffers()]

    def gradient_of(self, given: Tensor) -> Tensor | None:
        """The gradient of the stage's input that the last backward made."""
        found, self._gradient = self._gradient, None
        return given.grad if found is None else found

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            raise OverlapcError(_OUT_OF_ORDER)

    def explain(self) -> str:
        reports = [each.report.explain() for each in self._agreed.values() if each]
        more = len([each for each in self._planned.values() if each]) - len(reports)
        reports += [f"{more} other shapes or states run by these plans"] if more else []
        plain = [f"{reason} (runs as plain Megatron)" for reason in self.why_plain]
        counts = ", ".join(f"{count} {kind}" for kind, count in self.ran.items())
        return "\n\n".join([f"ran: {counts}", *reports, *plain])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the model's `forward`."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        call = Call.of(self.module, self._scales(), self._attributes, args, kwargs)
        step = self._step.lag, self._step.in_flight
        form = call.form(), self._state, modes_of(self.module), step
        key = form, call.shapes()
        if key not in self._planned:
            self._planned[key] = self._prepare(call, form)
        planned = self._planned[key]
        if planned is None:
            self._run_pending()
            self.ran["plain"] += 1
            return self.original(*args, **kwargs)
        gathered(self.ddp)
        return _Run.apply(self, planned, call, self._anchor, *call.tensors)

    def _scales(self) -> list[Tensor]:
        """The current factors of auxiliary losses in the backward. (Before the first forward they
        are not set.)"""
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

    def _prepare(self, call: Call, form: Any) -> Planned | None:
        """Return what runs calls of these shapes, by the plan of all ranks that run this chunk;
        None on all of them if one cannot capture it."""
        if form not in self._agreed:
            self._agreed[form] = self._agree(call)
        agreed = self._agreed[form]
        if agreed is None or agreed.shapes == call.shapes():
            return None if agreed is None else agreed.planned
        made = self._carried(agreed, call)
        if made is None:  # it needs a new plan, which all ranks must make together
            other = self._agree(call)
            if other is not None and other.shapes != call.shapes():
                raise OverlapcError(
                    f"microbatches of shapes {call.shapes()} and {other.shapes} came to ranks that "
                    "run the same chunk, and their graphs differ too much to run by one plan; "
                    "expected one shape: pad microbatches"
                )
            made = None if other is None else other.planned
        return made

    def _agree(self, call: Call) -> Agreed | None:
        """Plan together with all ranks that run this chunk, for the shapes of the first rank."""
        made: Planned | CaptureError
        try:
            with exchange_of(self._step.ranks, self._options.timeout_s) as exchange:
                call = _of_the_first(call, exchange)
                whole = Whole(self.module, self.original, call)
                captured = together(exchange, "captured", self._captured(whole, call))
                again = captured.trace.digest, self._step.lag, self._step.in_flight
                if again not in self._reports:
                    self._reports[again] = self._plan(captured, call, exchange)
                report = self._reports[again]
                actions: Mapping[str, str] = {}
                if self._step.waits is not None:
                    actions = apart(report.problem, report.plan, self._step.first)
                try:
                    made = emitted(captured, report, whole, call, self._lasting, self.ddp, actions)
                except CaptureError as error:
                    made = error
                return Agreed(together(exchange, "emitted", made), call.shapes(), actions)
        except CaptureError as error:
            if str(error) not in self.why_plain:
                self.why_plain.append(str(error))
                warnings.warn(
                    f"overlapc runs a model chunk as plain Megatron: {error}",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return None

    def _captured(self, whole: Whole, call: Call) -> Captured | CaptureError:
        try:
            self._refuse()
            with busy("tracing"):
                return traced(whole, call, self.ddp)
        except CaptureError as error:
            return error

    def _carried(self, agreed: Agreed, call: Call) -> Planned | None:
        """Return what runs a call of other shapes by the agreed plan. The ranks of the same
        microbatches decide together whether that is possible; other ranks may have the plan's own
        shapes now, and do not wait."""
        made, digest = None, b""
        whole = Whole(self.module, self.original, call)
        found = self._captured(whole, call)
        if isinstance(found, Captured):
            step, theirs = self._training_step(found, call), parameter_gradients(found)
            moved = carried(agreed.report, agreed.gradients, found.trace, step, theirs)
            if moved is not None and self._goes_with(agreed.report, moved[0]):
                actions = actions_of(*moved, agreed.actions)
                with contextlib.suppress(CaptureError):
                    made = emitted(found, moved[0], whole, call, self._lasting, self.ddp, actions)
                    digest = found.trace.digest.encode()
        with exchange_of(self._step.peers, self._options.timeout_s) as exchange:
            told = [digest] if exchange is None else exchange.gather("carried", digest)
        if made is None or set(told) != {digest}:
            return None
        self._warn_if_larger(agreed.report, made.program.report)
        return made

    def _goes_with(self, agreed: Report, moved: Report) -> bool:
        """Can other ranks run by the agreed plan while this rank runs by the carried one?"""
        apart = set(ranks_of(moved.problem.trace.lanes)) - set(self._step.peers)
        orders = [each.merged and each.merged.plan.order for each in (agreed, moved)]
        return not apart or orders[0] == orders[1]

    def _warn_if_larger(self, agreed: Report, moved: Report) -> None:
        budget = agreed.problem.budget_bytes or 0
        if isinstance(self._options.memory_budget, float) or moved.peak_bytes <= budget:
            return
        if self._options.memory_budget is not None:
            warnings.warn(
                f"overlapc: a microbatch of another shape takes {moved.peak_bytes:,} bytes by the "
                f"plan of the first one, the budget is {budget:,}; expected the largest first: "
                "call overlapc.megatron.patch() again when shapes grow",
                RuntimeWarning,
                stacklevel=5,
            )

    def _refuse(self) -> None:
        """Refuse a chunk with state that a trace would miss or freeze: it stays Megatron's."""
        if hook := next(foreign_hooks(self.module), ""):
            raise CaptureError(f"it has a hook that is not Megatron's: {hook}")
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            raise CaptureError("it is called under torch.autocast, expected Megatron's own bf16")
        if len(self._states) > _STATES:
            raise CaptureError(
                f"attributes of its modules had {len(self._states)} states, expected at most "
                f"{_STATES}: each is planned anew"
            )

    def _plan(self, captured: Captured, call: Call, exchange: Exchange | None) -> Report:
        step = self._training_step(captured, call)
        primals = [*self._lasting, *call.tensors]
        own = own_plan(captured)
        planned = plan(captured, self._options, step, primals=primals, exchange=exchange, own=own)
        return planned.report

    def _training_step(self, captured: Captured, call: Call) -> TrainingStep:
        # without collectives merging gains nothing
        lag = self._step.lag if captured.trace.lanes else 0
        return TrainingStep(
            "one microbatch",
            max(self._step.microbatches, 2 * lag),
            lag,
            in_flight=self._step.in_flight,
            beside_bytes=self._beside(captured, call),
            gradients=tuple(parameter_gradients(captured)),
            add_ns_per_kib=adding(self.module, self._options),
            sums=self.ddp is None,  # DDP has allocated the sums
        )

    def _beside(self, captured: Captured, call: Call) -> int:
        """Bytes that Megatron holds for microbatches in flight under any plan: a stage's inputs,
        and its results unless they are freed when they are sent."""
        given = call.tensors[0].nbytes if call.has_input else 0
        freed = getattr(self.module.config, "deallocate_pipeline_outputs", False)
        return self._step.in_flight * (given + (0 if freed else tangent_bytes(captured.trace)))

    # Running

    def run_forward(self, planned: Planned, call: Call) -> tuple[Flight, Tensor]:
        """Run F, merged with a deferred backward, if there is one."""
        before, self._pending = self._pending, None
        flat = [*self._lasting, *call.tensors]
        state: State = dict(zip(planned.program.joint.inputs, flat, strict=True))
        state |= planned.owners
        with torch.no_grad(), torch._C._DisableAutocast():  # casts are in the graph
            if before is None:
                flight = planned.program.begin(state)
            else:
                before.begin()
                with as_then(self.ddp, before.reduces):
                    flight = planned.program.begin(state, before.flight)
                self._ended += 1
                self.ran["merged"] += 1
                self._gradient = _handed(before)
            for name, place in planned.changed:
                flat[place].copy_(flight.state.pop(name))
            planned.log.replay([flight.state.pop(name) for name in planned.taps])
        self._started += 1
        self.ran["planned"] += 1
        if planned.apart:
            self._flights.append(flight)
        # Megatron may free the result's memory as soon as it is sent.
        return flight, flight.state.pop(planned.out).detach()

    def ask_backward(
        self, planned: Planned, flight: Flight, tangent: Tensor
    ) -> list[Tensor | None]:
        """Run B now, or defer it to the next forward; return gradients of the call's tensors."""
        scales = self._scales() if planned.scales else []
        asked = Backward(planned, flight, tangent, scales, reduces(self.ddp))
        if self._may_wait(planned):
            self._pending = asked
            return [None for _ in planned.gradients]
        self._run_pending()
        asked.begin()
        if planned.apart and self._step.waits is not None:
            self._flights = [each for each in self._flights if each is not flight]
            flight.run("I")
            self._step.waits.later(partial(self._weights, asked))
        else:
            flight.run("B")
        self._ended += 1
        return [flight.state.pop(name, None) if name else None for name in planned.gradients]

    def again(self) -> None:
        """Run R of the microbatch whose gradient Megatron waits for."""
        for flight in self._flights[:1]:
            if not flight.again:
                flight.run("R")
                self.ran["early"] += 1

    def _weights(self, asked: Backward) -> None:
        """Run a deferred W."""
        with as_then(self.ddp, asked.reduces):
            asked.flight.run("W")
        self.ran["late"] += 1

    def _may_wait(self, planned: Planned) -> bool:
        """Does a forward follow with which a backward can run?"""
        follows = self._started < self._step.microbatches
        in_order = self._started == self._ended + self._step.lag
        merges = self._step.lag and planned.program.merged is not None
        return bool(merges and follows and in_order) and (
            self._step.hands or not any(planned.gradients)
        )

    def _run_pending(self) -> None:
        """Run a deferred backward alone."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.begin()
            with as_then(self.ddp, pending.reduces):
                pending.flight.run("B")
            self._ended += 1
            self._gradient = _handed(pending)


def _of_the_first(call: Call, exchange: Exchange | None) -> Call:
    """Return the call with the shapes of the first rank."""
    if exchange is None:
        return call
    told = json.loads(exchange.broadcast("shapes", lambda: json.dumps(call.shapes())))
    return call.shaped({place: shape for place, shape in told})


def _handed(ran: Backward) -> Tensor | None:
    names = [name for name in ran.planned.gradients if name]
    gradient: Tensor | None = ran.flight.state.pop(names[0], None) if names else None
    return gradient
