"""`givens` reads the microbatches of a step, and `kind_of` says what those of one graph share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from overlapc.core.errors import OptionError


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


def kind_of(given: Given) -> Any:
    """The key that microbatches of one graph share: structure, shapes, and the types of all that is
    no tensor."""
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


def inputs_of(
    names: Iterable[str], state: Mapping[str, Any], each: Sequence[Given]
) -> list[list[Any]]:
    """A graph's inputs by name in `state`, which is that of the first slice or microbatch, and in
    those of the others: what they are given is their own."""
    mine = [state[name] for name in names]
    first, *others = [tree_leaves((one.args, one.kwargs)) for one in each] or [[]]
    place = {id(leaf): i for i, leaf in enumerate(first) if isinstance(leaf, Tensor)}
    parts = [[leaves[place[id(x)]] if id(x) in place else x for x in mine] for leaves in others]
    return [mine, *parts]


def like_these(each: Sequence[Given], batch: Given | None, all_: Sequence[Given]) -> list[Given]:
    """The slices of a batch, and those of a step's other batches that are of the same kind."""
    kind = kind_of(each[0])
    others = (other.cut(len(each)) for other in all_ if other is not batch)
    return [*each, *(part for parts in others if kind_of(parts[0]) == kind for part in parts)]


def in_runs(each: Sequence[Given]) -> list[tuple[Any, list[Given]]]:
    """Microbatches of one kind that follow each other, with their kind."""
    return [(kind, list(run)) for kind, run in groupby(each, kind_of)]


def alike(each: Sequence[Given]) -> Any:
    """The kind that all microbatches of a step share; raise if they differ."""
    first, *others = map(kind_of, each)
    for i, found in enumerate(others, 1):
        if found != first:
            raise OptionError(
                f"microbatch {i} has {_said(found)}, microbatch 0 has {_said(first)}; expected "
                "microbatches that are alike, on all ranks, where ranks communicate (as FSDP2 does "
                "to gather parameters): pad them, or call overlapc.optimize(model) on each"
            )
    return first


def _said(kind: Any) -> str:
    """Say what `kind_of` looks at."""

    def one(leaf: Any) -> str:
        if isinstance(leaf, str):
            return leaf
        shape, dtype, device, gradient = leaf
        text = f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
        return f"{text} that requires a gradient" if gradient else text

    return ", ".join(map(one, kind[1])) or "no arguments"


def cut_batch(arguments: Any, count: int, gradients: bool = False) -> list[Any]:
    """Cut the arguments of a call: tensors along dimension 0; every slice has all others. With
    `gradients` inputs may require one; their slices are leaves that do."""
    flat, spec = tree_flatten(arguments)
    for leaf in flat:
        if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise OptionError(
                f"slices={count}: an input is a {kind} tensor; expected dense ones, which can be "
                "cut along dimension 0"
            )
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in flat))
        raise OptionError(
            f"slices={count}: found no tensors among the inputs, but {kinds or 'nothing'}; "
            "expected a batch in tensors, or in lists, tuples and dicts of them: register other "
            "classes with torch.utils._pytree"
        )
    sizes = {leaf.shape[0] for leaf in tensors}
    if len(sizes) != 1 or sizes.pop() % count:
        raise OptionError(
            f"slices={count}: found inputs of shapes {[tuple(leaf.shape) for leaf in tensors]}; "
            "expected one size of dimension 0, the batch, that it divides; an input without the "
            "batch may be an attribute of the model instead, a buffer say"
        )
    alike = [leaf for leaf in flat if isinstance(leaf, Tensor) and not leaf.dim()]
    for leaf in alike if gradients else [*tensors, *alike]:
        if leaf.requires_grad:
            raise OptionError(f"slices={count}: an input requires a gradient; expected it detached")

    def cut_leaf(leaf: Any) -> Sequence[Any]:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return [leaf] * count
        parts = leaf.detach().chunk(count)
        return [part.requires_grad_(leaf.requires_grad) for part in parts]

    each = map(cut_leaf, flat)
    return [tree_unflatten(leaves, spec) for leaves in zip(*each, strict=True)]
