"""`Group` is a parameter group of FSDP2 as graphs see it: one op of autograd from the shards of its
parameters to full ones.

    forward     cast, cat            -> all_gather_into_tensor -> split_with_sizes_copy
    backward    cast, _chunk_cat     -> reduce_scatter_tensor (-> all_reduce) -> cast, split

Operands have FSDP2's own flat layout, so every collective adds up what FSDP2's does, and gradients
have equal bits.

A graph reads *leaves*: plain parameters that share the memory of FSDP2's padded shards. They have
one shape on all ranks, so all ranks trace the same graph. What autograd adds to a leaf's gradient
is moved into `.grad` of the DTensor parameter, which optimizers and checkpoints see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.marks import gathering

_C10D = torch.ops._c10d_functional
_REDUCTIONS = {"RedOpType.SUM": "sum", "RedOpType.AVG": "avg"}
_EXTENSION = "fsdp_pre_all_gather"


class Group:
    """Leaves of a parameter group, and its full parameters while a forward runs."""

    def __init__(self, group: Any, number: int, came: Callable[[], None]) -> None:
        """`came` is called when a gradient has come."""
        refuse_group(group)
        self.group = group
        params = group.fsdp_params
        self.leaves = [
            nn.Parameter(each._sharded_param_data, each.sharded_param.requires_grad)
            for each in params
        ]
        self.full: list[Tensor] | None = None
        self._layout = FlatLayout.of(group, number)
        self._mine = [i for i, leaf in enumerate(self.leaves) if leaf.requires_grad]
        self._ops: dict[Any, Any] = {}  # by which gradients wait for a reduction; None: all do
        self._given: list[Tensor] = []  # what the op of this call is given
        # Without a reduction gradients come to slots: full in shape, without memory.
        self._slots = [_slot(self._layout, i) for i in self._mine]
        self.reduces(())
        self._specs = [each._unsharded_dtensor_spec for each in params]
        pairs = zip(self.leaves, params, strict=True)
        self.heard: set[int] = set()  # leaves whose gradients have come since the last call

        def delivering(leaf: nn.Parameter, param: Any) -> tuple[Any, Any]:
            return _delivering(leaf, param, self.heard, came)

        self._nodes = [delivering(*pair) for pair in pairs if pair[0].requires_grad]
        slots = zip(self._slots, self._mine, strict=True)
        self._nodes += [_adding(slot, params[i], self.heard) for slot, i in slots]

    def gather(self) -> None:
        """Have full parameters, if there are none yet. (Dynamo traces this.)"""
        if self.full is not None:
            return
        full = list(self._op(*self._given))
        for i, spec in enumerate(self._specs):
            if spec is not None:  # modules read a DTensor of tensor parallelism
                shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
                full[i] = DTensor.from_local(
                    full[i], spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
                )
        self.full = full

    def reduces(self, waiting: Sequence[int] | None) -> None:
        """Have the op of a call that reduces gradients, with earlier ones of these parameters; or
        of one that adds them to those that wait for a reduction (None)."""
        key = None if waiting is None else tuple(waiting)
        if key not in self._ops:
            self._ops[key] = op_of(self._layout, key)
        self._op = self._ops[key]
        self.reduces_alone = key == () or not self._mine  # its own gradients, and no others
        if waiting is None:
            self._given = [*(leaf.detach() for leaf in self.leaves), *self._slots]
        else:
            params = self.group.fsdp_params
            earlier = [params[i].unsharded_accumulated_grad for i in waiting]
            self._given = [*self.leaves, *earlier]

    def begin(self) -> None:
        """Choose the op of this call."""
        group, params = self.group, self.group.fsdp_params
        for i in self._mine:
            _take_over(params[i])
        waiting = [i for i in self._mine if params[i].unsharded_accumulated_grad is not None]
        self.reduces(waiting if group.reduce_grads else None)

    def reduce_waiting(self) -> None:
        """Reduce earlier gradients that the last backward has not, as FSDP2 does where no parameter
        of the group is used in it."""
        params = self.group.fsdp_params
        waiting = [i for i in self._mine if params[i].unsharded_accumulated_grad is not None]
        if not waiting or not self.group.reduce_grads:
            return
        with torch.no_grad():
            earlier = [params[i].unsharded_accumulated_grad for i in waiting]
            reduction = _reduction_of(self._layout, waiting, waiting)
            found = reduction([None] * len(params), earlier)
            for i in waiting:
                _deliver(params[i], found[i])

    def refresh(self) -> None:
        """Read the memory that FSDP2 reads: a loaded state dict may have brought another. Free what
        an evaluation has left gathered: no eager backward would."""
        for leaf, each in zip(self.leaves, self.group.fsdp_params, strict=True):
            if leaf.data_ptr() != each._sharded_param_data.data_ptr():
                leaf.data = each._sharded_param_data
        if not self.group.is_sharded:
            self.group._to_sharded()

    @property
    def targets(self) -> list[Tensor]:
        """What autograd gives gradients of this call to."""
        return [*self.leaves, *self._slots]

    def let_go(self) -> None:
        """Hold neither full parameters nor earlier gradients behind a forward."""
        self.full, self._given = None, []

    def close(self) -> None:
        for _, handle in self._nodes:
            handle.remove()


def kind_of(group: Any) -> Any:
    """What a graph of the group depends on. If it changes, the group is lowered again."""
    params = tuple(
        (id(each.sharded_param), each.sharded_param.requires_grad) for each in group.fsdp_params
    )
    factor, forced = group.gradient_divide_factor, group.force_sum_reduction_for_comms
    kept = group.post_forward_mesh_info is None
    return params, factor, forced, kept, _unused(group)


def refuse_group(group: Any) -> None:
    """Raise for what FSDP2 does for the group and a graph does not."""
    params = group.fsdp_params
    gather, scatter = type(group._all_gather_comm), type(group._reduce_scatter_comm)
    own = (collectives.DefaultAllGather, collectives.DefaultReduceScatter)
    modules = [module for each in params for module in _modules_of(each)]
    refused = {
        "replicated parameters (a mesh of replicas alone)": not isinstance(
            group.mesh_info, FSDPMeshInfo
        ),
        "zeros for unused parameters (set_reduce_scatter_unused_params)": _unused(group),
        "a hook on its all-reduce (set_all_reduce_hook)": group._all_reduce_hook is not None,
        "collectives of one's own, or memory of the process group": (gather, scatter) != own,
        "parameters on the host (CPUOffloadPolicy)": any(each.offload_to_cpu for each in params),
        f"parameters that gather themselves ({_EXTENSION})": any(
            hasattr(each._sharded_local_tensor, _EXTENSION) for each in params
        ),
        "weights of nn.RNN, nn.LSTM or nn.GRU, which reads them from a list": any(
            isinstance(module, nn.RNNBase) for module in modules
        ),
    }
    if what := next((what for what, found in refused.items() if found), ""):
        raise CaptureError(f"FSDP2 shards {named(group)} with {what}")


def refuse_accumulation(group: Any, whole: bool) -> None:
    """Raise where gradients are not reduced as a graph does: over shards alone, over several
    backwards (for a step that is one `whole`), or of parameters that are in tensor parallelism."""
    waiting = any(_waits(each) for each in group.fsdp_params)
    partial = group.reduce_grads and not group.all_reduce_grads
    partial |= group._partial_reduce_output is not None
    together = waiting or not group.reduce_grads
    parallel = any(each._unsharded_dtensor_spec is not None for each in group.fsdp_params)
    if partial or (together and (whole or parallel)):
        raise CaptureError(
            "FSDP2 reduces gradients of several backwards together "
            "(set_requires_gradient_sync(False) or set_requires_all_reduce(False))"
        )


def _waits(param: Any) -> bool:
    """Is there a gradient of the full parameter that is not reduced yet?"""
    full = getattr(param, "_unsharded_param", None)
    kept = full is not None and full.grad is not None
    return kept or param.unsharded_accumulated_grad is not None


def _take_over(param: Any) -> None:
    """Lay what FSDP2's own backward has left where it lays gradients of another type."""
    full = getattr(param, "_unsharded_param", None)
    if full is not None and full.grad is not None and param.unsharded_accumulated_grad is None:
        param.unsharded_accumulated_grad, full.grad = full.grad, None


def _slot(layout: FlatLayout, i: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros((), dtype=layout.dtypes[i]).expand(layout.whole[i]))


def _unused(group: Any) -> bool:
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def named(group: Any) -> str:
    return group._module_fqn or "the model"


def _modules_of(param: Any) -> list[nn.Module]:
    info = param._module_info
    return [info.module, *info.shared_modules]


@dataclass(frozen=True)
class FlatLayout:
    """How a group's parameters lie in its flat tensors, and how these travel. Plain data alone, as
    Dynamo wants it in a closure."""

    number: int  # in the model; -1 if eager keeps full parameters for the backward
    ranks: int
    gathers: str  # names of process groups
    scatters: str
    reduces: str | None  # over the replicas of shards
    dtypes: Sequence[torch.dtype]  # of full parameters
    shards: Sequence[Sequence[int]]  # sizes of a shard, padded
    whole: Sequence[Sequence[int]]
    dims: Sequence[int]  # along which each is sharded
    trained: Sequence[bool]
    own: torch.dtype | None
    reduced: torch.dtype | None
    before: float | None  # divisors
    after: float | None
    alone: float | None  # the divisor where there is nothing to reduce
    scatter_op: str
    reduce_op: str

    @staticmethod
    def of(group: Any, number: int) -> FlatLayout:
        params, info = group.fsdp_params, group.mesh_info
        dtypes = [each.param_dtype or each.orig_dtype for each in params]
        trained = [each.sharded_param.requires_grad for each in params]
        replicas = info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None
        computed = next((d for d, t in zip(dtypes, trained, strict=True) if t), dtypes[0])
        before, after, *ops = collectives._get_gradient_divide_factors(
            group._reduce_scatter_process_group,
            replicas,
            group._reduce_dtype or computed,
            group.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        # torchtitan divides by 1: PREMUL_SUM(1), a sum.
        other = "sum" if group.gradient_divide_factor == 1 else None
        kinds = [_REDUCTIONS.get(str(op), other) for op in ops]
        if None in kinds:
            raise CaptureError(
                f"FSDP2 divides gradients of {named(group)} within its reduction (PREMUL_SUM); "
                "expected set_force_sum_reduction_for_comms(True)"
            )
        return FlatLayout(
            number=number if group.post_forward_mesh_info is not None else -1,
            ranks=info.shard_mesh_size,
            gathers=info.shard_process_group.group_name,
            scatters=group._reduce_scatter_process_group.group_name,
            reduces=None if replicas is None else replicas.group_name,
            dtypes=dtypes,
            shards=[list(each.padded_sharded_param_size) for each in params],
            whole=[tuple(each._orig_size) for each in params],
            dims=[each.fsdp_placement.dim for each in params],
            trained=trained,
            own=group._orig_dtype,
            reduced=group._reduce_dtype,
            before=before,
            after=after,
            alone=group.gradient_divide_factor,
            scatter_op=str(kinds[0]),
            reduce_op=str(kinds[1]),
        )


def op_of(layout: FlatLayout, waiting: Sequence[int] | None) -> Callable[..., tuple[Tensor, ...]]:
    """A group's op of autograd: a gather, with the reduction in its backward: of earlier gradients,
    too, of parameters that are `waiting`. None: it hands gradients to slots. Dynamo takes it as it
    is, without a look inside, which would take seconds for each group."""
    count = len(layout.whole)
    mine = [i for i, wanted in enumerate(layout.trained) if wanted]
    frozen = [i for i, wanted in enumerate(layout.trained) if not wanted]
    gather = _gather_of(layout)
    reduction = None if waiting is None else _reduction_of(layout, mine, tuple(waiting))

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
            full = gather(*given[:count])
            ctx.mark_non_differentiable(*[full[i] for i in frozen])
            if reduction is not None:
                ctx.save_for_backward(*given[count:])
            return full

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            if reduction is None:
                return (*[None] * count, *[gradients[i] for i in mine])
            return reduction(gradients, ctx.saved_tensors)

    def gathered(*given: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = Gather.apply(*given)
        return made

    return torch._dynamo.allow_in_graph(gathered)


def _gather_of(layout: FlatLayout) -> Callable[..., tuple[Tensor, ...]]:
    """The gather alone: from shards to full parameters."""
    ranks, dims, whole, shards = layout.ranks, layout.dims, layout.whole, layout.shards
    dtypes, gathers, number = layout.dtypes, layout.gathers, layout.number
    as_bytes = len(set(dtypes)) > 1
    numels = [math.prod(size) for size in shards]
    pairs = zip(numels, dtypes, strict=True)
    sizes = [count * dtype.itemsize if as_bytes else count for count, dtype in pairs]

    def joined(part: Tensor, i: int) -> Tensor:
        """A parameter, of the shards of all ranks."""
        part = part.view(dtypes[i]) if as_bytes else part
        if dims[i] == 0:  # padding is behind all rows
            padded = numels[i] * ranks > math.prod(whole[i])
            return (part.view(-1)[: math.prod(whole[i])] if padded else part).view(whole[i])
        rows = part.view(ranks * shards[i][0], *shards[i][1:])
        return torch.cat(torch.chunk(rows, ranks), dims[i])

    def gather(*leaves: Tensor) -> tuple[Tensor, ...]:
        with gathering(number):
            cast = [leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes)]  # noqa: B905 (Dynamo)
            flat = torch.cat([each.view(torch.uint8) for each in cast] if as_bytes else cast)
            if ranks > 1:
                flat = _C10D.wait_tensor(_C10D.all_gather_into_tensor(flat, ranks, gathers))
            parts = torch.split_with_sizes_copy(flat.view(ranks, -1), sizes, 1)
            return tuple([joined(part, i) for i, part in enumerate(parts)])

    return gather


def _reduction_of(
    layout: FlatLayout, mine: Sequence[int], held: Sequence[int]
) -> Callable[..., tuple[Tensor | None, ...]]:
    """From gradients of full parameters, and earlier ones of those that are `held`, to those of
    shards."""
    ranks, dims, scatters, reduces = layout.ranks, layout.dims, layout.scatters, layout.reduces
    own, reduced, before, after = layout.own, layout.reduced, layout.before, layout.after
    alone, scatter_op, reduce_op = layout.alone, layout.scatter_op, layout.reduce_op
    numels = [math.prod(size) for size in layout.shards]

    def part_of(gradient: Any, i: int, earlier: Sequence[Tensor]) -> Tensor:
        if i in held:
            waited = earlier[held.index(i)]
            gradient = waited if gradient is None else waited + gradient.to(waited.dtype)
        if dims[i] and ranks > 1:
            gradient = torch.cat(torch.chunk(gradient, ranks, dims[i]))
        return gradient if reduced is None else gradient.to(reduced)

    def summed(flat: Tensor) -> Tensor:
        if before is not None and before != 1:
            flat = flat / before
        if ranks > 1:
            scattered = _C10D.reduce_scatter_tensor(flat, scatter_op, ranks, scatters)
            flat = _C10D.wait_tensor(scattered)
        elif alone is not None:
            flat = flat / alone
        if reduces is not None:
            flat = _C10D.wait_tensor(_C10D.all_reduce(flat, reduce_op, reduces))
        if after is not None and after != 1:
            flat = flat / after
        return flat.to(own)

    def reduction(
        gradients: Sequence[Tensor | None], earlier: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        back: list[Tensor | None] = [None] * (len(dims) + len(held))
        each = [part_of(gradients[i], i, earlier) for i in mine]
        if not each:
            return tuple(back)
        flat = summed(torch._chunk_cat(each, 0, ranks).view(-1))
        for i, part in zip(mine, torch.split(flat, [numels[i] for i in mine])):  # noqa: B905
            back[i] = part
        return tuple(back)

    return reduction


def _delivering(
    leaf: nn.Parameter, param: Any, heard: set[int], came: Callable[[], None]
) -> tuple[Any, Any]:
    """Have each gradient of a leaf moved into `.grad` of its parameter, as FSDP2's reduction
    ends. The hook is on autograd's node that adds to `leaf.grad`, which lives as long as it is
    held, and must not hold the group."""

    def deliver(*_: Any) -> None:
        flat, leaf.grad = leaf.grad, None
        if flat is None:
            return
        heard.add(id(leaf))
        _deliver(param, flat)
        came()

    return _held(leaf, deliver)


def _deliver(param: Any, flat: Any) -> None:
    """Add a reduced gradient to that of the sharded parameter; what was waiting is in it."""
    param.unsharded_accumulated_grad = None
    mine = flat.as_strided(param.sharded_size, param.contiguous_sharded_stride)
    target = param.sharded_param
    if target.grad is None:
        target.grad = param.to_sharded_dtensor(mine)
    else:
        target.grad._local_tensor.add_(mine)
    for hook in (getattr(target, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(target)


def _adding(slot: nn.Parameter, param: Any, heard: set[int]) -> tuple[Any, Any]:
    """Have each gradient of a slot added to those of its parameter that wait for a reduction, as
    FSDP2 adds them."""

    def add(*_: Any) -> None:
        gradient, slot.grad = slot.grad, None
        if gradient is None:
            return
        heard.add(id(slot))
        before, dtype = param.unsharded_accumulated_grad, param.reduce_dtype
        if before is None:
            param.unsharded_accumulated_grad = gradient if dtype is None else gradient.to(dtype)
        else:
            before += gradient

    return _held(slot, add)


def _held(leaf: nn.Parameter, hook: Callable[..., None]) -> tuple[Any, Any]:
    with torch.enable_grad():
        function: Any = leaf.view_as(leaf).grad_fn
        node = function.next_functions[0][0]
    return node, node.register_hook(hook)
