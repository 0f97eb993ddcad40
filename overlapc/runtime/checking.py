"""`optimize(verify=True)` compares one training step of eager's with one of the plan, bit by bit.

Both begin with the random state, buffers and inputs of the current call. If results differ, a few
more steps find the first op of eager's whose result the plan does not make, and whether PyTorch's
own `torch.compile` makes the same difference. Afterwards the model and the random states are as
before (`snapshot.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from overlapc.passes.capture.model_files import is_models
from overlapc.passes.draws import random_states
from overlapc.runtime.restored import as_it_was, without_gradients
from overlapc.tools.reach import autograd_nodes

Run = Callable[..., Any]
_NOTHING = contextlib.nullcontext()
_OTHER = "gradient of a tensor outside of the model, id"


@dataclass(frozen=True)
class Checked:
    """The result of a check. `op` is the first op of eager's whose result the plan does not
    make."""

    different: tuple[str, ...] = ()
    op: str = ""
    blame: str = ""

    def __str__(self) -> str:
        if not self.different:
            return "checked: bitwise eager's"
        others = len(self.different) - 1
        more = f" and {others} more" if others else ""
        return f"checked: not as eager: {self.different[0]}{more}; first at {self.op}; {self.blame}"


def check(
    model: nn.Module, planned: Run, watched: Callable[[Any], Any], args: Any, kwargs: Any
) -> Checked:
    """Run one step of `model` and one of `planned`, its compiled twin, on copies of the inputs.

    `watched(mode)` makes the graphs of `planned` run under a mode: under an outer mode Dynamo would
    compile nothing.
    """

    def step(run: Run, backward: Any = _NOTHING) -> dict[str, Any]:
        with as_it_was(model):
            return _step(model, run, backward, args, kwargs)

    def observed(*given: Any, **named: Any) -> Any:
        with eagers:
            return model(*given, **named)

    expected, found = step(model), step(planned)
    # A leaf that a forward makes for itself is of one step alone.
    compared = [n for n in expected if n in found or not n.startswith(_OTHER)]
    different = tuple(name for name in compared if expected[name] != found.get(name))
    if not different:
        return Checked()
    eagers, plans = _Stream(), _Stream()
    step(observed, eagers)
    with watched(plans):
        step(planned, plans)
    op = next((op for value, op in eagers.made if value not in plans.values), "the last op")
    return Checked(different, op, _blame(model, found, step))


def _blame(model: nn.Module, found: dict[str, Any], step: Callable[[Run], dict[str, Any]]) -> str:
    for backend in ("eager", "aot_eager"):
        try:
            compiled = step(torch.compile(model, backend=backend))
        except Exception as error:  # with other settings than optimize's it may not trace the model
            return f'torch.compile(backend="{backend}") ends in a {type(error).__name__}'
        if compiled == found:
            return f'torch.compile(backend="{backend}") gives what the plan gives'
    return "torch.compile gives something else again"


def _step(model: nn.Module, run: Run, mode: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Name -> bits of every result, gradient and buffer, and of the random state.

    The backward runs under `mode`, and outside of autocast, as PyTorch wants it.
    """
    given = tree_map_only(Tensor, _copy, (args, kwargs))
    results = [*_tensors(run(*given[0], **given[1]))]
    bits: dict[str, Any] = {f"result {i}": _bits(out) for i, out in enumerate(results)}
    ends = [out for out in results if out.requires_grad]
    inputs = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
    named = [*reversed([*model.named_parameters()])]  # as a backward goes
    known = {id(tensor) for tensor in (*inputs, *(parameter for _, parameter in named))}
    others = [leaf for leaf in _leaves(ends) if id(leaf) not in known]
    with without_gradients(others), torch._C._DisableAutocast(), mode:
        torch.autograd.backward(ends, [torch.ones_like(out) for out in ends])
        bits |= {f"gradient of input {i}": _bits(value.grad) for i, value in enumerate(inputs)}
        bits |= {f"gradient of {name}": _bits(p.grad) for name, p in named}
        bits |= {f"{_OTHER} {id(leaf):#x}": _bits(leaf.grad) for leaf in others}
    bits |= {f"buffer {name}": _bits(buffer) for name, buffer in model.named_buffers()}
    bits |= {f"parameter {name}": _bits(parameter) for name, parameter in named}
    return bits | {"random state": _bits(torch.cat(random_states()))}


def _leaves(ends: list[Tensor]) -> list[Tensor]:
    """The tensors that a backward from `ends` adds gradients to."""
    return [node.variable for node in autograd_nodes(ends) if hasattr(node, "variable")]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _tensors(results: Any) -> Iterator[Tensor]:
    """The tensors among a model's results, also within HuggingFace's output classes."""
    for value in tree_leaves(results):
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "to_tuple"):
            yield from _tensors(value.to_tuple())


def _bits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    with torch.no_grad():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
        whole = whole if whole.layout == torch.strided else whole.to_dense()
        raw = whole.cpu().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    digest = hashlib.blake2b(raw.numpy().data, digest_size=16).digest()
    return str(tensor.dtype), str(tensor.layout), tuple(tensor.shape), digest


class _Stream(TorchDispatchMode):
    """Records every value that ops make, in order, with the op and its line."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, str]] = []

    @property
    def values(self) -> set[Any]:
        return {value for value, _ in self.made}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        with torch.utils._python_dispatch._disable_current_modes():
            for value in tree_leaves(made):
                # Memory that is not written yet has no value.
                if isinstance(value, Tensor) and not str(op).startswith("aten.empty"):
                    self.made.append((_bits(value), f"{op}, {_line()}"))
        return made


def _line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if is_models(frame.filename):
            return f'File "{frame.filename}", line {frame.lineno}'
    return "in the backward"
