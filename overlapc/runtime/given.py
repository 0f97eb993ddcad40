"""`givens` reads the microbatches of a step, and `alike` says what they have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from overlapc.errors import OptionError
from overlapc.runtime.slices import cut_batch


@dataclass(frozen=True)
class Given:
    """A microbatch as the arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(microbatch: Any) -> Given:
        if isinstance(microbatch, (tuple, list)):
            return Given(tuple(microbatch), {})
        if isinstance(microbatch, Mapping):
            return Given((), dict(microbatch))
        return Given((microbatch,), {})

    def cut(self, slices: int, gradients: bool = False) -> list[Given]:
        return [Given(*each) for each in cut_batch((self.args, self.kwargs), slices, gradients)]


def givens(microbatches: Sequence[Any]) -> list[Given]:
    """Each microbatch of a step as arguments."""
    if isinstance(microbatches, (Tensor, Mapping)) or not isinstance(microbatches, Iterable):
        raise OptionError(
            f"TrainStep was given a {type(microbatches).__name__}, expected a list of "
            "microbatches: [x] is one of one argument, [(x, y)] is one of two arguments"
        )
    each = [Given.of(microbatch) for microbatch in microbatches]
    if not each:
        raise OptionError("TrainStep was given no microbatches; expected at least one")
    return each


def alike(each: Sequence[Given]) -> Any:
    """The key that all microbatches of a step must share; raise if they differ."""

    def describe(given: Given) -> tuple[Any, ...]:
        flat, spec = tree_flatten((given.args, given.kwargs))
        if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in flat):
            raise OptionError(
                "a microbatch holds a tensor that was computed under autograd; expected inputs: "
                "detach it, or make what computes it a part of the model"
            )
        return str(spec), tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else type(leaf).__name__
            for leaf in flat
        )

    first = describe(each[0])
    for i, given in enumerate(each):
        if (found := describe(given)) != first:
            raise OptionError(
                f"microbatch {i} has {_said(found[1])}, microbatch 0 has {_said(first[1])}; "
                "expected microbatches that are alike: pad them, or give those of other shapes to "
                "a step of their own"
            )
    return first


def _said(leaves: Sequence[Any]) -> str:
    """Say what `alike` looks at: tensors, and the types of all else."""

    def one(leaf: Any) -> str:
        if isinstance(leaf, str):
            return leaf
        shape, dtype, device, gradient = leaf
        kind = f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
        return f"{kind} that requires a gradient" if gradient else kind

    return ", ".join(map(one, leaves)) or "no arguments"
