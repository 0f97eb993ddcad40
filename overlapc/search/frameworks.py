"""A framework is how a model is run: which kernels are fused, what becomes of gradients and of the
optimizer, and what the host takes to launch an op. What it fuses decides how often activations
cross memory, which is most of what separates measured steps from the flops of their matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from overlapc.errors import OptionError
from overlapc.search.models import Transformer

_M = TypeVar("_M")


@dataclass(frozen=True)
class Framework:
    """How a model is run; by default as overlapc runs it."""

    name: str
    source: str
    unfused: str = ""  # of attention, softmax, norm, loss: what is not one kernel
    attention: float = 1.0  # how long fused attention takes, beside the best kernels
    dropout: bool = False
    shards_optimizer: bool = True  # over the replicas
    gradient_bytes: int = 4  # of an element, as it is added up and summed over replicas
    hides_reduction: bool = True  # under the backward of the last microbatch
    added_moves: int = 10  # bytes that move for an element of a gradient to be added up
    slower: float = 1.0  # than its kernels alone, for reasons that nobody gave: calibrated
    host_ns: int = 0  # that the host takes for an op
    host_collective_ns: int = 0

    @property
    def plans(self) -> dict[str, str]:
        """The solvers that plan as this framework runs, by what it recomputes."""
        first = "" if self.name == "overlapc" else "megatron-"
        return {again: first + again for again in ("none", "selective", "full")}

    def of(self, model: _M) -> _M:
        """The model as this framework runs it; a block of the user's own is as it is."""
        if isinstance(model, Transformer):
            return replace(model, unfused=self.unfused, dropout=self.dropout)
        return model


FRAMEWORKS = {
    each.name: each
    for each in (
        Framework("overlapc", "this project"),
        Framework(
            "megatron",
            "Megatron-LM with its defaults and a distributed optimizer: kernels of Transformer "
            "Engine, weight gradients added up in float32 by the matrix product itself",
            hides_reduction=False,
            added_moves=0,
        ),
        Framework(
            "megatron-2021",
            "Megatron-LM before FlashAttention: fused softmax, dropout, gradients in half "
            "precision that are summed when all are there, an optimizer on every replica",
            unfused="attention loss",
            dropout=True,
            shards_optimizer=False,
            gradient_bytes=2,
            hides_reduction=False,
            added_moves=6,
            host_ns=48_000,
            host_collective_ns=25_000,
        ),
        *(
            Framework(
                f"scaling{kind}",
                "Aleph Alpha's Scaling, as Hagemann et al. (2023) ran it" + what,
                unfused=unfused,
                attention=attention,
                gradient_bytes=2,
                hides_reduction=False,
                added_moves=6,
                slower=1.14,
            )
            for kind, what, unfused, attention in (
                ("", ", with FlashAttention 2 and a fused norm", "loss", 1.0),
                ("-unfused-norm", ", with FlashAttention 2", "norm loss", 1.0),
                ("-flash-1", ", with FlashAttention 1", "norm loss", 2.5),
                ("-fused-softmax", ", with Megatron's softmax", "norm attention loss", 1.0),
                ("-torch", ", op by op", "norm attention softmax loss", 1.0),
            )
        ),
    )
}


OURS = FRAMEWORKS["overlapc"]


def find_framework(name: str) -> Framework:
    if name not in FRAMEWORKS:
        raise OptionError(f"framework {name!r}: expected one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
