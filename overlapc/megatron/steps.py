"""`Steps` runs Megatron's training steps with planned chunks in them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from overlapc.core.door import Door
from overlapc.core.errors import OptionError, OverlapcError
from overlapc.megatron import merged as ticks
from overlapc.megatron.chunk import Chunk
from overlapc.megatron.planning import ChunkStep
from overlapc.megatron.refused import reason, slices_of
from overlapc.megatron.seams import NAMES
from overlapc.megatron.searched import check
from overlapc.megatron.waits import Waits
from overlapc.planning.options import Options
from overlapc.ranks.exchange import busy
from overlapc.ranks.groups import exchange_of
from overlapc.ranks.guard import is_broken
from overlapc.ranks.later import Later
from overlapc.ranks.pace import pace
from overlapc.ranks.raised import RaisedRecord
from overlapc.ranks.roll import Roll, absent
from overlapc.search.chosen import Chosen
from overlapc.state.described import forward_as, noticed
from overlapc.tools.issued import issued
from overlapc.tools.told import warn

SCHEDULES = ("1f1b", "merged")
_GRACE_S = 1.0  # a word that was sent has reached the store
PATIENCE_S = 7.0  # with a rank that says nothing, before all run a first step as plain Megatron
FIRST_STEP_S = 120.0  # ranks may be so far apart before the first step, since they read data


@dataclass(frozen=True)
class RankPlace:
    """This rank's place for some models: `ranks` run the same stage, and `peers` among them the
    same microbatches. If `refused` is not empty, it says why the models are left to Megatron."""

    stage: int
    stages: int
    ranks: tuple[int, ...] = (0,)
    peers: tuple[int, ...] = (0,)
    refused: str = ""


class Steps(Door):
    """The options of `patch`, and the chunks that run with them."""

    def __init__(
        self,
        options: Options,
        merge: bool,
        fill: bool,
        schedule: str,
        searched: Chosen | None = None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise OptionError(f"schedule={schedule!r}: expected one of {', '.join(SCHEDULES)}")
        for name, flag in (("merge", merge), ("fill", fill)):
            if not isinstance(flag, bool):
                raise OptionError(f"{name}={flag!r}: expected True or False")
        if options.slices == "auto" and options.plans:
            raise OptionError('plan: slices="auto" plans itself; expected the number of slices')
        self._refused: OptionError | None = None  # on all ranks: no step runs any more
        self._options, self._merge, self._fill = options, merge, fill
        self._schedule, self._told = schedule, False
        self._searched = searched
        self._running = threading.Lock()
        self._unjoined: dict[str, int] | None = None  # collectives before a plain step ended
        self._roll, self._raised = Roll(), RaisedRecord()
        self.later = Later()
        # By the ids of models, which are kept alive here.
        self._places: dict[tuple[int, ...], tuple[RankPlace, list[Any]]] = {}
        self.chunks: dict[int, Chunk] = {}

    @property
    def graphs(self) -> list[Any]:
        found = {id(report): report for chunk in self.chunks.values() for report in chunk.reports}
        return list(found.values())

    @property
    def fallbacks(self) -> list[str]:
        why = [reason for chunk in self.chunks.values() for reason in chunk.why_plain]
        return [*dict.fromkeys(why), *self._refusals()]

    def _refusals(self) -> list[str]:
        return [*dict.fromkeys(p.refused for p, _ in self._places.values() if p.refused)]

    def explain(self) -> str:
        parts = [f"chunk {i}: {c.explain()}" for i, c in enumerate(self.chunks.values())]
        parts += [f"runs as plain Megatron: {why}" for why in self._refusals()]
        return "\n\n".join(parts) or "nothing planned yet: run a step first"

    def run(self, name: str, real: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Run a schedule function of Megatron's: validation unchanged, training with planned
        chunks."""
        if given.get("forward_only"):
            return real(**given)
        models = given["model"] if isinstance(given["model"], list) else [given["model"]]
        place, _ = self._places.get(tuple(map(id, models)), (None, None))
        if place is not None and place.refused:
            return real(**given)
        if self._refused is not None:
            raise self._refused
        if not self._running.acquire(blocking=False):
            raise OverlapcError(
                "a training step began before another had ended, of another thread or within it; "
                "expected one after the other: run the steps on one thread"
            )
        try:
            self._raised.begin(guards=place is None)
            pace.begin(first=place is None)
            if pace.lacks and (missing := self._roll.missing()):
                raise absent(missing, "the step before was planned")
            return self._run(name, real, given, models, place)
        except BaseException as error:
            cause = self._raised.instead_of(error)
            if cause is None:
                raise
            raise cause from error
        finally:
            self._running.release()

    def _run(
        self,
        name: str,
        real: Callable[..., Any],
        given: dict[str, Any],
        models: list[Any],
        place: RankPlace | None,
    ) -> Any:
        begins = False
        look = self._raised.look
        first = busy("the first step of training", look)
        with contextlib.nullcontext() if place else first:
            if place is None:
                patience_s = self._patience_s()
                if not self._roll.is_complete(patience_s):
                    return self._for_once_plain(real, given, patience_s)
                place, begins = self._begin(models, given), True
            if place.refused:
                return real(**given)
            stages = range(place.stage, len(models) * place.stages)[:: place.stages]
            chunks = [self._chunk(m, stage) for m, stage in zip(models, stages, strict=True)]
            config = chunks[0].module.config
            merged = self._runs_merged(name, config, given)
            step = self._step(name, merged, given["num_microbatches"], place, len(chunks))
            batch = given.get("micro_batch_size")
            slices = slices_of(self._options.slices, config, batch)
            refuse = partial(self.later.tell, place.stage)
            step = replace(step, slices=slices, batch=batch, begins=begins, refuse=refuse)
            with self._in_place(chunks, step):
                result = ticks.run(chunks[0], real, given) if merged else real(**given)
            if begins and slices != (1,):
                self._refused = _refused_slices(chunks, place)
                self.later.leave()
            elif slices != (1,):
                self._refused = self.later.found()
            if self._refused is not None:
                raise self._refused
            return result

    def _patience_s(self) -> float:
        """How long this first step waits for the word of a rank. A step before it, which ran plain,
        need not have joined the ranks. If a collective has joined them since then, they have all
        been in that step, and a missing word will never come."""
        before, self._unjoined = self._unjoined, None
        if before is None:
            return PATIENCE_S
        if _joined(before, missing := self._roll.missing()):
            time.sleep(_GRACE_S)  # a word may be on its way
            if _joined(before, missing := self._roll.missing()):
                raise absent(missing, "the step before ran as plain Megatron")
        return FIRST_STEP_S if missing else PATIENCE_S

    def _for_once_plain(
        self, real: Callable[..., Any], given: dict[str, Any], waited_s: float
    ) -> Any:
        """Run a step as plain Megatron, as all ranks do. If it joins all ranks, then it ends when
        all have been in it."""
        before = issued()
        try:
            result = real(**given)
        except Exception as error:
            if is_broken(error) and (missing := self._roll.missing()):
                ended = (
                    "a collective of it failed, as a rank had ended: see the output of that rank"
                )
                raise absent(missing, ended) from error
            raise
        if missing := self._roll.missing():
            models = given["model"] if isinstance(given["model"], list) else [given["model"]]
            if _joins_all(models, given) or _joined(before, missing):
                raise absent(missing, "this step ran as plain Megatron")
            self._unjoined = issued()
        warn(
            f"overlapc ran a step as plain Megatron, and plans the next one: {waited_s:g} s after "
            "some rank had begun it, another had not called overlapc.megatron.patch(); expected "
            "patch() before ranks read data"
        )
        return result

    def _begin(self, models: list[Any], given: dict[str, Any]) -> RankPlace:
        """Before the first step of some models, find this rank's place, and check for refused
        features and differences from a search."""
        groups = given.get("pg_collection")
        alike = {
            "merge": self._merge,
            "fill": self._fill,
            "schedule": self._schedule,
            "slices": self._options.slices,
            "solver": self._options.solver,
            "search": self._searched,
        }
        place = _where(groups, next(filter(None, map(reason, models)), ""), alike)
        self._places[tuple(map(id, models))] = place, models
        if place.refused:
            warn(f"overlapc leaves this run to plain Megatron: {place.refused}")
        if self._searched is not None:
            from megatron.core import parallel_state

            replicas = getattr(groups, "dp", None) or parallel_state.get_data_parallel_group()
            model, ddp = innermost(models[0])
            sums = getattr(ddp, "ddp_config", None)
            check(self._searched, model.config, sums, given, replicas.size())
        return place

    def _runs_merged(self, name: str, config: Any, given: dict[str, Any]) -> bool:
        if self._schedule != "merged" or name != NAMES[1]:
            return False
        why = ticks.refused(given, config)
        if why and not self._told:
            self._told = True
            warn(f"overlapc runs Megatron's 1F1B, expected schedule='merged': found {why}")
        return not why

    def _step(
        self, name: str, merged: bool, microbatches: int, place: RankPlace, chunks: int
    ) -> ChunkStep:
        alone = name == NAMES[0]
        behind = place.stages - place.stage  # stages from this one to the last
        in_flight = behind + place.stages * (chunks - 1)
        ahead = ticks.lag(place.stage, place.stages) if merged else 0
        return ChunkStep(
            place.ranks,
            place.peers,
            microbatches,
            in_flight=1 if alone else ahead or in_flight,
            lag=int(self._merge) if alone else ahead,
            hands=merged,
            first=place.stage == 0,
            fills=self._fill and not alone and not merged,
        )

    @contextlib.contextmanager
    def _in_place(self, chunks: list[Chunk], step: ChunkStep) -> Iterator[None]:
        """While the block runs, chunks replace the models' innermost `forward`."""
        with contextlib.ExitStack() as stack:
            waits = None
            if step.fills:
                # With several chunks it is unknown here whose backward comes next.
                waits = Waits([chunk.again for chunk in chunks if len(chunks) == 1])
                stack.enter_context(waits.filled([chunk.module.config for chunk in chunks]))
            for chunk in chunks:  # none is watched until all have begun: that may set attributes
                chunk.begin(step, waits)
            for chunk in chunks:
                stack.enter_context(forward_as(chunk.module, chunk))
            stack.enter_context(noticed([chunk.notice for chunk in chunks]))
            yield
            for chunk in chunks:
                chunk.finish()

    def _chunk(self, model: Any, stage: int) -> Chunk:
        """Return the chunk of a model, which may be wrapped, for instance in DDP."""
        whole, ddp = unwrapped(model)
        model = part_of(whole)
        if id(model) not in self.chunks or self.chunks[id(model)].ddp is not ddp:
            options = self._options
            if (found := self._searched) is not None and options.memory_budget is None:
                # a chunk's budget has no gradients that DDP adds up
                summed = 0 if ddp is None else found.gradient_bytes[stage]
                options = replace(options, memory_budget=found.memory_budgets[stage] - summed)
            within = "" if model is whole else type(whole).__name__
            self.chunks[id(model)] = Chunk(model, ddp, options, within)
        return self.chunks[id(model)]


def innermost(model: Any) -> tuple[Any, Any]:
    """The part of a model that is planned, inside all of its wrappers, and the wrapper that is DDP,
    if any."""
    model, ddp = unwrapped(model)
    return part_of(model), ddp


def unwrapped(model: Any) -> tuple[Any, Any]:
    ddp = None
    while hasattr(model, "module"):
        ddp = model if hasattr(model, "bucket_groups") else ddp
        model = model.module
    return model, ddp


def part_of(model: Any) -> Any:
    """Of a model that also sees or hears, or that holds such a one, the language model: the shapes
    of what runs before that are those of each microbatch's pictures."""
    held = (getattr(each, "language_model", None) for each in (model, *model.children()))
    return next((each for each in held if each is not None), model)


def _refused_slices(chunks: list[Chunk], place: RankPlace) -> OptionError | None:
    """The first OptionError that was found on any rank, whose chunk has run as plain Megatron. All
    ranks call this together, when nobody waits for a rank any more."""
    found = [f"stage {place.stage}: {chunk.refused}" for chunk in chunks if chunk.refused]
    told = [json.dumps(found).encode()]
    if dist.is_initialized():
        with exchange_of(range(dist.get_world_size()), FIRST_STEP_S) as exchange:
            told = told if exchange is None else exchange.gather("refused slices", told[0])
    first = next((why for refused in map(json.loads, told) for why in refused), None)
    return None if first is None else OptionError(first)


def _joins_all(models: list[Any], given: dict[str, Any]) -> bool:
    """Does a step of plain Megatron end nowhere before it has begun on every rank? Replicas are
    joined by DDP alone."""
    from megatron.core import parallel_state

    replicas = getattr(given.get("pg_collection"), "dp", None)
    if replicas is None and parallel_state.model_parallel_is_initialized():
        replicas = parallel_state.get_data_parallel_group()
    if replicas is not None and replicas.size() == 1:
        return True
    module, ddp = innermost(models[0])
    return ddp is not None and module.config.finalize_model_grads_func is not None


def _joined(before: Mapping[Any, int], ranks: Iterable[int]) -> bool:
    """Has a collective since then joined this rank with one of these?"""
    moved = [group for group, n in issued().items() if n > before.get(group, n)]
    return any(not set(ranks).isdisjoint(dist.get_process_group_ranks(g)) for g in moved)


def _where(groups: Any, why: str, alike: dict[str, Any]) -> RankPlace:
    """Find this rank's stage and the ranks that run the same, and why any rank is refused. All
    ranks call this together, with `alike` options: on them depend the order of transfers and what
    ranks ask each other."""
    from megatron.core import parallel_state

    pp = getattr(groups, "pp", None) or parallel_state.get_pipeline_model_parallel_group()
    if not dist.is_initialized():
        return RankPlace(0, 1, refused=why)
    with exchange_of(range(dist.get_world_size()), FIRST_STEP_S) as exchange:
        if exchange is None:
            return RankPlace(pp.rank(), pp.size(), refused=why)
        told = exchange.gather("stages", json.dumps([pp.rank(), why]).encode())
        for name, value in alike.items():
            exchange.agree(name, f"{name}={value!r}", "pass the same options on every rank")
    stages, reasons = zip(*map(json.loads, told), strict=True)
    ranks = tuple(rank for rank, stage in enumerate(stages) if stage == pp.rank())
    same = getattr(groups, "tp_cp", None) or parallel_state.get_tensor_and_context_parallel_group()
    peers = tuple(dist.get_process_group_ranks(same))
    refused = [f"{why} (on rank {rank})" for rank, why in enumerate(reasons) if why]
    if set(reasons) != {why}:
        why = next(iter(refused), "")
    return RankPlace(pp.rank(), pp.size(), ranks, peers, why)
