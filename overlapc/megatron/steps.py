"""A training step of Megatron with planned chunks in it: `Steps`."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from overlapc.megatron.chunk import Chunk
from overlapc.megatron.refused import reason
from overlapc.megatron.searched import check
from overlapc.planning.options import Options
from overlapc.runtime.exchange import busy
from overlapc.runtime.ranks import exchange_of
from overlapc.search.chosen import Chosen

FIRST_STEP_S = 120.0  # how long ranks wait for one another before the first step: data is read


@dataclass(frozen=True)
class Pipeline:
    """Where this rank is: `ranks` run the same stage."""

    stage: int
    stages: int
    ranks: tuple[int, ...]


class Steps:
    """What `patch` was given, and the chunks that run by it."""

    def __init__(self, options: Options, merge: bool, searched: Chosen | None = None) -> None:
        self._options, self._merge, self._searched = options, merge, searched
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
            with self._chunks_in(models, name, given["num_microbatches"], self._pipeline):
                return real(**given)

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

    @contextlib.contextmanager
    def _chunks_in(
        self, models: list[Any], name: str, microbatches: int, pipeline: Pipeline
    ) -> Iterator[None]:
        """While the block runs, chunks stand in the place of the models' innermost `forward`."""
        stages = range(pipeline.stage, pipeline.stages * len(models), pipeline.stages)
        chunks = [self._chunk(model, stage) for model, stage in zip(models, stages, strict=True)]
        alternating = name == "forward_backward_no_pipelining"
        behind = pipeline.stages - pipeline.stage  # stages from here to the last
        in_flight = 1 if alternating else behind + pipeline.stages * (len(models) - 1)
        before = [vars(chunk.module).get("forward") for chunk in chunks]
        try:
            for chunk in chunks:
                chunk.begin(pipeline.ranks, microbatches, in_flight, alternating)
                vars(chunk.module)["forward"] = chunk
            yield
            for chunk in chunks:
                chunk.finish()
        finally:
            for chunk, forward in zip(chunks, before, strict=True):
                del vars(chunk.module)["forward"]
                if forward is not None:
                    vars(chunk.module)["forward"] = forward

    def _chunk(self, model: Any, stage: int) -> Chunk:
        """The chunk of a model in its wrappers, of which one may be DDP."""
        model, ddp = innermost(model)
        if id(model) not in self.chunks or self.chunks[id(model)].ddp is not ddp:
            options = self._options
            if self._searched is not None:
                options = replace(options, memory_budget=self._searched.memory_budgets[stage])
            self.chunks[id(model)] = Chunk(model, ddp, options, self._merge)
        return self.chunks[id(model)]


def innermost(model: Any) -> tuple[Any, Any]:
    """The module that a model's wrappers end in, and that of the wrappers which is DDP, if any."""
    ddp = None
    while hasattr(model, "module"):
        ddp = model if hasattr(model, "bucket_groups") else ddp
        model = model.module
    return model, ddp


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
