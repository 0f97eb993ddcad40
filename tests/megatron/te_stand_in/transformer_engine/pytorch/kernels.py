"""What the stand-in computes: autograd functions whose kernels ask for the addresses of tensors, as
TE's extension does, so that no trace enters them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def kernel(*tensors: Tensor | None) -> None:
    """Ask for the addresses of these tensors: one of a trace has none."""
    for tensor in tensors:
        if tensor is not None:
            tensor.data_ptr()


def gathered(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scattered(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


@dataclass(frozen=True)
class How:
    """How a linear is parallel, and where its weight gradient goes."""

    mode: str | None
    group: Any
    size: int
    sequence: bool
    fuses: bool
    store: Any  # a WeightGradStore

    @property
    def gathers(self) -> bool:
        return self.mode == "column" and self.sequence and self.size > 1

    @property
    def reduces(self) -> bool:
        return self.mode == "row" and self.size > 1


def weight_gradient(weight: Any, grad: Tensor, given: Tensor, fuses: bool) -> Tensor | None:
    """The gradient of a weight. Fused it is added to `main_grad`, and a shared tensor of no meaning
    stands for it."""
    from .module.base import get_dummy_wgrad

    rows, columns = grad.reshape(-1, grad.shape[-1]), given.reshape(-1, given.shape[-1])
    if not fuses:
        return rows.t() @ columns
    weight.main_grad.add_(rows.t().float() @ columns.float())
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zero = getattr(weight, "zero_out_wgrad", False)
    return get_dummy_wgrad(list(weight.main_grad.shape), given.dtype, zero=zero)


class Saved:
    """TE drops what a backward has read: a second one fails."""

    def __init__(self, *origins: Any) -> None:
        self.origins = [weakref.ref(each) for each in origins]
        self.tensor_objects: Any = ()

    def taken(self) -> list[Any]:
        if self.tensor_objects is None:
            raise RuntimeError("a backward has run, and what it saved is gone")
        self.tensor_objects = None
        found = [each() for each in self.origins]
        assert all(each is not None for each in found), "a weight is gone before its backward"
        return found


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, given: Tensor, bias: Tensor | None, how: How) -> Tensor:
        kernel(weight, given, bias)
        whole = gathered(given, how.group) if how.gathers else given
        out = whole @ weight.t()
        out = out if bias is None else out + bias
        if how.reduces and how.sequence:
            out = scattered(out, how.group)
        elif how.reduces:
            dist.all_reduce(out, group=how.group)
        ctx.save_for_backward(given, weight)
        ctx.how, ctx.biased, ctx.saved = how, bias is not None, Saved(weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (origin,), how = ctx.saved.taken(), ctx.how
        given, weight = ctx.saved_tensors
        kernel(grad, given, weight)
        if how.reduces and how.sequence:
            grad = gathered(grad, how.group)
        whole = gathered(given, how.group) if how.gathers else given
        back = grad @ weight
        if how.gathers:
            back = scattered(back, how.group)
        elif how.mode == "column" and how.size > 1:
            dist.all_reduce(back, group=how.group)
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.biased else None
        of_weight = None
        if ctx.needs_input_grad[0]:
            if how.store is not None and how.store.delay_wgrad_compute():
                how.store.put([origin, grad, whole, how.fuses], weight_gradient)
            else:
                of_weight = weight_gradient(origin, grad, whole, how.fuses)
        return of_weight, back, of_bias, None


class GatherFunction(torch.autograd.Function):
    """Of the ranks' parts of a sequence."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        kernel(part)
        ctx.group = group
        return gathered(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scattered(grad, ctx.group), None


class GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: Tensor, splits: list[int], fuses: bool, count: int, *parts: Tensor
    ) -> Tensor:
        weights, biases = parts[:count], parts[count:]
        kernel(given, *parts)
        pieces = [x @ w.t() for x, w in zip(given.split(splits), weights, strict=True)]
        if biases:
            pieces = [piece + bias for piece, bias in zip(pieces, biases, strict=True)]
        ctx.save_for_backward(given, *weights)
        ctx.splits, ctx.fuses, ctx.biased = splits, fuses, bool(biases)
        ctx.saved = Saved(*weights)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        origins = ctx.saved.taken()
        given, *weights = ctx.saved_tensors
        kernel(grad, given)
        grads, pieces = grad.split(ctx.splits), given.split(ctx.splits)
        back = torch.cat([g @ w for g, w in zip(grads, weights, strict=True)])
        triples = zip(origins, grads, pieces, strict=True)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[4]:
            of_weights = [weight_gradient(w, g, x, ctx.fuses) for w, g, x in triples]
        of_biases = [g.sum(0) for g in grads] if ctx.biased else []
        return back, None, None, None, *of_weights, *of_biases


class NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        kernel(x, weight, bias)
        centred = x.float() if bias is None else x.float() - x.float().mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        normal = centred * scale
        ctx.save_for_backward(normal, scale, weight)
        ctx.centres = bias is not None
        out = normal * weight.float()
        return (out if bias is None else out + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        normal, scale, weight = ctx.saved_tensors
        kernel(grad)
        inner = grad.float() * weight.float()
        back = inner - normal * (inner * normal).mean(-1, keepdim=True)
        if ctx.centres:
            back = back - inner.mean(-1, keepdim=True)
        dims = tuple(range(grad.dim() - 1))
        of_weight = (grad.float() * normal).sum(dims).to(weight.dtype)
        of_bias = grad.float().sum(dims).to(weight.dtype) if ctx.centres else None
        return (back * scale).to(grad.dtype), of_weight, of_bias, None


class AttentionFunction(torch.autograd.Function):
    """Causal attention of sbhd tensors, with dropout of its weights."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, drop: float) -> Tensor:
        kernel(q, k, v)
        each = q.shape[2] // k.shape[2]
        keys, values = k.repeat_interleave(each, 2), v.repeat_interleave(each, 2)
        scores = torch.einsum("sbhd,tbhd->bhst", q, keys) * scale
        place = torch.arange(scores.shape[2], device=q.device)
        scores = scores.masked_fill(place[None] > place[:, None], float("-inf"))
        weights = torch.softmax(scores.float(), -1).to(q.dtype)
        mask = torch.empty_like(weights).bernoulli_(1 - drop) / (1 - drop) if drop else None
        ctx.save_for_backward(q, k, v, weights, mask)
        ctx.scale, ctx.each = scale, each
        dropped = weights if mask is None else weights * mask
        return torch.einsum("bhst,tbhd->sbhd", dropped, values).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, weights, mask = ctx.saved_tensors
        kernel(grad)
        each, scale = ctx.each, ctx.scale
        grad = grad.reshape(*q.shape[:3], v.shape[3])
        keys, values = k.repeat_interleave(each, 2), v.repeat_interleave(each, 2)
        dropped = weights if mask is None else weights * mask
        of_values = torch.einsum("bhst,sbhd->tbhd", dropped, grad)
        of_weights = torch.einsum("sbhd,tbhd->bhst", grad, values)
        of_weights = of_weights if mask is None else of_weights * mask
        inner = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        of_queries = torch.einsum("bhst,tbhd->sbhd", inner, keys)
        of_keys = torch.einsum("bhst,sbhd->tbhd", inner, q)
        heads = k.shape[2]

        def summed(x: Tensor) -> Tensor:
            return x.unflatten(2, (heads, each)).sum(3)

        return of_queries, summed(of_keys), summed(of_values), None, None
