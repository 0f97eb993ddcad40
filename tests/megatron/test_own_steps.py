"""Forward steps of a script's own, in which autograd is used in ways that a plan does not know:
such a call runs as plain Megatron, or is an error that says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlapc.core.errors import OverlapcError
from tests.megatron import cpu
from tests.megatron.models import (
    Layout,
    Trained,
    forward_step,
    innermost,
    set_up,
    twins,
    two_steps,
)
from tests.megatron.test_patch import differences
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess


class Rounding(saved_tensors_hooks):
    """What autograd saves is rounded to half precision."""

    def __init__(self) -> None:
        halved = lambda t: t.half() if t.dtype == torch.float32 else t  # noqa: E731
        super().__init__(halved, lambda t: t.float() if t.dtype == torch.float16 else t)


def functional(data: Any, model: Any) -> Any:
    scaled = {name: 1.5 * each for name, each in model.named_parameters()}

    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, scaled, args, kwargs)

    return forward_step(False, data, run)


def rounded(data: Any, model: Any) -> Any:
    with Rounding():
        return forward_step(False, data, model)


def rounded_inside(data: Any, model: Any) -> Any:
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with Rounding():
            return type(layer).forward(layer, *args, **kwargs)

    _with_forward(model, forward)
    return forward_step(False, data, model)


def set_past_the_module(data: Any, model: Any) -> Any:
    """Another tensor in the place of a buffer, without `setattr`."""

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        out, bias = type(layer).forward(layer, *args, **kwargs)
        return out * layer.gain, bias

    layer = _with_forward(model, forward)
    if "gain" not in layer._buffers:
        layer.register_buffer("gain", torch.ones(()))
    layer._buffers["gain"] = layer.gain + 0.5
    return forward_step(False, data, model)


def _with_forward(model: Any, forward: Callable[..., Any]) -> Any:
    layer = innermost(model).decoder.layers[0].mlp
    vars(layer).setdefault("forward", functools.partial(forward, layer))
    return layer


def transposed(data: Any, model: Any) -> Any:
    """Every other microbatch lies otherwise in memory."""
    model.turns = turns = not getattr(model, "turns", False)

    def run(tokens: Tensor, *args: Any, labels: Tensor) -> Any:
        given = (each.t().contiguous().t() if turns else each for each in (tokens, labels))
        tokens, labels = given
        return model(tokens, *args, labels=labels)

    return forward_step(False, data, run)


def first_inputs(data: Any, model: Any) -> tuple[Any, Tensor]:
    """A call whose input requires a gradient, and that input."""
    generator = torch.Generator().manual_seed(3)
    width = innermost(model).config.hidden_size
    tokens, labels = next(data)
    given = torch.randn(*tokens.shape[::-1], width, generator=generator).requires_grad_()
    out = forward_step(
        False, iter([(tokens, labels)]), lambda *a, **k: model(*a, decoder_input=given, **k)
    )
    return out, given


def for_inputs(data: Any, model: Any) -> Any:
    (out, loss), given = first_inputs(data, model)
    torch.autograd.grad(out.float().sum(), given, retain_graph=True)
    return out, loss


def with_inputs(data: Any, model: Any) -> Any:
    (out, loss), given = first_inputs(data, model)
    torch.autograd.backward(out.float().sum(), inputs=[given], retain_graph=True)
    return out, loss


def again(data: Any, model: Any) -> Any:
    out, loss = forward_step(False, data, model)
    out.float().sum().backward(retain_graph=True)
    return out, loss


def twice(data: Any, model: Any) -> Any:
    (out, loss), given = first_inputs(data, model)
    torch.autograd.grad(out.float().sum(), given, create_graph=True)
    return out, loss


# What is said: in a warning of each chunk that runs plain, in the error, or nothing.
EQUAL: dict[str, tuple[Callable[..., Any], str]] = {
    "functional": (functional, "torch.func.functional_call"),
    "rounded": (rounded, "saved_tensors_hooks"),
    "rounded inside": (rounded_inside, "Rounding of torch.autograd.graph"),
    "set past the module": (set_past_the_module, ""),
    "transposed": (transposed, ""),
}
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "for inputs": (for_inputs, "asks for some gradients of a model alone"),
    "with inputs": (with_inputs, "asks for some gradients of a model alone"),
    "again": (again, "a backward ran twice through a model's forward"),
    "twice": (twice, "is to be differentiated again (create_graph=True)"),
}


def by(trained: Trained, step: Callable[..., Any]) -> Trained:
    real = trained._given

    def given(number: int) -> dict[str, Any]:
        own = lambda data, model, *_, **__: step(data, model)  # noqa: E731
        return {**real(number), "forward_step_func": own}

    trained._given = given  # type: ignore[method-assign]
    return trained


def on_rank(rank: int, ranks: int, version: str) -> dict[str, Any]:
    cpu.use(version)
    dist.init_process_group("gloo")
    layout = Layout(ranks=1, layers=1, ddp=None, microbatches=2)
    set_up(layout)
    import overlapc.megatron as patched

    found: dict[str, Any] = {}
    for name, (step, _) in {**EQUAL, **REFUSED}.items():
        theirs, ours = (by(each, step) for each in twins(layout))
        expected = [theirs.step(number) for number in range(2)] if name in EQUAL else []
        patched.patch(profile="estimate", solver="heu", merge=False)
        try:
            got, told, _ = two_steps(ours)
        except OverlapcError as error:
            patched.unpatch()
            found[name] = str(error)
            continue
        wrong = [each for pair in zip(expected, got, strict=True) for each in differences(*pair)]
        found[name] = wrong, [each for each in told if "overlapc" in each]
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("version", ["0.16.1", pytest.param("0.19.2", marks=pytest.mark.slow)])
def test_what_a_plan_does_not_know_is_plain_or_an_error(version: str) -> None:
    cpu.need(version)
    (found,) = run_ranks(on_rank, 1, version, timeout_s=180)
    for name, (_, said) in EQUAL.items():
        wrong, told = found[name]
        assert wrong == [], name
        assert bool(told) == bool(said), (name, told)
        assert all(said in each for each in told), (name, told)
    for name, (_, said) in REFUSED.items():
        assert said in found[name], (name, found[name])
