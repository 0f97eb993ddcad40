"""`measure_links` times every kind of collective that a graph holds, on its own process group.

Collectives run as functional ones, as in the graph. All ranks of a group call `measure_links` with
the same collectives in the same order. Figures that decide how often something runs are agreed
first, so ranks stay in step.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from overlapc.core.errors import CaptureError, OptionError, RankError
from overlapc.emulate.model import Kind
from overlapc.passes.nodes import group_of
from overlapc.passes.storages import hint
from overlapc.profiler.cache import Cache
from overlapc.profiler.clock import Clock, device_name
from overlapc.profiler.link_model import Collective, Curve, LinkModel
from overlapc.profiler.slowdown import measure_slowdown
from overlapc.profiler.together import agree, backend_of, middle_mean, rank_in, ranks_in

__all__ = ["agree_sizes", "as_if_even", "behind_launches", "collective_of", "measure_links"]

_KINDS: tuple[tuple[str, Kind], ...] = (
    ("all_reduce", "all_reduce"),
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_to_all", "all_to_all"),
    ("shard_dim_alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("isend", "p2p"),
    ("irecv", "p2p"),
    ("batch_p2p", "p2p"),
)
_CACHE_TOLERANCE = 0.25

_ops = torch.ops._c10d_functional


def collective_of(node: fx.Node, number: Callable[[Any], int] | None = None) -> Collective:
    """Return the collective of a start node. `number` gives the real value of a size; default: its
    hint.

    An all-to-all whose rows all go to one rank is a send. One of other uneven parts counts as an
    even one with as many bytes sent, or received, by this rank; the part that a rank keeps crosses
    no link.
    """
    name = node.target._schema.name.split("::")[-1]  # type: ignore[union-attr]
    kind = next((kind for prefix, kind in _KINDS if name.startswith(prefix)), None)
    if kind is None:
        raise CaptureError(f"overlapc knows no figures for the collective {node.target}", node.name)
    given = [t for n in node.all_input_nodes for t in tensors(n.meta.get("val"))]
    made = tensors(node.meta.get("val"))
    group, dtype = group_of(node), str(given[0].dtype).removeprefix("torch.") if given else ""
    total = max(_total_bytes(given, number or hint), _total_bytes(made, number or hint))
    if name == "all_to_all_single" and number is None and goes_to_one(node):
        kind = "p2p"
    if number is not None and name == "all_to_all_single" and all(node.args[1:3]):
        row_bytes = math.prod(map(number, given[0].shape[1:]), start=given[0].element_size())
        received, sent = (
            [number(s.meta["val"] if isinstance(s, fx.Node) else s) for s in splits]  # type: ignore[union-attr]
            for splits in node.args[1:3]
        )
        total = as_if_even(received, sent, row_bytes, group)
    return Collective(group, kind, dtype if kind in ("all_reduce", "reduce_scatter") else "", total)


def goes_to_one(node: fx.Node) -> bool:
    """Do all rows of an all-to-all go to one of several ranks, as in a ring?"""
    sent = node.args[2]
    return isinstance(sent, (list, tuple)) and len(sent) > sum(map(bool, sent)) == 1


def as_if_even(received: Sequence[int], sent: Sequence[int], row_bytes: int, group: str) -> int:
    """Full bytes of the even all-to-all that moves as many bytes over this rank's link; rows are
    by rank."""
    ranks, me = ranks_in(group), rank_in(group)
    others = max(sum(rows) - rows[me] for rows in (received, sent))
    return others * row_bytes * ranks // max(1, ranks - 1)


def hinted_bytes(tensor: torch.Tensor) -> int:
    return _total_bytes([tensor], hint)


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an op's value, which may be a list or tuple of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return []


def _total_bytes(tensors: Sequence[torch.Tensor], number: Callable[[Any], int]) -> int:
    return sum(math.prod(map(number, t.shape), start=t.element_size()) for t in tensors)


def agree_sizes(calls: Iterable[Collective], device: torch.device) -> list[Collective]:
    """Return the same collectives with the largest size of any rank, which decides the time.

    RankError if the ranks of a group are about to run different collectives.
    """
    calls = list(calls)
    for group in dict.fromkeys(call.group for call in calls):
        mine = [i for i, call in enumerate(calls) if call.group == group]
        told = str([(calls[i].kind, calls[i].dtype) for i in mine])
        digest = int(hashlib.sha256(told.encode()).hexdigest()[:15], 16)
        most, least = agree([digest, -digest], "max", group, device)
        if most != -least:
            raise RankError(
                f"the ranks of group {group} hold different collectives; this one holds "
                f"{len(mine)}: run the same model on every rank"
            )
        sizes = agree([calls[i].bytes for i in mine], "max", group, device)
        for i, size in zip(mine, sizes, strict=True):
            calls[i] = replace(calls[i], bytes=size)
    return calls


def behind_launches(
    calls: Sequence[Collective],
    took_ns: Sequence[int],
    launch_ns: Sequence[int],
    device: torch.device,
) -> list[int]:
    """What is left of the collectives' times when they have been launched, in the mean of the ranks
    of each group."""
    left = list(took_ns)
    for group in dict.fromkeys(call.group for call in calls):
        mine = [i for i, call in enumerate(calls) if call.group == group]
        launches = agree([launch_ns[i] for i in mine], "sum", group, device)
        for i, launch in zip(mine, launches, strict=True):
            left[i] = max(0, took_ns[i] - launch // ranks_in(group))
    return left


def measure_links(
    calls: Iterable[Collective],
    *,
    device: torch.device | str = "cpu",
    repeats: int = 7,
    budget_s: float = 10.0,
    cache: Cache | None = None,
    beside: Kind | None = None,
) -> LinkModel:
    """Time each collective at its exact size, and at a smaller one, which gives a line.

    A figure is the `middle_mean` of at most `repeats` runs on each rank, one right after the other
    as in a busy step, of which the slowest rank's counts. It has the launch in it: gloo may send
    before a launch has returned, the more the busier the core is, so only both together are the
    same everywhere (`behind_launches` leaves it out). `budget_s` limits the whole; when it runs
    out, only the largest and the smallest size of each kind are still measured, and those between
    are interpolated. A figure in `cache` is used only if one fresh run of the largest size agrees.
    `beside` names the kind with which the slowdown is measured; by default the one that takes
    longest in all.
    """
    if repeats < 1 or not budget_s > 0:
        raise OptionError(
            f"repeats={repeats}, budget_s={budget_s}: expected at least one run and some time"
        )
    device = torch.device(device)
    calls = list(calls)
    try:
        for group in {call.group for call in calls}:
            if backend_of(group) == "fake":
                raise OptionError(
                    f"process group {group} is fake, so its links take no time: plan with "
                    'estimate (profile="estimate"), or give links of your own'
                )
        with torch.no_grad():
            return _Links(device, repeats, budget_s, cache, beside).measure(
                agree_sizes(calls, device)
            )
    except RuntimeError as error:  # torch's error for a dead peer or a timeout
        raise RankError(f"a collective failed while links were measured: {error}") from error


class _Links:
    def __init__(
        self,
        device: torch.device,
        repeats: int,
        budget_s: float,
        cache: Cache | None,
        beside: Kind | None,
    ) -> None:
        self.device, self.repeats, self.cache, self.beside = device, repeats, cache, beside
        self.budget_ns = int(budget_s * 1e9)
        self.clock = Clock(device)
        self.identities: dict[str, str] = {}

    def measure(self, calls: Sequence[Collective]) -> LinkModel:
        sizes: dict[Collective, set[int]] = {}  # keyed by the call with bytes=0
        for call in calls:
            if ranks_in(call.group) > 1 and call.bytes > 0:
                sizes.setdefault(replace(call, bytes=0), set()).add(call.bytes)
            else:
                sizes.setdefault(replace(call, bytes=0), set())
        share_ns = int(self.budget_ns * 0.7) // max(1, len(sizes))
        curves = [self.curve(call, wanted, share_ns) for call, wanted in sizes.items()]
        alone = LinkModel(tuple(curves))
        totals = Counter[Curve]()
        for call in calls:
            if self.beside in (None, call.kind):
                totals[alone.curve(call)] += alone.time_ns(call)
        slowdown, how = measure_slowdown(totals, self.functional, self.clock, self.budget_ns // 3)
        if self.cache is not None:
            self.cache.save()
        conditions = {
            "device": device_name(self.device),
            "backend": ", ".join(dict.fromkeys(backend_of(c.group) for c in curves)),
            "runs": f"middle mean of at most {self.repeats}, slowest rank",
            "slowdown": how,
        }
        return LinkModel(tuple(curves), slowdown, conditions)

    def curve(self, call: Collective, wanted: set[int], share_ns: int) -> Curve:
        ranks = ranks_in(call.group)
        if not wanted:
            return Curve(call.group, call.kind, call.dtype, ranks, (), "measured")
        largest = max(wanted)
        # A size far below the largest gives the latency.
        sizes = sorted(wanted | {max(1024, largest // 8)}, reverse=True)
        order = dict.fromkeys([largest, sizes[-1], *sizes])
        points, source = self.cached(call, tuple(order)), "cached"
        if points is None:
            points, source = self.timed(call, tuple(order), share_ns), "measured"
            if self.cache is not None:
                for size, ns in points.items():
                    self.cache.put(*self.key(call, size), (ns,))
        return Curve(
            call.group, call.kind, call.dtype, ranks, tuple(sorted(points.items())), source
        )

    def timed(self, call: Collective, sizes: Sequence[int], share_ns: int) -> dict[int, int]:
        """Size -> nanoseconds. The first, the largest, is measured again at the end, and the lower
        figure counts: what slows the machine for a moment slows all runs of one figure."""
        points: dict[int, int] = {}
        spent_ns = 0
        order = [*sizes, sizes[0]]
        for left, size in zip(range(len(order), 0, -1), order, strict=True):
            if spent_ns > share_ns and len(points) >= 2:
                break
            run = self.runner(call, size)
            (once,) = agree([max(1, run())], "max", call.group, self.device)  # also a warm-up
            affordable = (share_ns - spent_ns) // left // once
            count = max(1, min(self.repeats, affordable))
            # The first meets an idle link, which may take a burst at once; in a step most do not.
            mine = middle_mean([run() for _ in range(1 + count)][1:])
            (found,) = agree([mine], "max", call.group, self.device)
            points[size] = min(points.get(size, found), found)
            spent_ns += once * (count + 2)
        return points

    def runner(self, call: Collective, size: int) -> Callable[[], int]:
        """Make a function that runs the collective once, as soon as the one before has ended, and
        returns its time."""
        start, wait = self.functional(call, size)
        agree([0], "max", call.group, self.device)

        def run() -> int:
            self.clock.ahead()
            begun = self.clock.mark()
            wait(start())
            _, ns = self.clock.read([begun, self.clock.mark()])
            return ns

        return run

    def functional(
        self, call: Collective, size: int
    ) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """Make (start, wait) functions of a collective of about `size` full bytes."""
        group = call.group
        ranks = ranks_in(group)
        dtype = getattr(torch, call.dtype) if call.dtype else torch.uint8
        each = max(1, size // (dtype.itemsize * ranks))  # elements of one rank's part
        full = torch.ones(each * ranks, dtype=dtype, device=self.device)
        part = full[:each].clone()
        wait = _ops.wait_tensor
        match call.kind:
            case "all_reduce":
                return lambda: _ops.all_reduce(full, "sum", group), wait
            case "all_gather":
                return lambda: _ops.all_gather_into_tensor(part, ranks, group), wait
            case "reduce_scatter":
                return lambda: _ops.reduce_scatter_tensor(full, "sum", ranks, group), wait
            case "all_to_all":
                split = [each] * ranks
                return lambda: _ops.all_to_all_single(full, split, split, group), wait
            case "broadcast":
                return lambda: _ops.broadcast(full, 0, group), wait
        return self.point_to_point(full, group)

    def point_to_point(
        self, tensor: torch.Tensor, name: str
    ) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """Every even rank sends to the odd rank after it; a leftover rank does nothing."""
        group = dist.distributed_c10d._resolve_process_group(name)
        me, members = group.rank(), dist.get_process_group_ranks(group)
        peer = me ^ 1

        def start() -> Any:
            if peer >= len(members):
                return None
            send = dist.isend if me < peer else dist.irecv
            return send(tensor, members[peer], group=group)

        return start, lambda work: work.wait() if work is not None else None

    # ------------------------------------------------------------------ cache

    def identity(self, group: str) -> str:
        """A text that identifies the link, agreed over the group."""
        if group not in self.identities:
            here = [
                socket.gethostname(),
                [name for _, name in socket.if_nameindex()],
                os.environ.get("GLOO_SOCKET_IFNAME"),
                os.environ.get("NCCL_SOCKET_IFNAME"),
            ]
            number = int(hashlib.sha256(str(here).encode()).hexdigest()[:12], 16)
            high, low = agree([number, -number], "max", group, self.device)
            text = f"link {backend_of(group)} {device_name(self.device)} torch {torch.__version__}"
            self.identities[group] = f"{text} hosts {high:x} {-low:x}"
        return self.identities[group]

    def key(self, call: Collective, size: int) -> tuple[str, str]:
        text = f"{call.kind} {call.dtype} ranks {ranks_in(call.group)} bytes {size}"
        return self.identity(call.group), text

    def cached(self, call: Collective, sizes: Sequence[int]) -> dict[int, int] | None:
        """The cached figures, if all ranks have all of them and a fresh run agrees."""
        if self.cache is None:
            return None
        found = [self.cache.get(*self.key(call, size)) for size in sizes]
        times = [numbers[0] for numbers in found if numbers]
        hit = int(len(times) == len(sizes))
        if agree([hit], "min", call.group, self.device) == [0]:
            return None
        times = agree(times, "max", call.group, self.device)
        run = self.runner(call, sizes[0])
        run()
        (fresh,) = agree([min(run(), run())], "max", call.group, self.device)
        if abs(fresh - times[0]) > _CACHE_TOLERANCE * times[0]:
            return None
        return dict(zip(sizes, times, strict=True))
