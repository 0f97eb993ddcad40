"""These functions deliver gradients to Megatron: through the hooks of its DDP into `main_grad`.

If a linear layer multiplies and adds its weight's gradient in one kernel
(`gradient_accumulation_fusion`), the planned graph does the same, and then calls the hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from overlapc.passes.capture.joint import Owner
from overlapc.passes.emit.parts import Part

aten = torch.ops.aten


@dataclass(frozen=True)
class Receiver(Owner):
    """A parameter, and what gives it its gradient, with all its hooks."""

    give: Callable[[Tensor], None] = field(kw_only=True)


def receiver(parameter: Tensor, ddp: Any) -> Receiver:
    """Find how a parameter receives its gradient under this DDP: as from autograd. One that has
    only DDP's hook gets it without autograd, which takes 25 µs for each parameter. That hook adds
    the gradient to `main_grad`, and reduces a bucket that is complete."""
    hooked = ddp is not None and parameter in ddp.param_to_bucket_group
    make = getattr(ddp, "_make_backward_post_hook", None)
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        # A hook of the user's may write to the gradient, which the graph may read again.
        return Receiver(
            parameter, give=lambda grad: torch.autograd.backward(parameter, grad.clone())
        )
    if not hooked or make is None:
        return Receiver(parameter, give=partial(torch.autograd.backward, parameter))
    hook = make(parameter)

    def give(gradient: Tensor) -> None:
        parameter.grad = gradient
        hook()

    return Receiver(parameter, give=give)


def unreduced(owner: Receiver, ddp: Any) -> Receiver:
    """The parameter for a gradient behind which another of the same microbatch comes: no bucket is
    reduced for it."""
    if ddp is None or owner.tensor not in ddp.param_to_bucket_group:
        return owner
    group = ddp.param_to_bucket_group[owner.tensor]

    def give(gradient: Tensor) -> None:
        last, group.is_last_microbatch = group.is_last_microbatch, False
        try:
            owner.give(gradient)
        finally:
            group.is_last_microbatch = last

    return replace(owner, give=give)


def deliver(receivers: Sequence[Receiver], gradient: Tensor, owned: bool = False) -> None:
    """Give a gradient to its parameters."""
    for each in receivers:
        each.give(gradient)


def deliver_products(
    receivers: Sequence[Receiver],
    products: Sequence[tuple[Tensor, Tensor]],
    rest: Sequence[Tensor],
) -> None:
    """Add the gradients of a linear's weight to `main_grad`, each in one kernel, as Megatron's
    linear does: of each call of it (gradient of the output, input). The hooks get an empty
    gradient, to which the `rest` is added: the weight's gradients from other uses."""
    from megatron.core.tensor_parallel import layers

    kernels = layers.fused_weight_gradient_mlp_cuda
    for each in receivers:
        weight: Any = each.tensor
        whole = weight.main_grad.dtype == torch.float32
        add = kernels.wgrad_gemm_accum_fp32 if whole else kernels.wgrad_gemm_accum_fp16
        for grad_output, given in products:
            add(given, grad_output, weight.main_grad)
        weight.grad_added_to_main_grad = True
        blank = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        gradient = blank(weight)
        for other in rest:
            gradient += other
        deliver((each,), gradient)


def fused_weights(module: nn.Module) -> set[int]:
    """The ids of the weights whose linear layers multiply and add in one kernel."""
    fusing = [
        layer for layer in module.modules() if getattr(layer, "gradient_accumulation_fusion", False)
    ]
    found = {id(layer.weight) for layer in fusing if getattr(layer, "weight", None) is not None}
    tied = getattr(module, "share_embeddings_and_output_weights", False)
    if fusing and tied and (weight := module.shared_embedding_or_output_weight()) is not None:
        found.add(id(weight))
    return found


def fuse(part: Part, owners: Mapping[str, Receiver], fused: Collection[int]) -> set[str]:
    """Make the backward return weight gradients as factors, where their linears fuse. Return the
    names of those owners whose gradients are factors alone."""
    graph, whole = part.module.graph, set[str]()
    names = dict(zip(graph.find_nodes(op="placeholder"), part.takes, strict=True))
    for node in graph.find_nodes(op="call_function", target=deliver):
        given, gradient, _ = node.args
        if not all(id(owners[names[each]].tensor) in fused for each in given):
            continue
        terms = _terms(gradient)
        products = [factors for each in terms if (factors := _factors(each)) is not None]
        if products:
            rest = [each for each in terms if _factors(each) is None]
            node.target, node.args = deliver_products, (given, products, rest)
            whole |= {names[each] for each in given if not rest}
    graph.eliminate_dead_code(
        is_impure_node=lambda n: n.op in ("placeholder", "output") or n.target in _DELIVERS
    )
    part.module.recompile()
    alive = set(graph.nodes)
    part.names = {node: name for node, name in part.names.items() if node in alive}
    return whole


_DELIVERS = (deliver, deliver_products)


def _terms(gradient: fx.Node) -> list[fx.Node]:
    """What is added up to a gradient, in autograd's order: one for each use of a weight."""
    plain = gradient.target is aten.add.Tensor and len(gradient.args) == 2 and not gradient.kwargs
    if not plain or len(gradient.users) > 1:
        return [gradient]
    return [term for each in gradient.all_input_nodes for term in _terms(each)]


def _factors(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """`grad_output` and `input` of a weight gradient that has no other reader."""
    if not isinstance(node, fx.Node) or node.target is not aten.mm.default or len(node.users) > 1:
        return None
    turned, given = node.args
    if turned.target not in (aten.t.default, aten.permute.default, aten.transpose.int):
        return None
    return turned.args[0], given


def reduces(ddp: Any) -> list[bool]:
    """By group of buckets: do gradients start its reduction now? Those of the last microbatch
    do."""
    return [group.is_last_microbatch for group in _groups(ddp)]


@contextlib.contextmanager
def as_then(ddp: Any, reduced: Sequence[bool]) -> Iterator[None]:
    """Within the block, gradients start reductions as they did when the backward was asked for."""
    groups = _groups(ddp)
    before = [group.is_last_microbatch for group in groups]
    for group, last in zip(groups, reduced, strict=True):
        group.is_last_microbatch = last
    try:
        yield
    finally:
        for group, was in zip(groups, before, strict=True):
            group.is_last_microbatch = was


def _groups(ddp: Any) -> list[Any]:
    return [] if ddp is None else [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


def gathered(ddp: Any) -> None:
    """Wait for the parameters that DDP gathers during the forward. Its hooks on modules would wait
    one by one, but the graph does not call them."""
    if ddp is None or not getattr(ddp, "remove_forward_pre_hook_handles", None):
        return
    hook = ddp._make_forward_pre_hook()
    for module in ddp.module.modules():
        hook(module)
