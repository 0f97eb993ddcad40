"""A training step of a pipeline: each rank runs its row of a schedule on the parts of its stages.

    pipeline = Pipeline({0: embed_and_blocks}, "1f1b", microbatches=8)       # on rank 0
    pipeline = Pipeline({1: blocks_and_head}, "1f1b", 8, loss=cross_entropy) # on rank 1
    losses = pipeline(inputs, targets)                                       # on both

What one stage makes for another rank is sent when it is there, while the rank goes on; what a
rank needs is asked for a few steps ahead. Whoever waits longer than `timeout_s`, or whose peer is
gone, raises a RankError that names the action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc.errors import InvalidSchedule, OptionError, RankError
from overlapc.passes.capture import capture, without_ties
from overlapc.passes.parts import Part, cut, parameter_gradients
from overlapc.planning import Options, StepReport, check_solver, plan_step, schedule_of
from overlapc.runtime.exchange import Exchange, busy
from overlapc.runtime.ranks import exchange_for
from overlapc.runtime.train_step import Inputs, adding
from overlapc.schedule import (
    Action,
    Schedule,
    Step,
    format_schedule,
    format_step,
    with_recompute,
)

_AHEAD = 4  # steps for which a rank asks in advance what it will need

Shape = tuple[tuple[int, ...], torch.dtype]


class Pipeline:
    """This rank's part of a pipeline. `stages` are its stages' modules by number; a stage takes
    one tensor and gives one, the first takes a microbatch's inputs.

    schedule        a Schedule, or the name of one: "gpipe", "1f1b", "interleaved", "zero-bubble",
                    "zero-bubble-v"; row n is what rank n of `group` does
    loss            loss(output, *targets), on the rank of the last stage; a number
    memory_budget   of each stage, for what it holds of all microbatches in flight
    recompute_early recompute is an action of its own, done while the gradient is on its way;
                    by default on stages that have no collectives of their own to hide it under
    timeout_s       how long to wait for another rank

    Calling it with the inputs and targets of all microbatches (each a tuple or a tensor; needed
    on the first and the last stage's rank) adds up gradients in `.grad`, in the order of
    microbatches, and returns the losses, on the last stage's rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule | str = "1f1b",
        microbatches: int = 1,
        loss: Callable[..., Tensor] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        memory_budget: int | float | str | None = None,
        solver: str = "overlap",
        recompute_early: bool | None = None,
        profile: str = "measure",
        hardware: str = "cpu-gloo",
        timeout_s: float = 7.0,
    ) -> None:
        check_solver(solver)
        self.group = dist.group.WORLD if group is None else group
        self.rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        schedule = schedule_of(schedule, ranks, microbatches)
        mine = {stage for stage, rank in schedule.rank_of.items() if rank == self.rank}
        if len(schedule.rows) != ranks or set(stages) != mine:
            raise OptionError(
                f"rank {self.rank} of {ranks} was given stages {sorted(stages)}; schedule "
                f"{schedule.name!r} has {len(schedule.rows)} ranks and expects stages "
                f"{sorted(mine)} here"
            )
        last = schedule.stages - 1
        if (loss is None) == (last in stages):
            raise OptionError(
                f"loss={loss}: expected one on the rank of the last stage, {last}, and only there"
            )
        self.schedule = schedule
        self.modules = dict(stages)
        self.reports: dict[int, StepReport] = {}
        self._loss = loss
        self._early = recompute_early
        self._timeout_s = timeout_s
        self._options = Options(
            memory_budget, solver, "eager", profile, hardware, None, timeout_s, None
        )
        self._stages: dict[int, _Stage] = {}
        self._row: tuple[Step, ...] = ()

    def __call__(self, inputs: Sequence[Any] = (), targets: Sequence[Any] = ()) -> list[Tensor]:
        count, last = self.schedule.microbatches, self.schedule.stages - 1
        for what, given, stage in (("inputs", inputs, 0), ("targets", targets, last)):
            if stage in self.modules and len(given) != count:
                raise OptionError(
                    f"{len(given)} {what} on the rank of stage {stage}; the schedule expects "
                    f"{count}, one for each microbatch"
                )
        first = [_tuple(each) for each in inputs] if 0 in self.modules else []
        behind = [_tuple(each) for each in targets] if last in self.modules else []
        if not self._stages:
            self._prepare(first, behind)
        return _Run(self, first, behind).run()

    def _prepare(
        self, inputs: Sequence[tuple[Any, ...]], targets: Sequence[tuple[Any, ...]]
    ) -> None:
        """Trace and plan this rank's stages; every rank learns what tensors travel."""
        schedule, last = self.schedule, self.schedule.stages - 1
        ranks = dist.get_process_group_ranks(self.group)
        shapes: dict[int, Shape] = {}
        found = {}
        with Exchange(ranks, self._timeout_s) as exchange:
            exchange.agree(
                "the schedule",
                format_schedule(schedule),
                "pass the same schedule and number of microbatches on every rank",
            )
            for stage in range(schedule.stages):
                told = b""
                if stage in self.modules:
                    given: tuple[Any, ...] = (
                        inputs[0] if stage == 0 else (_blank(shapes[stage - 1]),)
                    )
                    module = self.modules[stage]
                    if stage == last:
                        assert self._loss is not None
                        module = _WithLoss(module, self._loss, len(given))
                        given = (*given, *targets[0])
                    module = without_ties(module)
                    with busy("tracing"):
                        captured = capture(module, *given)
                        found[stage] = captured, Inputs.of(captured, module, stage == last), given
                    told = found[stage][1].result_shape().encode()
                answers = exchange.gather(f"the output of stage {stage}", told)
                shapes[stage] = _parse_shape(answers[schedule.rank_of[stage]].decode())
        for stage, (captured, places, given) in found.items():
            with exchange_for(captured.trace.lanes, self._timeout_s) as joined:
                captured, report = plan_step(
                    captured,
                    self._options,
                    schedule.microbatches,
                    merging=False,
                    gradients=list(parameter_gradients(captured)),
                    add_ns_per_kib=adding(self.modules[stage]),
                    primals=places.primals(given),
                    in_flight=_in_flight(schedule, stage),
                    exchange=joined,
                )
            self.reports[stage] = report
            parts = cut(captured, report.lone.plan)
            incoming = None if stage == 0 else shapes[stage - 1]
            outgoing = None if stage == last else shapes[stage]
            self._stages[stage] = _Stage(
                places, parts.forward, parts.backward, parts.pieces(), incoming, outgoing
            )
        early = {
            stage
            for stage, report in self.reports.items()
            if report.lone.plan.recomputed
            and (not report.lone.problem.trace.lanes if self._early is None else self._early)
        }
        self._row = with_recompute(schedule, early).rows[self.rank]


@dataclass
class _Stage:
    """A planned stage, and what it keeps of the microbatches in flight."""

    inputs: Inputs
    forward: Part
    backward: Part
    pieces: Mapping[str, Part]
    incoming: Shape | None
    outgoing: Shape | None
    states: dict[int, dict[str, Any]] = field(default_factory=dict)

    def do(self, kind: str, microbatch: int, given: tuple[Any, ...]) -> Tensor | None:
        """Run one action. What it takes is the arguments of F or the gradient of I and B; what it
        gives is what F or I and B send on."""
        ends = self.outgoing is None
        shared = self.inputs.shared() if ends else self.inputs.parameters
        if kind == "F":
            state = self.states[microbatch] = self.inputs.state(given)
            self.forward.run(shared, state)
            result: Tensor = self.inputs.results(state)
            return result
        state = self.states[microbatch]
        if given:
            (name,) = self.inputs.tangents
            state[name] = given[0]
        if kind == "B":
            # Where recompute has run already, what is left are the other two pieces.
            parts = [self.pieces["I"], self.pieces["W"]] if "again" in state else [self.backward]
        else:
            parts = [self.pieces[kind]]
            if kind == "I" and "again" not in state:
                parts.insert(0, self.pieces["R"])
        for part in parts:
            part.run(shared, state)
        if kind == "R":
            state["again"] = True
        gradient: Tensor | None = None
        if kind in "BI" and self.incoming is not None:
            gradient = state.pop("gradient" + str(self.inputs.order.index(self.inputs.first)))
        if kind in "BW":
            del self.states[microbatch]
        return gradient


class _Run:
    """One call of a pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: Sequence[tuple[Any, ...]],
        targets: Sequence[tuple[Any, ...]],
    ) -> None:
        self.pipeline = pipeline
        self.schedule = pipeline.schedule
        self.inputs, self.targets = inputs, targets
        self.here: dict[tuple[int, bool, int], Tensor] = {}  # made on this rank for this rank
        self.asked: dict[tuple[int, bool, int], tuple[Any, Tensor]] = {}
        self.sent: list[tuple[Any, Tensor, str]] = []
        self.at = ""

    def run(self) -> list[Tensor]:
        losses = []
        row = self.pipeline._row
        for stage in self.pipeline._stages.values():
            stage.states.clear()
        with torch.no_grad(), torch._C._DisableAutocast():
            for i, step in enumerate(row):
                self.at = format_step(step)
                for later in row[i : i + _AHEAD]:
                    for action in later:
                        self.ask(action)
                for action in step:
                    result = self.act(action)
                    if action.kind == "F" and action.stage == self.schedule.stages - 1:
                        losses.append(result)
        for work, _, what in self.sent:
            self.wait(work, what)
        return losses  # type: ignore[return-value]

    def act(self, action: Action) -> Tensor | None:
        stage = self.pipeline._stages[action.stage]
        m = action.microbatch
        given: tuple[Any, ...] = ()
        if action.kind == "F":
            given = self.inputs[m] if action.stage == 0 else (self.receive(action),)
            if stage.outgoing is None:
                given = (*given, *self.targets[m])
        elif action.kind in "BI" and stage.outgoing is not None:
            given = (self.receive(action),)
        result = stage.do(action.kind, m, given)
        if action.kind == "F" and stage.outgoing is not None:
            self.send(result, (action.stage + 1, True, m))
        elif action.kind in "BI" and action.stage > 0:
            self.send(result, (action.stage - 1, False, m))
        return result

    # What travels: (the stage that gets it, is it an activation, microbatch)

    def needed(self, action: Action) -> tuple[int, bool, int] | None:
        if action.kind == "F" and action.stage > 0:
            return action.stage, True, action.microbatch
        if action.kind in "BI" and action.stage + 1 < self.schedule.stages:
            return action.stage, False, action.microbatch
        return None

    def ask(self, action: Action) -> None:
        key = self.needed(action)
        if key is None or key in self.asked:
            return
        source = self.schedule.rank_of[action.stage + (-1 if key[1] else 1)]
        if source == self.pipeline.rank:
            return
        stage = self.pipeline._stages[action.stage]
        buffer = _blank(stage.incoming if key[1] else stage.outgoing).detach()
        work = self.guarded(
            lambda: dist.irecv(
                buffer, group=self.pipeline.group, tag=self.tag(key), group_src=source
            ),
            f"asking rank {source} for {_named(key)}",
        )
        self.asked[key] = work, buffer

    def receive(self, action: Action) -> Tensor:
        key = self.needed(action)
        assert key is not None
        if key in self.here:
            return self.here.pop(key)
        work, buffer = self.asked.pop(key)
        source = self.schedule.rank_of[action.stage + (-1 if key[1] else 1)]
        self.wait(work, f"{_named(key)} from rank {source}")
        return buffer

    def send(self, result: Tensor | None, key: tuple[int, bool, int]) -> None:
        assert result is not None
        target = self.schedule.rank_of[key[0]]
        if target == self.pipeline.rank:
            self.here[key] = result
            return
        result = result.contiguous()
        work = self.guarded(
            lambda: dist.isend(
                result, group=self.pipeline.group, tag=self.tag(key), group_dst=target
            ),
            f"sending {_named(key)} to rank {target}",
        )
        self.sent = [entry for entry in self.sent if not entry[0].is_completed()]
        self.sent.append((work, result, f"rank {target} to take {_named(key)}"))

    def tag(self, key: tuple[int, bool, int]) -> int:
        return (key[0] * self.schedule.microbatches + key[2]) * 2 + key[1]

    def wait(self, work: Any, what: str) -> None:
        seconds = self.pipeline._timeout_s
        self.guarded(lambda: work.wait(timedelta(seconds=seconds)), f"waiting for {what}")

    def guarded(self, do: Callable[[], Any], what: str) -> Any:
        try:
            return do()
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RankError(
                f"rank {self.pipeline.rank} at action {self.at}, {what}: {first_line}; expected "
                f"it within {self.pipeline._timeout_s:g} s: see the output of that rank for why it "
                "ended or is late"
            ) from error


class _WithLoss(nn.Module):
    """A stage and the loss behind it; the first `count` arguments are the stage's."""

    def __init__(self, module: nn.Module, loss: Callable[..., Tensor], count: int) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.count = count

    def forward(self, *args: Any) -> Tensor:
        return self.loss(self.module(*args[: self.count]), *args[self.count :])


def _tuple(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _named(key: tuple[int, bool, int]) -> str:
    stage, activation, microbatch = key
    what = "the input" if activation else "the gradient"
    return f"{what} of stage {stage}, microbatch {microbatch}"


def _blank(shape: Shape | None) -> Tensor:
    """A tensor of that shape, which gets a gradient."""
    if shape is None:
        raise InvalidSchedule("a stage at the end of the pipeline has nothing to receive")
    return torch.zeros(shape[0], dtype=shape[1]).requires_grad_()


def _parse_shape(text: str) -> Shape:
    sizes, _, dtype = text.rpartition(" ")
    return tuple(int(size) for size in sizes.split()), getattr(torch, dtype)


def _in_flight(schedule: Schedule, stage: int) -> int:
    """How many microbatches a stage holds at its worst moment."""
    held = most = 0
    for step in schedule.rows[schedule.rank_of[stage]]:
        for action in step:
            if action.stage == stage:
                held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
                most = max(most, held)
    return most
