"""`Framework` is how a model is run: which kernels are fused, what becomes of gradients and of the
optimizer, and what the host takes to launch an op. `known.py` has those that are known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, TypeVar

from overlapc.core.errors import OptionError
from overlapc.search.models.transformer import Transformer

_M = TypeVar("_M")


def slowest_of(count: int) -> float:
    """How far the slowest of so many is above the average, in standard deviations: the expected
    largest of normal numbers, as Blom (1958) approximates it."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


@dataclass(frozen=True)
class Framework:
    """How a model is run; by default as overlapc runs it."""

    name: str
    source: str
    # Of attention, softmax, norm, rotary, loss: what is not one kernel; bias, where gradients of a
    # GPT's biases are kernels; gate, where a gate and what it gates are two products, each with an
    # input of its own; scores, where each rank gathers those of all words; and replaced, where a
    # fused loss writes the scores' gradient in their place
    unfused: str = ""
    attention: float = 1.0  # how long fused attention takes, or unfused one's ops on all scores,
    # beside the best kernels
    of_2023: bool = False  # its libraries, which were written for Ampere, are
    loss: float = 1.0  # how long a fused loss takes, beside what its kernels move
    loss_bytes: int = 0  # of memory at the loss for a token and a word, if more than its ops take
    dropout: bool = False  # of which the one before a sum is one kernel with it
    fused_gate: bool = False  # a gated activation is one kernel, forward and backward
    fp16: bool = False  # it trains in fp16, not in bf16
    shards_optimizer: bool = True  # over the replicas
    # Weights and gradients are divided over the replicas, too, layer by layer (`sharded`).
    # A layer's weights are gathered for its forward, and kept until its backward; or they are
    # gathered again for it
    gathers: Literal["", "once", "twice"] = ""
    gather_moves: int = 0  # bytes that are copied for an element behind its gathering
    in_node: bool = False  # they are divided over the replicas of a node alone
    gradient_bytes: int = 4  # of an element, as it is added up and summed over replicas
    hides_reduction: bool = True  # under the backward of the last microbatch
    hides_sums: bool = True  # of tensor-parallel ranks' gradients, under a product for a weight's
    # Buckets of gradients are summed under the last backward, and weights gathered under the first
    # forward; the elements of a bucket, and of one for each replica, of which the larger counts
    buckets: tuple[int, int] = 0, 0
    summed_bytes: int = 0  # of an element on its way between replicas, if not as it is kept
    sums_all: bool = False  # on every replica, though the optimizer is divided
    summing_moves: int = 0  # bytes that are copied for an element before and behind the sum
    added_moves: int = 10  # bytes that move for an element of a gradient to be added up
    half_moves: int = 0  # the same where sharded gradients are summed in bf16
    uncovered: float = 0.0  # of the time of what experts' grouped products move, beside them
    # Bytes that the optimizer moves for an element: float32 weight and moments read and written,
    # gradient read, bf16 weight written
    optimizer_moves: int = 2 * 12 + 4 + 2
    # Bytes that move for an element of all gradients that a rank holds, however the optimizer is
    # divided; and for their scaling, where there are replicas
    held_moves: int = 0
    scaling_moves: int = 0
    # How far steps of replicas on several nodes are apart (their standard deviation, as a part of a
    # step), of which all wait for the slowest
    stragglers: float = 0.0
    slower: float = 1.0  # than its kernels alone, for reasons that nobody gave: calibrated
    host_ns: int = 0  # that the host takes for an op
    host_collective_ns: int = 0
    # Ops of a layer's router, of sorting its tokens and of taking them to experts and back, that
    # the host launches beside those that the search's own module has: in a forward, in a backward
    expert_ops: tuple[int, int] = 0, 0
    # Bytes that move in a forward and in a backward for each number that experts with biases make
    bias_moves: tuple[int, int] = 0, 0
    graphs: bool = False  # a step is one CUDA graph
    blocking: bool = False  # each kernel waits until the one before has ended to be launched
    # Layers are recomputed by PyTorch's checkpoints; norms, losses and casts are its own kernels
    # ("eager"), or its compiler's
    pytorch: Literal["", "eager", "compiled"] = ""
    whole_layers: bool = False  # checkpoints recompute a layer to its last op, also what none needs
    beside: bool = False  # tensor-parallel traffic runs while products do (`beside`)
    delayed: bool = False  # scales of FP8 follow from earlier steps
    # How tokens go to experts: once for each of them, or once for each node (`dispatch`);
    # "hybridep" also brings them into the experts' order, and back, while it sends them
    dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    # As how many layers the table of words, and the last norm and the scores, count when stages get
    # as many each, the first of them what is left over
    ends: tuple[int, int] = 0, 0
    scatters: bool = True  # between stages on two nodes, tensor-parallel ranks send a part each
    # Schedules of a pipeline that it runs; without any, all that are known
    schedules: tuple[str, ...] = ()
    # Transfers, one after the other, for which ranks of a pipeline wait behind a forward with the
    # stage behind theirs, and behind a backward with the one before: in 1F1B, and interleaved
    waits: tuple[int, int] = 0, 0

    def plan(self, recompute: str) -> str:
        """The solver that plans as this framework runs, by what it recomputes: none, selective,
        full, or of Megatron the modules behind `selective:`."""
        first = "" if self.pytorch or not self.hides_sums else "megatron-"
        kind, colon, _ = recompute.partition(":")
        if kind not in ("none", "selective", "full") or (
            colon and not (first and kind == "selective")
        ):
            more = ", selective:MODULES" if first else ""
            raise OptionError(
                f"recompute {recompute!r}: expected one of none, selective, full{more}"
            )
        if self.whole_layers or not self.hides_sums:
            return "whole" if kind == "full" else kind
        return first + recompute

    def waits_in(self, schedule: str) -> int:
        """For how many transfers a rank waits behind a forward or a backward."""
        plain, interleaved = self.waits
        return {"1f1b": plain, "interleaved": interleaved}.get(schedule, 0)

    def layers_of(self, layers: int, stages: int) -> tuple[int, ...] | None:
        """How many layers each stage gets; None where ends do not count."""
        first, last = self.ends
        each, more = divmod(layers + first + last, stages)
        counts = [each + (stage < more) for stage in range(stages)]
        counts[0] -= first
        counts[-1] -= last
        return tuple(counts) if first + last and min(counts) > 0 else None

    def of(self, model: _M) -> _M:
        """The model as this framework runs it; a block of the user's own is as it is."""
        if isinstance(model, Transformer):
            return replace(
                model, unfused=self.unfused, dropout=self.dropout, fused_gate=self.fused_gate
            )
        return model
