"""A training step of Megatron with planned chunks in it: `Steps`."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from overlapc.errors import OptionError
from overlapc.megatron import merged as ticks
from overlapc.megatron.chunk import Chunk, Step
from overlapc.megatron.refused import reason
from overlapc.megatron.seams import NAMES
from overlapc.megatron.searched import check
from overlapc.megatron.waits import Waits
from overlapc.planning.options import Options
from overlapc.runtime.exchange import busy
from overlapc.runtime.ranks import exchange_of
from overlapc.search.chosen import Chosen

SCHEDULES = ("1f1b", "merged")
FIRST_STEP_S = 120.0  # how long ranks wait for one another before the first step: data is read


@dataclass(frozen=True)
class Pipeline:
    """Where this rank is: `ranks` run the same stage."""

    stage: int
    stages: int
    ranks: tuple[int, ...]


class Steps:
    """What `patch` was given, and the chunks that run by it."""

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
        self._options, self._merge, self._fill = options, merge, fill
        self._schedule, self._told = schedule, False
        self._searched = searched
        self._pipeline: Pipeline | None = None
        self._refused = ""  # why all of it is left to Megatron
        self.chunks: dict[int, Chunk] = {}  # by id of the module, which they keep alive

    def explain(self) -> str:
        if self._refused:
            return f"runs as plain Megatron: {self._refused}"
        parts = [f"chunk {i}: {c.explain()}" for i, c in enumerate(self.chunks.values())]
        return "\n\n".join(parts) or "nothing planned yet: run a step first"

    def run(self, name: str, real: Callable[..., Any], given: dict[str, Any]) -> Any:
        """A schedule function of Megatron's: validation as it is, training with planned chunks."""
        if given.get("forward_only"):
            return real(**given)
        models = given["model"] if isinstance(given["model"], list) else [given["model"]]
        first = self._pipeline is None
        with busy("the first step of training") if first else contextlib.nullcontext():
            if self._pipeline is None:
                self._begin(models, given)
            if self._refused or self._pipeline is None:
                return real(**given)
            stages = range(self._pipeline.stage, len(models) * self._pipeline.stages)
            numbers = stages[:: self._pipeline.stages]
            chunks = [self._chunk(m, stage) for m, stage in zip(models, numbers, strict=True)]
            merged = self._runs_merged(name, chunks[0].module.config, given)
            with self._in_place(chunks, name, merged, given["num_microbatches"], self._pipeline):
                return ticks.run(chunks[0], real, given) if merged else real(**given)

    def _begin(self, models: list[Any], given: dict[str, Any]) -> None:
        """Before the first step: find this rank's place, and what is refused or not as searched."""
        groups = given.get("pg_collection")
        why = next(filter(None, map(reason, models)), "")
        self._pipeline, self._refused = _where(groups, why)
        if self._refused:
            warnings.warn(
                f"overlapc leaves this run to plain Megatron: {self._refused}",
                RuntimeWarning,
                stacklevel=4,
            )
        elif self._searched is not None:
            from megatron.core import parallel_state

            replicas = getattr(groups, "dp", None) or parallel_state.get_data_parallel_group()
            check(self._searched, innermost(models[0])[0].config, given, replicas.size())

    def _runs_merged(self, name: str, config: Any, given: dict[str, Any]) -> bool:
        if self._schedule != "merged" or name != NAMES[1]:
            return False
        why = ticks.refused(given, config)
        if why and not self._told:
            self._told = True
            warnings.warn(
                f"overlapc runs Megatron's 1F1B, expected schedule='merged': found {why}",
                RuntimeWarning,
                stacklevel=4,
            )
        return not why

    @contextlib.contextmanager
    def _in_place(
        self, chunks: list[Chunk], name: str, merged: bool, microbatches: int, pipeline: Pipeline
    ) -> Iterator[None]:
        """While the block runs, chunks stand in the place of the models' innermost `forward`."""
        before = [vars(chunk.module).get("forward") for chunk in chunks]
        with contextlib.ExitStack() as stack:
            alone = name == NAMES[0]
            waits = None
            if self._fill and not alone and not merged:
                # Of several chunks it is not known here which one's backward comes next.
                waits = Waits([chunk.again for chunk in chunks if len(chunks) == 1])
                stack.enter_context(waits.filled([chunk.module.config for chunk in chunks]))
            behind = pipeline.stages - pipeline.stage  # stages from here to the last
            in_flight = behind + pipeline.stages * (len(chunks) - 1)
            ahead = ticks.lag(pipeline.stage, pipeline.stages) if merged else 0
            step = Step(
                pipeline.ranks,
                microbatches,
                in_flight=1 if alone else ahead or in_flight,
                lag=int(self._merge) if alone else ahead,
                hands=merged,
                first=pipeline.stage == 0,
                waits=waits,
            )
            for chunk, forward in zip(chunks, before, strict=True):
                chunk.begin(step)
                vars(chunk.module)["forward"] = chunk
                stack.callback(_put_back, chunk.module, forward)
            yield
            for chunk in chunks:
                chunk.finish()

    def _chunk(self, model: Any, stage: int) -> Chunk:
        """The chunk of a model in its wrappers, of which one may be DDP."""
        model, ddp = innermost(model)
        if id(model) not in self.chunks or self.chunks[id(model)].ddp is not ddp:
            options = self._options
            if self._searched is not None:
                options = replace(options, memory_budget=self._searched.memory_budgets[stage])
            self.chunks[id(model)] = Chunk(model, ddp, options)
        return self.chunks[id(model)]


def innermost(model: Any) -> tuple[Any, Any]:
    """The module that a model's wrappers end in, and that of the wrappers which is DDP, if any."""
    ddp = None
    while hasattr(model, "module"):
        ddp = model if hasattr(model, "bucket_groups") else ddp
        model = model.module
    return model, ddp


def _put_back(module: Any, forward: Any) -> None:
    del vars(module)["forward"]
    if forward is not None:
        vars(module)["forward"] = forward


def _where(groups: Any, why: str) -> tuple[Pipeline, str]:
    """This rank's stage, and who runs the same; and why a rank is refused, if one is. All ranks
    find out together."""
    from megatron.core import parallel_state

    pp = getattr(groups, "pp", None) or parallel_state.get_pipeline_model_parallel_group()
    if not dist.is_initialized():
        return Pipeline(0, 1, (0,)), why
    with exchange_of(range(dist.get_world_size()), FIRST_STEP_S) as exchange:
        if exchange is None:
            return Pipeline(pp.rank(), pp.size(), (0,)), why
        told = exchange.gather("stages", json.dumps([pp.rank(), why]).encode())
    stages, reasons = zip(*map(json.loads, told), strict=True)
    ranks = tuple(rank for rank, stage in enumerate(stages) if stage == pp.rank())
    refused = [f"{why} (on rank {rank})" for rank, why in enumerate(reasons) if why]
    alike = set(reasons) == {why}
    return Pipeline(pp.rank(), pp.size(), ranks), why if alike else next(iter(refused), "")
