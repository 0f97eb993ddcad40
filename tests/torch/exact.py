"""Run the same training steps twice, eagerly and optimized, and compare every bit of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree


def needs_torch(version: str) -> pytest.MarkDecorator:
    found = tuple(map(int, torch.__version__.split(".")[:2]))
    wanted = tuple(map(int, version.split(".")))
    return pytest.mark.skipif(found < wanted, reason=f"torch {version} or newer does so")


@dataclass(frozen=True)
class Batch:
    """What one call of a model takes."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def randn(*size: int, seed: int = 0, requires_grad: bool = False) -> torch.Tensor:
    made = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_(requires_grad)


def leaves(value: Any) -> Iterator[Any]:
    """What is inside dicts, sequences and dataclasses, in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def fresh(batch: Batch) -> Batch:
    """A copy whose tensors are leaves with gradients of their own; aliasing args stay aliased."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(copy, (batch.args, batch.kwargs))
    return Batch(args, kwargs)


def loss_of(outputs: Any) -> torch.Tensor:
    """A number that weighs every element of every differentiable output differently."""
    found = [out for out in leaves(outputs) if isinstance(out, torch.Tensor) and out.requires_grad]
    total = torch.zeros((), device=found[0].device if found else None)
    for out in found:
        weights = torch.linspace(0.5, 1.5, max(1, out.numel()), device=out.device).view(out.shape)
        total = total + (out.float() * weights).mean()
    return total


def moved(value: Any, device: str) -> Any:
    """The same with every tensor inside on this device, a leaf that still wants its gradient."""

    def move(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        return given.detach().to(device).requires_grad_(given.requires_grad)

    return pytree.tree_map(move, value)


def random_state() -> Any:
    """That of the CPU, and of each GPU in use, where they stand now."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return bits(torch.cat(states))


def bits(value: Any) -> Any:
    """Something that is equal only for bitwise equal tensors."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        data = local.detach().contiguous().flatten()
        if data.is_floating_point() and data.dtype != torch.float64:
            data = data.view(torch.int32 if data.element_size() == 4 else torch.int16)
        return str(value.dtype), tuple(value.shape), data.clone()
    return value


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    around: Callable[[], Any] | None = None,
    seed: int = 7,
    lr: float = 0.05,
) -> list[dict[str, Any]]:
    """One SGD step a batch; what each left behind, by name."""
    torch.manual_seed(seed)
    found = []
    for batch in batches:
        mine = fresh(batch)
        model.zero_grad()
        if around is None:
            outputs = model(*mine.args, **mine.kwargs)
        else:
            with around():
                outputs = model(*mine.args, **mine.kwargs)
        loss = loss_of(outputs)
        assert loss.isfinite(), "nothing can be compared with NaN"
        if loss.requires_grad:
            loss.backward()
        step = {f"output {i}": bits(out) for i, out in enumerate(leaves(outputs))}
        step["random state"] = random_state()
        for i, given in enumerate(leaves((mine.args, mine.kwargs))):
            step[f"input {i}"] = bits(given)
            if isinstance(given, torch.Tensor):
                step[f"gradient of input {i}"] = bits(given.grad)
        for name, parameter in model.named_parameters():
            step[f"gradient of {name}"] = bits(parameter.grad)
        for name, buffer in model.named_buffers():
            step[f"buffer {name}"] = bits(buffer)
        found.append(step)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
    return found


def differences(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[str]:
    """What is not bitwise the same in two runs of `train`."""
    found = []
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.keys() != b.keys():
            found.append(f"step {index}: {sorted(a.keys() ^ b.keys())} on one side only")
        for key in a.keys() & b.keys():
            if isinstance(a[key], tuple) and isinstance(b[key], tuple):
                same = a[key][:2] == b[key][:2] and torch.equal(a[key][2], b[key][2])
            else:
                same = a[key] == b[key]
            if not same:
                found.append(f"step {index}: {key}")
    return sorted(found)


# Warnings of Dynamo's own, met while it traces; not about what is tested here.
DYNAMO_WARNINGS = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
