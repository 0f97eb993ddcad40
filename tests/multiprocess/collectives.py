"""Every operation c10d offers, run once on a group; used to compare one group with another."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

Results = dict[str, list[torch.Tensor]]
Data = Callable[..., torch.Tensor]


def every_operation(group: dist.ProcessGroup, *, same_data: bool) -> Results:
    """Name of the operation -> tensors it leaves behind, on this rank.

    With `same_data` all ranks hold the same inputs and do the same, as the fabric assumes.
    """
    generator = torch.Generator().manual_seed(0 if same_data else group.rank())

    def data(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    with warnings.catch_warnings():
        # torch 2.13 renames some of these; torch 2.11 knows only the names used here.
        warnings.simplefilter("ignore", FutureWarning)
        return plain(group, data) | functional(group, data)


def plain(group: dist.ProcessGroup, data: Data) -> Results:
    """What `torch.distributed` offers, which reaches the group from Python."""
    rank, ranks = group.rank(), group.size()
    world = dist.get_process_group_ranks(group)

    results: Results = {}
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        x = data(5, 7)
        dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group)
        results[f"all_reduce {op}"] = [x]

    x, slots = data(3, 2), [torch.empty(3, 2) for _ in range(ranks)]
    dist.all_gather(slots, x, group=group)
    results["all_gather"] = slots

    full = torch.empty(ranks * 3, 2)
    dist.all_gather_into_tensor(full, data(3, 2), group=group)
    results["all_gather_into_tensor"] = [full]

    shard, slots = torch.empty(3, 2), [data(3, 2) for _ in range(ranks)]
    dist.reduce_scatter(shard, slots, group=group)
    results["reduce_scatter"] = [shard]

    shard = torch.empty(3, 2)
    dist.reduce_scatter_tensor(shard, data(ranks * 3, 2), group=group)
    results["reduce_scatter_tensor"] = [shard]

    out = torch.empty(ranks * 2, 3)
    dist.all_to_all_single(out, data(ranks * 2, 3), group=group)
    results["all_to_all_single"] = [out]

    # Uneven: rank r receives r + 1 rows from each.
    out = torch.empty(ranks * (rank + 1), 2)
    splits_out, splits_in = [rank + 1] * ranks, [r + 1 for r in range(ranks)]
    x = data(sum(splits_in), 2)
    dist.all_to_all_single(out, x, splits_out, splits_in, group=group)
    results["all_to_all_single uneven"] = [out]

    outs, ins = [torch.empty(2, 3) for _ in range(ranks)], [data(2, 3) for _ in range(ranks)]
    if hasattr(funcol, "reduce_scatter_single_autograd"):  # gloo before torch 2.13 has none
        dist.all_to_all(outs, ins, group=group)
        results["all_to_all"] = outs

    x = data(4)
    dist.broadcast(x, world[-1], group=group)
    results["broadcast"] = [x]

    x = data(4)
    dist.reduce(x, world[0], group=group)
    # Gloo leaves partial sums on the other ranks; only the root's result means anything.
    results["reduce"] = [x] if rank == 0 else []

    dist.barrier(group=group)

    if ranks > 1:  # gloo does not send to itself
        results["send, recv"] = ring(group, data)

    xs = [data(3), data(2, 2)]
    dist.all_reduce_coalesced(xs, group=group)
    results["all_reduce_coalesced"] = xs
    return results


def ring(group: dist.ProcessGroup, data: Data) -> list[torch.Tensor]:
    """Send to the next rank, asynchronously; and to the previous one, receive first."""
    world = dist.get_process_group_ranks(group)
    there, back = world[(group.rank() + 1) % group.size()], world[group.rank() - 1]
    from_back, from_there = torch.empty(4), torch.empty(4)
    works = [
        dist.isend(data(4), there, group=group),
        dist.irecv(from_back, back, group=group),
        dist.irecv(from_there, there, group=group),
        dist.isend(data(4), back, group=group),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return [from_back, from_there]


def functional(group: dist.ProcessGroup, data: Data) -> Results:
    """The functional collectives, which reach the group through C++."""
    ranks = group.size()

    def waited(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [funcol.wait_tensor(tensor) for tensor in tensors]

    splits_in = [r + 1 for r in range(ranks)]
    splits_out = [group.rank() + 1] * ranks
    return {
        "funcol all_reduce": waited([funcol.all_reduce(data(3, 2), "sum", group)]),
        "funcol all_gather": waited([funcol.all_gather_tensor(data(3, 2), 0, group)]),
        "funcol reduce_scatter": waited(
            [funcol.reduce_scatter_tensor(data(ranks * 2, 3), "sum", 0, group)]
        ),
        "funcol all_to_all": waited(
            [funcol.all_to_all_single(data(sum(splits_in), 2), splits_out, splits_in, group)]
        ),
        "funcol broadcast": waited([funcol.broadcast(data(3), 0, group)]),
        "funcol all_reduce_coalesced": waited(
            funcol.all_reduce_coalesced([data(3), data(2, 2)], "sum", group)
        ),
        "funcol all_gather_coalesced": waited(
            funcol.all_gather_into_tensor_coalesced([data(3), data(2, 2)], group)
        ),
        "funcol reduce_scatter_coalesced": waited(
            funcol.reduce_scatter_tensor_coalesced(
                [data(ranks), data(2 * ranks, 2)], "sum", [0, 0], group
            )
        ),
    }
