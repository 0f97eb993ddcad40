"""`run` runs 1F1B with merged microbatches: each steady tick of a stage is one graph.

Tick t of stage r of p runs the forward of microbatch t - r and the backward of microbatch t - 2p +
1 + r: they are 2(p - r) - 1 microbatches apart. Forwards, backwards and transfers are Megatron's
own functions, in another order. Microbatches keep their order, so all sums stay the same.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from overlapc.megatron.chunk import Chunk


def refused(given: dict[str, Any], config: Any) -> str:
    """The reason why a step cannot run merged; "" if it can."""
    from megatron.core.pipeline_parallel import schedules

    if not hasattr(schedules, "P2PCommunicator"):
        return "megatron-core before 0.14"
    if given.get("adjust_tensor_shapes_fn") is not None or config.variable_seq_lengths:
        return "shapes that change from microbatch to microbatch"
    line = given.get("p2p_communicator")
    if line is not None and type(line) is not schedules.P2PCommunicator:
        return f"a communicator between stages that is a {type(line).__name__}"
    return ""


def lag(stage: int, stages: int) -> int:
    """How many microbatches a forward is ahead of the backward in the same tick."""
    return 2 * (stages - stage) - 1


def run(chunk: Chunk, real: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
    """Run a step. Megatron's own schedule function runs with no microbatches, for all work around
    them; the ticks run when it comes to the gradients."""
    config = chunk.module.config
    ticks = _Ticks.of(chunk, given)
    finalize = config.finalize_model_grads_func
    with contextlib.ExitStack() as stack:
        for name in ("no_sync_func", "grad_sync_func", "finalize_model_grads_func"):
            stack.callback(setattr, config, name, getattr(config, name))

        def finalized(models: Any, tokens: Tensor | None = None, **more: Any) -> Any:
            ticks.run()
            return finalize(models, None if tokens is None else ticks.tokens, **more)

        config.no_sync_func = config.grad_sync_func = None
        if finalize is not None:
            config.finalize_model_grads_func = finalized
        real(**{**given, "num_microbatches": 0})
        if finalize is None:
            ticks.run()
    return ticks.store


@dataclass
class _Ticks:
    chunk: Chunk
    given: dict[str, Any]
    schedules: ModuleType
    data: Any
    model: Any
    config: Any
    line: Any  # to the stages before and behind
    tensor_ranks: Any  # process groups, as they were handed in or Megatron's own
    context_ranks: Any
    no_sync: Callable[[], Any]
    grad_sync: Callable[..., Any] | None
    tokens: Tensor
    store: list[Any] = field(default_factory=list)
    inputs: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    @staticmethod
    def of(chunk: Chunk, given: dict[str, Any]) -> _Ticks:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import schedules

        def one(value: Any) -> Any:
            return value[0] if isinstance(value, list) else value

        config = chunk.module.config
        line, groups = given.get("p2p_communicator"), given.get("pg_collection")
        if line is None:
            stages = parallel_state.get_pipeline_model_parallel_group()
            line = schedules.P2PCommunicator(pp_group=stages, config=config)
        tensor_ranks = (
            getattr(groups, "tp", None) or parallel_state.get_tensor_model_parallel_group()
        )
        context_ranks = getattr(groups, "cp", None) or parallel_state.get_context_parallel_group()
        return _Ticks(
            chunk,
            given,
            schedules,
            one(given["data_iterator"]),
            one(given["model"]),
            config,
            line,
            tensor_ranks,
            context_ranks,
            config.no_sync_func or contextlib.nullcontext,
            config.grad_sync_func,
            torch.zeros([], dtype=torch.int, device=torch.cuda.current_device()),
        )

    def run(self) -> None:
        group, count = self.line.pp_group, self.given["num_microbatches"]
        stages, stage = group.size(), group.rank()
        shape = self._shape()
        came: Any = None
        gradient: Any = None
        unsynced = contextlib.ExitStack()
        unsynced.enter_context(self.no_sync())
        ahead = lag(stage, stages)
        for forward in range(-1 if stage else 0, count + ahead):
            backward = forward - ahead
            runs_forward, runs_backward = 0 <= forward < count, backward >= 0
            out = back = None
            if runs_backward:
                if backward == count - 1 and (self.grad_sync is None or stage == 0):
                    unsynced.close()
                self._backward(backward, gradient if stage < stages - 1 else None)
            if runs_forward:
                self.inputs[forward] = came
                out = self._forward(forward, stage == stages - 1)
            if runs_backward:
                given = self.inputs.pop(backward)
                back = None if stage == 0 else self.chunk.gradient_of(given)
            sent = out if stage < stages - 1 else None
            comes = stage > 0 and forward + 1 < count
            returns = stage < stages - 1 and 0 <= backward + 1 < count
            came = gradient = None
            if sent is not None or back is not None or comes or returns:
                came, gradient = self.line.send_forward_backward_recv_forward_backward(
                    sent, back, comes, returns, shape
                )
            if sent is not None:
                self.schedules.deallocate_output_tensor(
                    sent, self.config.deallocate_pipeline_outputs
                )
        unsynced.close()
        if self.grad_sync is not None and stage > 0:
            self.grad_sync(self.model.parameters())

    def _forward(self, number: int, last: bool) -> Any:
        given = self.given
        out, tokens = self.schedules.forward_step(
            given["forward_step_func"],
            self.data,
            self.model,
            given["num_microbatches"],
            self.inputs[number],
            self.store,
            self.config,
            cp_group_size=self.context_ranks.size(),
            collect_non_loss_data=given.get("collect_non_loss_data", False),
            is_first_microbatch=number == 0,
            current_microbatch=number,
            is_last_stage=last,
        )
        self.tokens += tokens
        self.outputs[number] = out
        return out

    def _backward(self, number: int, gradient: Any) -> None:
        step = self.schedules.backward_step
        kind = []
        if "model_type" in inspect.signature(step).parameters:  # up to 0.16
            kind = [self.schedules.get_model_type(self.model)]
        step(self.inputs[number], self.outputs.pop(number), gradient, *kind, self.config)

    def _shape(self) -> Any:
        given = self.given
        shapes = self.schedules.get_tensor_shapes(
            seq_length=given["seq_length"],
            micro_batch_size=given["micro_batch_size"],
            decoder_seq_length=given.get("decoder_seq_length"),
            config=self.config,
            tp_group=self.tensor_ranks,
            cp_group=self.context_ranks,
        )
        return shapes[0]
