"""`Pipeline` is a training step of a pipeline: each rank runs its row of a schedule on its stages.

    pipeline = Pipeline({0: embed_and_blocks}, "1f1b", microbatches=8)       # on rank 0
    pipeline = Pipeline({1: blocks_and_head}, "1f1b", 8, loss=cross_entropy) # on rank 1
    losses = pipeline(inputs, targets)                                       # on both

This file plans: it captures the stages, gives each its plan, and places recompute and weight
gradients in the rows. `executor.py` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc.core.door import Door
from overlapc.core.errors import Infeasible, OptionError
from overlapc.core.pipeline import PipelineTimeline, StageCost, describe
from overlapc.core.schedule import Schedule, format_schedule
from overlapc.passes.emit.parts import parameter_gradients
from overlapc.passes.trace import Captured
from overlapc.planning.options import Options, schedule_of
from overlapc.planning.report import Report
from overlapc.planning.rows import StageFigures, plan_rows
from overlapc.planning.stage import beside_bytes, plan_stage, stage_figures
from overlapc.ranks.board import attend
from overlapc.ranks.exchange import Exchange, busy, in_call
from overlapc.ranks.groups import exchange_for
from overlapc.ranks.seeds import warn_of_seeds
from overlapc.runtime.call import Given, alike
from overlapc.runtime.dry_run import walked
from overlapc.runtime.executor import Links, RowRun
from overlapc.runtime.foreign import (
    refuse_foreign,
    refuse_unmade,
    sharded_by,
    untraced,
)
from overlapc.runtime.link_times import alike_ns, averaging_ns, sent_ns
from overlapc.runtime.slicing.cut_stages import Candidate, CutStages
from overlapc.runtime.slicing.sliced_stage import SlicedStage
from overlapc.runtime.stage import Shapes, Stage, blank, sending, with_loss
from overlapc.runtime.train_step import adding


class Pipeline(Door):
    """This rank's part of a pipeline. `stages` are the modules of its stages by number. A stage
    returns a tensor or a tuple of tensors, the arguments of the next stage; the first stage takes a
    microbatch's inputs.

    schedule        a Schedule, or the name of one: "gpipe", "1f1b", "interleaved", "zero-bubble",
                    "zero-bubble-v", "merged"; row n is what rank n of `group` does
    loss            loss(output, *targets), on the rank of the last stage; a number
    place           move recompute and weight gradients into stalls, as far as that is predicted to
                    help; otherwise the rows stay as they are
    data_parallel   a group of ranks that run the same stages on other data: gradients are averaged
                    over it, on their way as soon as a stage's last are there. (What is in `.grad`
                    then is all of it: clear it between calls.)
    tied            weights that several stages have, as {stage: parameter's name}: each gets the
                    sum of their gradients
    options         those of `overlapc.Options`; `memory_budget` is of each stage, for what it holds
                    of all microbatches in flight, and it, `plan` and `slices` may be {stage: its}.
                    With `slices` each microbatch of a stage is cut; between stages it stays whole

    Calling it with the inputs and targets of all microbatches (each a tuple or a tensor; needed
    on the first and the last stage's rank) adds up gradients in `.grad`, in the order of the
    schedule's backwards (of microbatches, in those with a name), and returns the losses, on the
    last stage's rank. The first call plans; later ones must bring microbatches of the same shapes.
    Runs on CPUs, over gloo.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule | str = "1f1b",
        microbatches: int = 1,
        loss: Callable[..., Tensor] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        data_parallel: dist.ProcessGroup | None = None,
        tied: Sequence[Mapping[int, str]] = (),
        place: bool = True,
        **options: Any,
    ) -> None:
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
        _check_tied(tied, stages, schedule.stages)
        _check_modules(stages, data_parallel, tied)
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise OptionError(
                "the loss has parameters, which belong to no stage: expected them in the last "
                "stage's module"
            )
        self.schedule = schedule
        self.modules = dict(stages)
        self.reports: dict[int, Report] = {}
        self.timeline: PipelineTimeline | None = None  # predicted timeline of all ranks
        self.costs: tuple[StageCost, ...] = ()  # costs of one microbatch, by stage
        self._loss = loss
        self._place = place
        self._options, self._of_stages = _by_stage(options, mine)
        timeout_s = self._options.timeout_s
        self._links = Links(self.group, self.rank, timeout_s, data_parallel, tuple(tied))
        self._whole: dict[int, Stage] = {}  # stages as they are traced first, not in slices
        self._stages: dict[int, Stage] = {}  # as they run
        self._cuts: CutStages | None = None
        self._shapes: Mapping[int, Shapes] = {}  # by stage: what it sends
        self._average_ns: dict[int, int] = {}  # by stage: averaging its gradients
        self._asked = schedule
        self._planned_for: Any = None
        attend()

    @untraced
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
        for what, given in (("inputs", first), ("targets", behind)):
            flat = [leaf for args in given for leaf in args if isinstance(leaf, Tensor)]
            if any(leaf.requires_grad for leaf in flat):
                raise OptionError(
                    f"{what} that require a gradient, which no stage would hand back: expected "
                    "detached ones"
                )
        like = [
            alike([Given(args, {}) for args in given]) if given else None
            for given in (first, behind)
        ]
        with in_call():
            if self._planned_for is None:
                self._prepare(first, behind, like)
            elif like != self._planned_for:
                raise OptionError(
                    f"this pipeline was planned for microbatches {self._planned_for}, found "
                    f"{like}: make another Pipeline for these"
                )
            elif self._anywhere(self._changed(first, behind)):
                self._prepare(first, behind, like)
            row = self.schedule.rows[self.rank]
            run = RowRun(self.schedule, row, self._stages, self.modules, self._links)
            return run.run(first, behind)

    @property
    def graphs(self) -> list[Report]:
        return list(self.reports.values())

    @property
    def step_ms(self) -> float:
        return 0.0 if self.timeline is None else self.timeline.step_ns / 1e6

    @property
    def peak_bytes(self) -> int:
        return 0 if self.timeline is None else self.timeline.peak_bytes[self.rank]

    @property
    def differences(self) -> list[str]:
        return [*dict.fromkeys(line for made in self._stages.values() for line in made.differences)]

    def explain(self) -> str:
        """Show the predicted timeline of all ranks, and the plans of this rank's stages."""
        if self.timeline is None:
            return "nothing planned yet: run a step first"
        parts = [describe(self.timeline)]
        for stage, report in self.reports.items():
            made = self._stages[stage]
            parts += [f"stage {stage}", report.explain()]
            parts += [str(made.compared)] if isinstance(made, SlicedStage) else []
            said = {} if self._cuts is None else self._cuts.said[stage]
            parts += [f"{count} slices: {what}" for count, what in sorted(said.items())]
        return "\n\n".join(parts)

    def _changed(
        self, inputs: Sequence[tuple[Any, ...]], targets: Sequence[tuple[Any, ...]]
    ) -> bool:
        """Has a stage of this rank become a graph other than the planned one?"""
        found = []
        for stage, made in self._stages.items():
            given = tuple(map(blank, made.incoming)) if stage else inputs[0]
            found.append(made.changed((*given, *targets[0]) if made.last else given))
        return any(found)

    def _anywhere(self, changed: bool) -> bool:
        """Has a stage changed on any rank? Asked before each step, since ranks must plan
        together."""
        if dist.get_world_size(self.group) == 1:
            return changed
        flag = torch.tensor([int(changed)])
        run = RowRun(self.schedule, (), {}, {}, self._links)
        run.at = "the beginning of a step"
        what = "whether stages have changed"
        work = run.guarded(
            lambda: dist.all_reduce(flag, dist.ReduceOp.MAX, self.group, async_op=True), what
        )
        run.wait_for_all(work, what, self.group)
        return bool(flag)

    def _prepare(
        self,
        inputs: Sequence[tuple[Any, ...]],
        targets: Sequence[tuple[Any, ...]],
        like: Sequence[Any],
    ) -> None:
        """Trace and plan this rank's stages for microbatches like these; every rank learns which
        tensors are sent, and the figures of all stages. If that fails, on all ranks, the next step
        plans."""
        self._planned_for = None
        self.schedule = self._asked
        shapes = self._shapes = self._traced(inputs, targets)
        self._links.width = max(1, *map(len, shapes.values()))
        figures: dict[int, Any] = {}
        planned: dict[int, list[list[Candidate]]] = {}
        links, options = self._links, self._options
        ends = range(self.schedule.stages - 1)
        sent = {s: sent_ns(self.schedule, s, _bytes(shapes[s]), links, options) for s in ends}
        for stage in sorted(self.modules.keys() - self._average_ns.keys()):
            # Measured once: when a stage changes, its replicas may not plan again.
            trained = [p for p in self.modules[stage].parameters() if p.requires_grad]
            took_ns = averaging_ns(self.schedule, stage, trained, links, options)
            self._average_ns[stage] = took_ns
        self._cuts = cuts = CutStages(self._whole, self._of_stages, links)
        wanted = {stage: self._wanted(stage) for stage in self._whole}
        given = walked(self.schedule, self._whole, wanted, shapes, inputs, targets, links)
        for stage, (first, *others) in given.items():
            self._whole[stage].trace(first, others)
        cuts.cut(given)
        for stage, made in self._whole.items():
            with busy("planning its stages"):
                slower = max(sent.get(end, 0) for end in (stage - 1, stage))
                took = slower, self._average_ns[stage]
                took = alike_ns(made.captured.trace.groups, took, links.timeout_s)
                try:
                    planned[stage] = cuts.planned(stage, partial(self._figured, took_ns=took))
                    figures[stage] = [
                        [asdict(each.figures) for each in plans] for plans in planned[stage]
                    ]
                except Infeasible as error:  # so that the others learn of it
                    figures[stage] = {
                        "budget": error.budget_bytes,
                        "least": error.smallest_bytes,
                        "fractions": error.fractions,
                    }
        way, chosen = self._placed(figures)
        for stage, ways in planned.items():
            found = ways[way][chosen[stage]]
            self._stages[stage], self.reports[stage] = found.stage, found.report
            found.stage.planned(found.report)
        cuts.forget_inputs()
        self._planned_for = like

    def _wanted(self, stage: int) -> int:
        """Of how many microbatches a stage must see what it is given, before it is planned."""
        depends = self._whole[stage].captured.depends_on_data
        if depends and self._of_stages[stage].profile == "measure":
            return self.schedule.microbatches
        return 1 if self._cuts and self._cuts.counts[stage] else 0

    def _traced(
        self, inputs: Sequence[tuple[Any, ...]], targets: Sequence[tuple[Any, ...]]
    ) -> dict[int, Shapes]:
        """Trace this rank's stages, each once the shapes of its inputs are known; return the shapes
        that every stage sends."""
        schedule = self.schedule
        shapes: dict[int, Shapes] = {}
        with self._exchange() as exchange:
            exchange.agree(
                "the schedule",
                format_schedule(schedule) + json.dumps([self._place, *self._links.tied]),
                "pass the same schedule, number of microbatches and options on every rank",
            )
            exchange.agree("profile", self._options.profile, "pass the same one on every rank")
            for stage in range(schedule.stages):
                told = b""
                if stage in self.modules:
                    given = inputs[0] if stage == 0 else tuple(map(blank, shapes[stage - 1]))
                    made = self._stage(stage, len(given), shapes.get(stage - 1, ()))
                    last = stage == schedule.stages - 1
                    with busy("tracing"):
                        made.trace((*given, *targets[0]) if last else given)
                    told = _format_shapes(made.outgoing).encode()
                answers = exchange.gather(f"the output of stage {stage}", told)
                shapes[stage] = _parse_shapes(answers[schedule.rank_of[stage]].decode())
        return shapes

    def _figured(self, made: Stage, took_ns: tuple[int, int]) -> list[Candidate]:
        """Plan a stage whose transfers and average take so long; return the plans with their
        figures for other ranks."""
        reports = self._planned(made, made.captured, made.inputs)
        beside = self._beside(made)
        figures = stage_figures(reports, made.received, took_ns[0], beside, took_ns[1])
        return [Candidate(made, *each) for each in zip(reports, figures, strict=True)]

    def _placed(self, figures: Mapping[int, Any]) -> tuple[int, tuple[int, ...]]:
        """Exchange the figures of all stages and place the rows of all ranks; return the way, and
        the number of the plan in it, that each stage runs."""
        with self._exchange() as exchange:
            told = json.dumps(figures).encode()
            of_ranks = map(json.loads, exchange.gather("what stages take", told))
            of_stages = {int(s): figure for rank in of_ranks for s, figure in rank.items()}
            ways: list[list[list[StageFigures]]] = [[], []]
            for stage, figure in sorted(of_stages.items()):
                if isinstance(figure, dict):
                    place, fractions = f"stage {stage}", figure["fractions"]
                    raise Infeasible(figure["budget"], figure["least"], place, fractions)
                for way, plans in zip(ways, figure, strict=True):
                    way.append([StageFigures.parse(each) for each in plans])
            with busy("placing rows"):
                found = [plan_rows(self.schedule, ways[0], self._place)]
                if ways[1] != ways[0]:
                    found.append(plan_rows(self.schedule, ways[1], self._place))
            which = min(reversed(range(len(found))), key=lambda way: found[way][2].step_ns)
            chosen, rows, timeline = found[which]
            exchange.agree("the rows", format_schedule(rows), "report this as a bug")
        self.schedule, self.timeline = rows, timeline
        every = ways[which]
        self.costs = tuple(of[plan].cost for of, plan in zip(every, chosen, strict=True))
        return which, chosen

    def _exchange(self) -> Exchange:
        return Exchange(dist.get_process_group_ranks(self.group), self._links.timeout_s)

    def _beside(self, made: Stage) -> int:
        coming, going = (
            _bytes(self._shapes[end]) if 0 <= end < self.schedule.stages - 1 else 0
            for end in (made.number - 1, made.number)
        )
        return beside_bytes(self.schedule, made.number, coming, going, made.slices > 1)

    def _stage(self, stage: int, count: int, incoming: Shapes) -> Stage:
        """Make a stage whose module takes so many arguments."""
        module, last = self.modules[stage], stage == self.schedule.stages - 1
        function = with_loss(module, self._loss, count) if self._loss and last else sending(module)
        known = self._whole.get(stage)
        if known is not None and known.incoming == incoming:
            known.report = None  # it is planned again
            return known
        made = self._whole[stage] = Stage(stage, module, function, incoming, last)
        made.plan = lambda captured, inputs: self._planned(made, captured, inputs)[0]
        return made

    def _planned(
        self, made: Stage, captured: Captured, inputs: Sequence[Sequence[Any]]
    ) -> list[Report]:
        primals, *others = inputs
        with exchange_for(captured.trace.groups, self._links.timeout_s) as joined:
            reports = plan_stage(
                captured,
                self._of_stages[made.number],
                self.schedule,
                made.number,
                place=self._place,
                beside_bytes=self._beside(made),
                gradients=tuple(parameter_gradients(captured)),
                add_ns_per_kib=adding(made.module, self._options),
                primals=primals,
                others=others,
                exchange=joined,
                slices=made.slices,
                draws=made.draws,
            )
            warn_of_seeds(captured, primals, joined)
        return reports


def _by_stage(
    given: Mapping[str, Any], stages: Collection[int]
) -> tuple[Options, dict[int, Options]]:
    """Split the options into those common to all stages, and those of each stage."""
    apart = {name: value for name, value in given.items() if isinstance(value, Mapping)}
    for name, of_stages in apart.items():
        if name not in ("memory_budget", "plan", "slices") or not set(stages) <= set(of_stages):
            raise OptionError(
                f"{name} has stages {sorted(of_stages)}, expected one for each stage here: "
                f"{sorted(stages)}"
            )
    rest = {name: value for name, value in given.items() if name not in apart}
    options = Options.parse(rest, "Pipeline")
    each = {s: {name: of_stages[s] for name, of_stages in apart.items()} for s in stages}
    return options, {stage: replace(options, **each[stage]) for stage in stages}


def _check_modules(
    stages: Mapping[int, nn.Module], replicas: Any, tied: Sequence[Mapping[int, str]]
) -> None:
    for stage, module in stages.items():
        both = (replicas is not None and "data_parallel=") or (
            any(stage in names for names in tied) and "tied="
        )
        if both and sharded_by(module):
            raise OptionError(
                f"{both}: found FSDP2's shards in stage {stage}, and FSDP2 reduces their gradients "
                f"itself; expected stages without shards, or {both} left out"
            )
        refuse_foreign("Pipeline", module)
        refuse_unmade("Pipeline", module)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device.type != "cpu":
                raise OptionError(
                    f"stage {stage}'s {name} is on {tensor.device}: a Pipeline runs on CPUs so "
                    "far, expected all of it there"
                )


def _check_tied(
    tied: Sequence[Mapping[int, str]], stages: Mapping[int, nn.Module], count: int
) -> None:
    for names in tied:
        for stage, name in names.items():
            if not 0 <= stage < count or len(names) < 2:
                raise OptionError(
                    f"tied={dict(names)}: expected two or more of stages 0 to {count - 1}, each "
                    "with the name of a parameter"
                )
            if stage in stages and name not in dict(stages[stage].named_parameters()):
                raise OptionError(f"tied: stage {stage} has no parameter {name!r}")
        here = [stages[s].get_parameter(name) for s, name in names.items() if s in stages]
        if len({id(parameter) for parameter in here}) < len(here):
            raise OptionError(
                f"tied={dict(names)}: stages of this rank have the same Parameter there, which "
                "gets both gradients anyway: leave it out, or give each stage one of its own"
            )


def _tuple(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _bytes(shapes: Shapes) -> int:
    return sum(blank(shape).nbytes for shape in shapes)


def _format_shapes(shapes: Shapes) -> str:
    told = [[sizes, str(dtype).removeprefix("torch."), grad] for sizes, dtype, grad in shapes]
    return json.dumps(told)


def _parse_shapes(text: str) -> Shapes:
    return tuple(
        (tuple(sizes), getattr(torch, dtype), gradient)
        for sizes, dtype, gradient in json.loads(text)
    )
