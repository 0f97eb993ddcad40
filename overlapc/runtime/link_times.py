"""Transfer times of a pipeline, measured by the ranks at both ends of each link, or estimated."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlapc.core.schedule import Schedule
from overlapc.planning.options import Options
from overlapc.profiler.hardware import load_hardware
from overlapc.ranks.exchange import Exchange
from overlapc.ranks.groups import exchange_for
from overlapc.runtime.executor import Links, RowRun
from overlapc.tools.timing import now_ns

_PINGS = 5


def sent_ns(schedule: Schedule, stage: int, size: int, links: Links, options: Options) -> int:
    """How long a transfer of `size` bytes takes from a stage to the next. Ranks at neither end
    return 0."""
    here, there = (schedule.rank_of[s] for s in (stage, stage + 1))
    if here == there:
        return 0
    if options.profile == "estimate":
        machine = load_hardware(options.hardware)
        ends = [dist.get_global_rank(links.group, rank) for rank in (here, there)]
        return machine.collective_ns("p2p", size, 2, machine.most_in_a_node(ends))
    if links.rank not in (here, there):
        return 0
    peer = there if links.rank == here else here
    run = RowRun(schedule, (), {}, {}, links)
    run.at = f"measuring the link to rank {peer}"
    tensor = torch.zeros(size, dtype=torch.uint8)

    def ping() -> None:
        for how in (dist.isend, dist.irecv) if links.rank == here else (dist.irecv, dist.isend):
            run.wait(run.post(how, tensor, 0, peer, "a ping"), "a ping", peer)

    return _timed(ping) // 2


def averaging_ns(
    schedule: Schedule, stage: int, trained: Sequence[Tensor], links: Links, options: Options
) -> int:
    """How long the replicas take to average the gradients of a stage's parameters, all at once. All
    replicas call this together and get the same result."""
    if links.replicas is None:
        return 0
    ranks = dist.get_process_group_ranks(links.replicas)
    if options.profile == "estimate":
        machine = load_hardware(options.hardware)
        sizes = [parameter.nbytes for parameter in trained]
        return machine.average_ns(sizes, len(ranks), machine.most_in_a_node(ranks))
    run = RowRun(schedule, (), {}, {}, links)
    run.at = "measuring the link to the replicas"
    gradients = [torch.zeros_like(parameter, requires_grad=False) for parameter in trained]

    def average() -> None:
        for gradient in gradients:
            run.average(gradient, "nothing")
        run.end_averages()

    with Exchange(ranks, links.timeout_s) as exchange:
        what = f"averaging gradients of stage {stage}"
        mine = exchange.during(what, lambda: _timed(average))
        return max(map(int, exchange.gather(what, str(mine).encode())))


def alike_ns(
    groups: Sequence[str], took_ns: tuple[int, int], timeout_s: float | None
) -> tuple[int, int]:
    """The longest of each of these times on the ranks that share a stage's collectives: each rank
    measured the links of its own pipeline, and all must place the same rows."""
    with exchange_for(groups, timeout_s) as exchange:
        if exchange is None:
            return took_ns
        told = [*map(json.loads, exchange.gather("links", json.dumps(took_ns).encode()))]
    first_ns, second_ns = (max(times) for times in zip(*told, strict=True))
    return first_ns, second_ns


def _timed(run: Callable[[], None]) -> int:
    """The quickest of a few runs after a warm-up."""
    times = []
    for _ in range(_PINGS):
        start = now_ns()
        run()
        times.append(now_ns() - start)
    return min(times[1:])
