"""What AOTAutograd makes of a graph of Dynamo's, and what it says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.collectives import Raw


def export(stack: contextlib.ExitStack, graph: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Return AOTAutograd's joint graph of a graph of Dynamo's."""
    try:
        with Raw() as raw:
            exported = torch._functorch.aot_autograd.aot_export_joint_with_descriptors(
                stack, graph, tuple(arguments)
            )
        raw.end()
    except CaptureError as error:  # FX has added the path to the op
        raise CaptureError(error.reason, error.place) from None
    return exported


def without_backward(forward: fx.GraphModule) -> tuple[fx.GraphModule, int]:
    """Make a graph that has no backward a joint graph without gradients; also return how many
    results it has."""
    inputs = forward.graph.find_nodes(op="placeholder")
    for i, node in enumerate(inputs):
        node.target = node.name = f"primals_{i + 1}"
    output = forward.graph.find_nodes(op="output")[0]
    results = tuple(output.args[0])
    output.args = ((*results, *(None for _ in inputs)),)
    output.meta["desc"] = [*output.meta["desc"], *(None for _ in inputs)]
    return forward, len(results)


def lasting(arguments: Sequence[Any]) -> tuple[int, ...]:
    """The places of arguments that last from call to call, as Dynamo says of their tensors."""
    return tuple(
        i
        for i, value in enumerate(arguments)
        if getattr(value, "_dynamo_static_input_type", None) is not None
    )


def views_of(exported: Any) -> tuple[bool, ...]:
    """Which results of Dynamo's graph AOTAutograd makes of inputs or other results, as views."""
    infos = exported._aot_state.fw_metadata.output_info
    own = ("non_alias", "unsafe_view_alias", "custom_function_view")
    return tuple(info.output_type.name not in own for info in infos)


def metas_of(exported: Any) -> Sequence[Any]:
    """How gradients that are tensor subclasses are put together from their parts."""
    metas = getattr(exported._aot_graph_capture, "maybe_subclass_meta", None)
    return () if metas is None else metas.grad_input_metas or ()


def let_saved_live() -> None:
    """Within the compiler of a backward: let the backward run more than once (several losses,
    `retain_graph`). PyTorch refuses that where it may hand saved tensors on as scratch memory,
    which Inductor alone does."""
    context = TracingContext.try_get()
    donated = None if context is None else getattr(context.fw_metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()  # the list that the backward itself asks, too


def as_boxed(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Say that it takes its arguments as one list."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
