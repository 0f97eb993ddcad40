"""Ranks agree on the graph that they plan, on its costs, and on the plan.

Without an `Exchange` a rank is alone; the functions then do the same for this rank only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from overlapc.errors import CaptureError, Infeasible
from overlapc.ir import Cost, Plan, Profile, Slowdown, Trace
from overlapc.planning.options import ALIKE, Options
from overlapc.planning.problem import TrainingStep
from overlapc.progress import doing
from overlapc.text import format_plan, parse_plan

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.planning.report import Report
    from overlapc.runtime.exchange import Exchange

_NOTHING_FITS = "infeasible "
_FEW_RANKS = 4  # that a plan is judged by; each more is as much work again
_UNLIKE = 0.05  # of a rank's compute, that another takes longer in some ops: more than noise is


class Agreed(NamedTuple):
    """What ranks have agreed on.

    The graph has in its trace the most bytes that any rank has measured of each value; the step
    has the mean of the ranks' costs of adding gradients, and is in pairs only if it may be on every
    rank. `here` is the trace with this rank's bytes, if ranks have measured others.
    """

    captured: Captured
    step: TrainingStep
    profiles: list[Profile]
    here: Trace | None


def agreed(
    captured: Captured,
    step: TrainingStep,
    options: Options,
    primals: Sequence[Any] | None,
    exchange: Exchange | None,
) -> Agreed:
    """Agree with the other ranks on graph and options."""
    from overlapc.passes.trace import trace_joint

    if exchange is not None:
        exchange.agree(
            "trace",
            captured.trace.digest,
            "every rank must run the same model on inputs of the same shapes",
        )
        exchange.agree(
            "options",
            f"{options.text(ALIKE)} {step.microbatches} {step.lag} {step.in_flight}",
            "pass the same options on every rank",
        )
    profiles, all_sizes = _profiles(captured, options, primals, exchange)
    sizes = {name: max(s.get(name, 0) for s in all_sizes) for name in all_sizes[0]}

    def of_sizes(sizes: Mapping[str, int]) -> Captured:
        joint, results = captured.joint, captured.num_fwd_outputs
        return trace_joint(joint, results, captured.static_inputs, sizes=sizes)

    here = None
    if exchange is not None and any(each != all_sizes[0] for each in all_sizes):
        here = of_sizes(all_sizes[exchange.ranks.index(exchange.rank)]).trace
    captured = of_sizes(sizes) if sizes else captured
    if exchange is not None and step.gradients is not None:
        mine = json.dumps([step.add_ns_per_kib, step.pairs]).encode()
        adding, pairs = zip(*map(json.loads, exchange.gather("adding", mine)), strict=True)
        step = replace(step, add_ns_per_kib=sum(adding) / len(adding), pairs=all(pairs))
    return Agreed(captured, step, profiles, here)


def of_all_ranks(
    reports: Sequence[Report],
    here: Trace | None,
    judge: Callable[[Trace], Sequence[Report]],
    exchange: Exchange | None,
) -> list[Report]:
    """The reports with the peak of each rank by its own sizes, where these differ: one that has the
    most of every value, as the plan allows for, holds more than any. `judge` reports on the same
    plans for this rank's trace."""
    if here is None or exchange is None:
        return list(reports)
    mine = [[part.timeline.peak_bytes for part in each.parts] for each in judge(here)]
    told = map(json.loads, exchange.gather("peaks", json.dumps(mine).encode()))
    by_report = zip(*told, strict=True)  # of each the peaks of all ranks, by part
    return [
        replace(each, rank_peaks=tuple(max(parts) for parts in peaks))
        for each, peaks in zip(reports, by_report, strict=True)
    ]


def decided(decide: Callable[[], tuple[Plan, ...]], exchange: Exchange | None) -> tuple[Plan, ...]:
    """Let the leader `decide`; every rank returns its plans, or raises its Infeasible."""

    def tell() -> str:
        try:
            return json.dumps([format_plan(plan) for plan in decide()])
        except Infeasible as error:
            return f"{_NOTHING_FITS}{error.budget_bytes} {error.smallest_bytes}"

    text = tell() if exchange is None else exchange.broadcast("plan", tell)
    if text.startswith(_NOTHING_FITS):
        budget, smallest = text.removeprefix(_NOTHING_FITS).split()
        raise Infeasible(int(budget), int(smallest))
    return tuple(map(parse_plan, json.loads(text)))


def this_rank() -> int | None:
    """This process's rank, if torch.distributed is initialized."""
    dist = sys.modules.get("torch.distributed")
    ready = dist is not None and dist.is_available() and dist.is_initialized()
    return dist.get_rank() if ready and dist is not None else None


def _profiles(
    captured: Captured,
    options: Options,
    primals: Sequence[Any] | None,
    exchange: Exchange | None,
) -> tuple[list[Profile], list[Mapping[str, int]]]:
    """The profiles and measured sizes of all ranks; if one rank cannot capture, all raise."""
    key = _work(captured, options, primals)
    known = options.known.get(key)
    if exchange is None:
        known = options.known[key] = known or profile_captured(captured, options, primals)
        return [known[0]], [known[1]]
    everywhere = b"0" not in exchange.gather("known costs", b"1" if known else b"0")
    try:
        if known is None or not everywhere:  # all measure together, or nobody does
            known = exchange.during(
                "measuring", lambda: profile_captured(captured, options, primals)
            )
            options.known[key] = known
        mine = _pack(*known)
    except CaptureError as error:
        mine = json.dumps({"failed": [error.reason, error.place]}).encode()
    told = [json.loads(data) for data in exchange.gather("profile", mine)]
    for rank, data in zip(exchange.ranks, told, strict=True):
        if "failed" in data:
            reason, place = data["failed"]
            raise CaptureError(f"{reason} (on rank {rank})", place)
    return [_unpack(data) for data in told], [data["sizes"] for data in told]


def _work(captured: Captured, options: Options, primals: Sequence[Any] | None) -> tuple[Any, ...]:
    """A key for measured costs: the names in the graph, and the sizes that the graph leaves
    open."""
    trace = captured.trace
    sizes = str([tuple(getattr(value, "shape", (value,))) for value in primals or ()])
    names = tuple(op.name for op in trace.ops)
    return trace.digest, names, trace.lanes, options.profile, options.hardware, sizes


def profile_captured(
    captured: Captured, options: Options, primals: Sequence[Any] | None
) -> tuple[Profile, Mapping[str, int]]:
    """Measure or estimate a graph's costs; also return the measured sizes of its values."""
    from overlapc.profiler.cache import Cache

    path = None if isinstance(options.cache, bool) else options.cache
    cache = Cache(path) if options.cache else None
    if options.profile == "measure":
        from overlapc.profiler.measure import measure

        with doing(f"measuring {len(captured.trace.ops)} ops", this_rank()):
            return measure(captured, primals, cache=cache)
    from overlapc.profiler.estimate import estimate
    from overlapc.profiler.hardware import load_hardware

    return estimate(captured, load_hardware(options.hardware), known=cache), {}


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Merge all ranks' profiles: mean compute, the slowest rank's communication and memory."""
    first = profiles[0]
    count = len(profiles)
    costs = {}
    for name, cost in first.costs.items():
        all_costs = [p.costs[name] for p in profiles]
        costs[name] = Cost(
            compute_ns=sum(c.compute_ns for c in all_costs) // count,
            comm_ns=max(c.comm_ns for c in all_costs),
            workspace_bytes=max(c.workspace_bytes for c in all_costs),
            source=cost.source,
        )
    slowdown = Slowdown(
        max(p.slowdown.compute_permille for p in profiles),
        max(p.slowdown.comm_permille for p in profiles),
    )
    return Profile(costs, slowdown, first.conditions)


def unlike_ranks(profiles: Sequence[Profile]) -> list[Profile]:
    """The few ranks that decide how long a step takes where loads differ by op: the slowest, and
    those that wait for it here and let it wait there, as ranks with other experts do. None where
    the slowest rank alone says nearly all."""
    names = list(profiles[0].costs)
    costs = [[profile.costs[name].compute_ns for name in names] for profile in profiles]
    slowest = max(range(len(costs)), key=lambda r: sum(costs[r]))
    found, most = [slowest], costs[slowest]
    worth = _UNLIKE * sum(most)
    while len(found) < _FEW_RANKS:
        both = [list(map(max, most, each)) for each in costs]
        next_one = max(range(len(costs)), key=lambda r: sum(both[r]))
        if sum(both[next_one]) - sum(most) <= worth:
            break
        found.append(next_one)
        most = both[next_one]
    return [profiles[r] for r in found] if len(found) > 1 else []


def _pack(profile: Profile, sizes: Mapping[str, int]) -> bytes:
    slowdown = profile.slowdown
    return json.dumps(
        {
            "costs": {
                n: [c.compute_ns, c.comm_ns, c.workspace_bytes, c.source]
                for n, c in profile.costs.items()
            },
            "slowdown": [slowdown.compute_permille, slowdown.comm_permille],
            "conditions": dict(profile.conditions),
            "sizes": dict(sizes),
        }
    ).encode()


def _unpack(found: Mapping[str, Any]) -> Profile:
    costs = {name: Cost(*cost) for name, cost in found["costs"].items()}
    return Profile(costs, Slowdown(*found["slowdown"]), found["conditions"])
