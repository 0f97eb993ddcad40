"""A training step of Megatron with planned chunks in it: `Steps`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from overlapc.megatron.chunk import Chunk
from overlapc.planning.options import Options
from overlapc.runtime.exchange import busy
from overlapc.runtime.ranks import exchange_of

FIRST_STEP_S = 120.0  # how long ranks wait for one another before the first step: data is read


@dataclass(frozen=True)
class Pipeline:
    """Where this rank is: `ranks` run the same stage."""

    stage: int
    stages: int
    ranks: tuple[int, ...]


class Steps:
    """What `patch` was given, and the chunks that run by it."""

    def __init__(self, options: Options, merge: bool) -> None:
        self._options, self._merge = options, merge
        self._pipeline: Pipeline | None = None
        self.chunks: dict[int, Chunk] = {}  # by id of the module, which they keep alive

    def explain(self) -> str:
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
                self._pipeline = _where(given.get("pg_collection"))
            with self._chunks_in(models, name, given["num_microbatches"], self._pipeline):
                return real(**given)

    @contextlib.contextmanager
    def _chunks_in(
        self, models: list[Any], name: str, microbatches: int, pipeline: Pipeline
    ) -> Iterator[None]:
        """While the block runs, chunks stand in the place of the models' innermost `forward`."""
        chunks = [self._chunk(model) for model in models]
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

    def _chunk(self, model: Any) -> Chunk:
        """The chunk of a model in its wrappers, of which one may be DDP."""
        ddp = None
        while hasattr(model, "module"):
            ddp = model if hasattr(model, "bucket_groups") else ddp
            model = model.module
        if id(model) not in self.chunks or self.chunks[id(model)].ddp is not ddp:
            self.chunks[id(model)] = Chunk(model, ddp, self._options, self._merge)
        return self.chunks[id(model)]


def _where(groups: Any) -> Pipeline:
    """This rank's stage, and who runs the same. All ranks find out together."""
    from megatron.core import parallel_state

    pp = getattr(groups, "pp", None) or parallel_state.get_pipeline_model_parallel_group()
    if not dist.is_initialized():
        return Pipeline(0, 1, (0,))
    with exchange_of(range(dist.get_world_size()), FIRST_STEP_S) as exchange:
        if exchange is None:
            return Pipeline(pp.rank(), pp.size(), (0,))
        stages = [int(data) for data in exchange.gather("stages", str(pp.rank()).encode())]
    ranks = tuple(rank for rank, stage in enumerate(stages) if stage == pp.rank())
    return Pipeline(pp.rank(), pp.size(), ranks)
