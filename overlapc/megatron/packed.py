"""Packed sequences as a graph sees them: `Sequences` in the place of Megatron's `PackedSeqParams`,
whose lengths are others in each microbatch.

Attention and rotary embedding alone read the lengths, and each is one op. So a graph has a *ticket*
in their place, a number on the host: by it these ops find the microbatch's own object when they
run. No shape of the graph depends on a length. A table of rotary embedding gets a row for each
token of the microbatch: each row is computed by itself, and a sequence reads the first ones.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.passes.opaque.op import called
from overlapc.state.module_state import PLAIN

_NAME = "PackedSeqParams"
_MOST = 4096  # microbatches whose lengths are kept: more than are in flight
_OTHER = "a tensor"  # in the place of what differs between microbatches
_ENDS = "cu_seqlens"  # where each sequence ends: an op gets the longest length with them
_LONGEST = ("max_seqlen_q", "max_seqlen_kv")
_ONLY = (
    "forward reads {} of packed sequences, expected attention and rotary embedding alone to read "
    "what differs between microbatches"
)

_numbers = itertools.count(1)
# By ticket, the latest last. Zero, with which ops are tried out, is one sequence on every rank.
_given: OrderedDict[int, Any] = OrderedDict()
_ROTARY = nn.Module()  # in whose name the op runs


class Sequences:
    """Stands for a PackedSeqParams in a graph. `known` are its fields, with None for tensors and
    lengths."""

    def __init__(self, ticket: Tensor, known: Sequence[tuple[str, Any]], rows: int) -> None:
        self.ticket, self.known, self.rows = ticket, tuple(known), rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("ticket", "known", "rows"):
            raise AttributeError(name)
        if name in _LONGEST:
            return self.rows
        if name not in dict(self.known):
            raise CaptureError(_ONLY.format(name))
        value = dict(self.known)[name]
        return _Lengths(self.ticket, name) if value == _OTHER else value


class _Lengths:
    """Stands for a tensor of a PackedSeqParams."""

    def __init__(self, ticket: Tensor, name: str) -> None:
        self.ticket, self.name = ticket, name

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(_ONLY.format(self.name))

    def __getattr__(self, name: str) -> Any:
        if name in ("ticket", "name"):
            raise AttributeError(name)
        return self.refuse()

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        return next(each for each in given if isinstance(each, cls)).refuse()

    __getitem__ = __len__ = __iter__ = __add__ = __sub__ = __radd__ = __rsub__ = refuse


def _found(ticket: Tensor) -> Any:
    """The PackedSeqParams of a ticket; None within a trace."""
    if type(ticket) is not Tensor:
        return None
    number = int(ticket)
    found = _given.get(number)
    if found is None:
        raise OverlapcError(
            f"the lengths of packed sequences {number} are gone: more than {_MOST} microbatches "
            "are in flight; expected fewer"
        )
    return found if number else found()


def _of_sequences(leaves: Sequence[Any], context: Any) -> Any:
    found = _found(leaves[0])
    return Sequences(leaves[0], *context) if found is None else found


def _of_lengths(leaves: Sequence[Any], name: str) -> Any:
    found = _found(leaves[0])
    if found is None:
        return _Lengths(leaves[0], name)
    value = getattr(found, name)
    return (value, _longest(found)) if name.startswith(_ENDS) else value


register_pytree_node(Sequences, lambda s: ([s.ticket], (s.known, s.rows)), _of_sequences)
register_pytree_node(_Lengths, lambda s: ([s.ticket], s.name), _of_lengths)


def is_packed(value: Any) -> bool:
    return type(value).__name__ == _NAME


def unserved(packed: Any) -> str:
    """What a PackedSeqParams has beside tensors and plain values, which no graph has; or ""."""
    strange = {k: v for k, v in _fields(packed).items() if not isinstance(v, (Tensor, *PLAIN))}
    found = ", ".join(f"a {type(value).__name__} as {name}" for name, value in strange.items())
    return found and f"packed sequences with {found}"


def _fields(packed: Any) -> dict[str, Any]:
    return {each.name: getattr(packed, each.name) for each in fields(packed)}


def standing_for(packed: Any, rows: int) -> Sequences:
    """What a graph is given in the place of this PackedSeqParams. `rows`: tokens of the microbatch
    on all ranks together."""
    given = _fields(packed)
    known = [
        (name, _OTHER if isinstance(value, Tensor) else None if name in _LONGEST else value)
        for name, value in given.items()
    ]
    number, rows = next(_numbers), max(rows, _longest(packed))
    _given[number] = packed
    _given[0] = partial(_one_sequence, packed, rows)
    _given.move_to_end(0)
    while len(_given) > _MOST:
        _given.popitem(last=False)
    return Sequences(torch.tensor(number), known, rows)


def _one_sequence(packed: Any, rows: int) -> Any:
    """The like of it with one sequence of so many tokens."""
    made = copy.copy(packed)
    for name, value in _fields(packed).items():
        if name in _LONGEST and value is not None:
            setattr(made, name, rows)
        elif isinstance(value, Tensor):
            ends = name.startswith(_ENDS)
            setattr(made, name, value.new_tensor([0, rows]) if ends else torch.zeros_like(value))
    return made


def _longest(packed: Any) -> int:
    """The rows of the table of rotary embedding that Megatron makes."""
    return max(int(getattr(packed, name) or 0) for name in _LONGEST)


def tokens_of(module: Any, leaves: Sequence[Any], came: Sequence[Tensor]) -> int:
    """How many tokens the microbatch has on all ranks together."""
    config = getattr(module, "config", None)
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 2]
    if shapes:
        rows = max(shape[1] for shape in shapes)
    else:
        in_parts = getattr(config, "sequence_parallel", False)
        parts = getattr(config, "tensor_model_parallel_size", 1) if in_parts else 1
        rows = max((each.shape[0] for each in came), default=1) * parts
    return int(rows) * int(getattr(config, "context_parallel_size", 1))


def stand_ins() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(Megatron's module, name of a function, what stands for it in a trace)."""
    rope = import_module("megatron.core.models.common.embeddings.rope_utils")
    real = rope.apply_rotary_pos_emb
    signature, made = inspect.signature(real), dict[int, _Rotary]()

    def rotated(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        if not isinstance(given.get("cu_seqlens"), _Lengths):
            return real(*args, **kwargs)
        config = given.pop("config")
        function = made.setdefault(id(config), _Rotary(real, config))
        return called(_ROTARY, function, {}, {}, (), given, others=(dist.ProcessGroup,))

    yield rope, real.__name__, rotated


@dataclass(frozen=True, eq=False)
class _Rotary:
    """Megatron's function with its configuration."""

    real: Callable[..., Any]
    config: Any

    @property
    def __name__(self) -> str:
        return self.real.__name__

    def __call__(self, _: nn.Module, freqs: Tensor, cu_seqlens: Any, **given: Any) -> Any:
        ends, longest = cu_seqlens
        if getattr(self.config, "mrope_section", None) is None:
            freqs = freqs[:longest]  # with a row for each token, it would take them for positions
        return self.real(freqs=freqs, cu_seqlens=ends, config=self.config, **given)
