"""`Planning` makes the plans of a chunk, together with all ranks that run the same chunk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overlapc.core.errors import CaptureError, Infeasible, OptionError, OverlapcError
from overlapc.megatron import changes
from overlapc.megatron.gradients import gathered
from overlapc.megatron.planned import (
    ChunkCall,
    Planned,
    WholeChunk,
    emitted,
    refuse_used_before,
    traced,
    used_before,
)
from overlapc.megatron.recompute import own_plan
from overlapc.megatron.refused import foreign_hooks
from overlapc.megatron.slices import Cut
from overlapc.megatron.waits import apart
from overlapc.passes.emit.parts import parameter_gradients
from overlapc.passes.opaque.op import adds_weights, explained
from overlapc.passes.opaque.unchanged import SETS
from overlapc.passes.trace import Captured
from overlapc.planning.carried import actions_of, carried
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep, tangent_bytes
from overlapc.planning.report import Report
from overlapc.planning.road import plan
from overlapc.ranks.exchange import busy
from overlapc.ranks.groups import exchange_of, ranks_of, together
from overlapc.runtime.train_step import adding
from overlapc.state.described import State, changed_between
from overlapc.tools.collecting import of_young_alone
from overlapc.tools.told import Told, warn

if TYPE_CHECKING:
    from overlapc.ranks.exchange import Exchange

_STATES = 16  # Python states of the model, after which it runs plain


@dataclass(frozen=True)
class ChunkStep:
    """What a chunk knows of the step that begins."""

    ranks: Sequence[int]  # ranks that run the same chunk
    peers: Sequence[int]  # those that run it on the same microbatches
    microbatches: int
    in_flight: int  # microbatches held at a time
    lag: int  # a backward may merge with the forward so many microbatches later; 0: none
    hands: bool  # Megatron takes gradients of the stage's inputs by `gradient_of`
    first: bool  # is it the pipeline's first stage?
    fills: bool  # recompute and weight gradients run where Megatron waits for other stages
    slices: tuple[int, ...] = (1,)  # how many slices of a microbatch may run; the fastest do
    batch: int | None = None  # how many samples a microbatch has, if Megatron says so
    begins: bool = False  # is it the first of its models?
    refuse: Callable[[OptionError], None] = lambda _: None  # tells all ranks, in a later step


@dataclass(frozen=True)
class ChunkPlans:
    """The plan of all ranks that run the same chunk, for the shapes of the first rank's
    microbatch."""

    planned: Planned
    shapes: Any
    actions: Mapping[str, str]  # of a pipeline: what may run early or late
    opaque: Sequence[str]  # what runs as one op each

    @property
    def report(self) -> Report:
        return self.planned.program.report

    @property
    def gradients(self) -> Mapping[str, Sequence[str]]:
        return parameter_gradients(self.planned.program.joint.captured)


class Planning:
    """The plans of one model chunk. `step` is the step that runs, `original` the model's own
    `forward`, `lasting` are parameters and buffers."""

    def __init__(self, module: nn.Module, ddp: Any, options: Options) -> None:
        self.module, self.ddp = module, ddp
        self.why_plain = Told()
        self.reasons: dict[Any, str] = {}  # why calls of a form run plain
        self.settles = False  # is the call that failed to be tried again, after a plain one?
        self.settled = ""  # what had to settle so
        self._may_settle = True  # once
        self.said: dict[int, str] = {}  # what was found of each number of slices
        # By the form of calls, without shapes; None: all ranks run these calls as plain Megatron.
        self.agreed: dict[Any, ChunkPlans | None] = {}
        # States so far: each by itself, with the objects that must live as long.
        self.states: dict[State, tuple[State, list[Any]]] = {}
        self.step: ChunkStep
        self.original: Callable[..., Any]
        self.lasting: Sequence[Tensor] = ()
        self._options = options
        self._reports: dict[Any, Report] = {}  # by digest and step

    def prepare(self, call: ChunkCall, form: Any) -> Planned | None:
        """Return what runs calls of these shapes, by the plan of all ranks that run this chunk;
        None on all of them if one cannot capture it. It `settles`: the first that could not be
        captured because a module sets an attribute, as some do in their first forward alone."""
        self.settles = False
        if form not in self.agreed:
            agreed = self._agree(call, form)
            if self.settles:
                return None
            self.agreed[form] = agreed
        agreed = self.agreed[form]
        if agreed is None or agreed.shapes == call.shapes():
            return None if agreed is None else agreed.planned
        if agreed.planned.slices > 1:
            raise OptionError(
                f"slices={agreed.planned.slices}: found microbatches of shapes {agreed.shapes} and "
                f"{call.shapes()}; expected one shape: pad microbatches, or leave slices out"
            )
        made = self._carried(agreed, call)
        if made is None:  # it needs a new plan, which all ranks must make together
            other = self._agree(call, form)
            if other is not None and other.shapes != call.shapes():
                raise OverlapcError(
                    f"microbatches of shapes {call.shapes()} and {other.shapes} came to ranks that "
                    "run the same chunk, and their graphs differ too much to run by one plan; "
                    "expected one shape: pad microbatches"
                )
            made = None if other is None else other.planned
        return made

    def _agree(self, call: ChunkCall, form: Any) -> ChunkPlans | None:
        """Plan together with all ranks that run this chunk, for the shapes of the first rank."""
        try:
            with (
                of_young_alone(),
                exchange_of(self.step.ranks, self._options.timeout_s) as exchange,
            ):
                return self._fastest(_of_the_first(call, exchange), exchange)
        except CaptureError as error:
            # All ranks read the same words.
            if self._may_settle and any(words in str(error) for words in (SETS, changes.SETS)):
                self._may_settle, self.settles, self.settled = False, True, str(error)
                return None
            self.settled = ""
            self.reasons[form] = str(error)
            self.why_plain.tell(
                str(error), f"overlapc runs a model chunk as plain Megatron: {error}"
            )
            return None

    def _fastest(self, call: ChunkCall, exchange: Exchange | None) -> ChunkPlans:
        """The plan with which a microbatch is predicted to take the least time: whole, or in
        slices."""
        found: list[ChunkPlans] = []
        whole, captured = self._traced("captured", call, exchange)
        for count in self.step.slices if captured.trace.lanes else self.step.slices[:1]:
            try:
                found.append(self._made(count, whole, captured, call, exchange))
            except (Infeasible, OptionError) as error:
                if len(self.step.slices) == 1:
                    raise
                self.said[count] = str(error)
        if not found:
            raise OptionError("; ".join(self.said.values()))
        return min(found, key=lambda each: each.report.step_ns / each.report.microbatches)

    def _made(
        self,
        count: int,
        whole: WholeChunk,
        captured: Captured,
        call: ChunkCall,
        exchange: Exchange | None,
    ) -> ChunkPlans:
        """Plan a call in so many slices."""
        primals, cut = [*self.lasting, *call.tensors], None
        if count > 1:
            if adds_weights(captured.joint.graph):
                raise OptionError(
                    f"slices={count}: kernels of Transformer Engine add weight gradients to "
                    "main_grad, where a slice cannot be compared with the whole; expected "
                    "--no-gradient-accumulation-fusion, or slices left out"
                )
            if whole.returned.count != 1:
                raise OptionError(
                    f"slices={count}: forward returns {whole.returned.count} tensors, expected "
                    "one: leave slices out"
                )
            cut = Cut.of(self.module, call, self.step.batch, count)
            first, uncut = cut.slice(0), captured
            whole, captured = self._traced("captured in slices", first, exchange)
            gathered(self.ddp)
            with busy("comparing slices"):
                cut.compare(captured, uncut, self.lasting, whole.taps.names, exchange)
            self.said[count] = str(cut.compared)
            primals = [*self.lasting, *first.tensors]
        step = self._training_step(captured, call, cut)
        again = captured.trace.digest, step.lag, step.in_flight, count
        if again not in self._reports:
            own = own_plan(captured)
            made = plan(captured, self._options, step, primals=primals, exchange=exchange, own=own)
            self._reports[again] = made.report
        report = self._reports[again]
        actions: Mapping[str, str] = {}
        if self.step.fills:
            actions = apart(report.problem, report.plan, self.step.first)
        found: Planned | CaptureError
        try:
            if cut is None:
                found = emitted(captured, report, whole, call, self.lasting, self.ddp, actions)
            else:
                found = cut.emitted(captured, report, whole, self.lasting, self.ddp, actions)
                refuse_used_before(used_before(call, found.owners), found.owners)
        except CaptureError as error:
            found = error
        planned = together(exchange, "emitted", found)
        return ChunkPlans(planned, call.shapes(), actions, explained(captured.joint.graph))

    def _traced(
        self, what: str, call: ChunkCall, exchange: Exchange | None
    ) -> tuple[WholeChunk, Captured]:
        whole = WholeChunk(self.module, self.original, call)
        return whole, together(exchange, what, self._captured(whole, call))

    def _captured(self, whole: WholeChunk, call: ChunkCall) -> Captured | CaptureError:
        try:
            self._refuse()
            with busy("tracing"):
                return traced(whole, call, self.ddp)
        except CaptureError as error:
            named = type(self.module).__name__
            return CaptureError(error.reason.replace(WholeChunk.__name__, named), error.place)

    def _carried(self, agreed: ChunkPlans, call: ChunkCall) -> Planned | None:
        """Return what runs a call of other shapes by the agreed plan. The ranks of the same
        microbatches decide together whether that is possible; other ranks may have the plan's own
        shapes now, and do not wait."""
        made, digest = None, b""
        whole = WholeChunk(self.module, self.original, call)
        found = self._captured(whole, call)
        if isinstance(found, Captured):
            step, theirs = self._training_step(found, call), parameter_gradients(found)
            moved = carried(agreed.report, agreed.gradients, found.trace, step, theirs)
            if moved is not None and self._goes_with(agreed.report, moved[0]):
                actions = actions_of(*moved, agreed.actions)
                with contextlib.suppress(CaptureError):
                    made = emitted(found, moved[0], whole, call, self.lasting, self.ddp, actions)
                    digest = found.trace.digest.encode()
        with exchange_of(self.step.peers, self._options.timeout_s) as exchange:
            told = [digest] if exchange is None else exchange.gather("carried", digest)
        if made is None or set(told) != {digest}:
            return None
        self._warn_if_larger(agreed.report, made.program.report)
        return made

    def _goes_with(self, agreed: Report, moved: Report) -> bool:
        """Can other ranks run by the agreed plan while this rank runs by the carried one?"""
        apart = set(ranks_of(moved.problem.trace.groups)) - set(self.step.peers)
        orders = [each.merged and each.merged.plan.order for each in (agreed, moved)]
        return not apart or orders[0] == orders[1]

    def joins_others(self) -> bool:
        """Do plans have collectives with ranks of other microbatches?"""
        reports = [agreed.report for agreed in self.agreed.values() if agreed is not None]
        ranks = {rank for report in reports for rank in ranks_of(report.problem.trace.groups)}
        return bool(ranks - set(self.step.peers))

    def _warn_if_larger(self, agreed: Report, moved: Report) -> None:
        budget = agreed.problem.budget_bytes or 0
        if isinstance(self._options.memory_budget, float) or moved.peak_bytes <= budget:
            return
        if self._options.memory_budget is not None:
            warn(
                f"overlapc: a microbatch of another shape takes {moved.peak_bytes:,} bytes by the "
                f"plan of the first one, the budget is {budget:,}; expected the largest first: "
                "call overlapc.megatron.patch() again when shapes grow"
            )

    def _refuse(self) -> None:
        """Refuse a chunk with state that a trace would miss or freeze: it stays Megatron's."""
        if hook := next(foreign_hooks(self.module), ""):
            raise CaptureError(f"it has a hook that is not Megatron's: {hook}")
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            raise CaptureError("it is called under torch.autocast, expected Megatron's own bf16")
        if len({form[0] for form in self.agreed}) > _STATES:
            raise CaptureError(
                f"the arguments of its forward had more than {_STATES} forms, of which each is "
                "traced anew; expected a tensor in the place of a number that changes with each "
                "microbatch"
            )
        if len(self.states) > _STATES:
            names = changed_between(*list(self.states)[-2:]) or ["its modules or hooks"]
            raise CaptureError(
                f"attributes of its modules had more than {_STATES} states (last changed: "
                f"{', '.join(names[:3])}), of which each is traced anew; expected what changes "
                "with each step in a tensor, or outside of the model's modules"
            )

    def _training_step(
        self, captured: Captured, call: ChunkCall, cut: Cut | None = None
    ) -> TrainingStep:
        # without collectives merging gains nothing, and slices are not merged
        lag = self.step.lag if captured.trace.lanes and cut is None else 0
        count = 1 if cut is None else cut.count
        return TrainingStep(
            "one microbatch" + (f" in {count} slices" if cut else ""),
            max(self.step.microbatches, 2 * lag),
            lag,
            in_flight=self.step.in_flight,
            beside_bytes=self._beside(captured, call, count),
            gradients=tuple(parameter_gradients(captured)),
            add_ns_per_kib=adding(self.module, self._options),
            sums=self.ddp is None,  # DDP has allocated the sums
            slices=count,
            draws=() if cut is None else tuple(cut.draws),
            loss=cut is None,
        )

    def _beside(self, captured: Captured, call: ChunkCall, count: int) -> int:
        """Bytes that Megatron holds for microbatches in flight under any plan: a stage's inputs,
        and its results unless they are freed when they are sent. (The slices of an input are
        copies.)"""
        given = call.tensors[0].nbytes * min(count, 2) if call.has_input else 0
        freed = getattr(self.module.config, "deallocate_pipeline_outputs", False)
        out = count * tangent_bytes(captured.trace)
        return self.step.in_flight * (given + (0 if freed else out))


def _of_the_first(call: ChunkCall, exchange: Exchange | None) -> ChunkCall:
    """Return the call with the shapes of the first rank."""
    if exchange is None:
        return call
    told = json.loads(exchange.broadcast("shapes", lambda: json.dumps(call.shapes())))
    return call.shaped({place: shape for place, shape in told})
