"""Ranks agree on the graph that they plan, on its costs, and on the plan.

Without an `Exchange` a rank is alone; the functions then do the same for this rank only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from overlapc.core.errors import CaptureError, Infeasible
from overlapc.core.ir import Cost, Plan, Profile, Slowdown
from overlapc.core.merge import with_bytes
from overlapc.core.simulate import peak_bytes
from overlapc.core.text import format_plan, parse_plan
from overlapc.planning.kept import KeptPlans
from overlapc.planning.options import ALIKE, Options
from overlapc.planning.problem import TrainingStep
from overlapc.tools.progress import doing

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.planning.report import Report
    from overlapc.ranks.exchange import Exchange

_NOTHING_FITS = "infeasible "
_FEW_RANKS = 4  # that a plan is judged by; each more is as much work again
_UNLIKE = 0.05  # of a rank's compute, that another takes longer in some ops: more than noise is


class Sizes(NamedTuple):
    """Measured bytes of a rank's values: the most of all slices of a batch or microbatches of a
    step, and those of each."""

    most: Mapping[str, int]
    each: Sequence[Mapping[str, int]]


class Agreed(NamedTuple):
    """What ranks have agreed on.

    The graph has in its trace the most bytes that any rank has measured of each value; the step
    has the mean of the ranks' costs of adding gradients, and is in pairs only if it may be on every
    rank. `here` are the bytes of this rank's values, by slice or microbatch, if any has less of
    one.
    """

    captured: Captured
    step: TrainingStep
    profiles: list[Profile]
    here: Sequence[Mapping[str, int]]


def agreed(
    captured: Captured,
    step: TrainingStep,
    options: Options,
    primals: Sequence[Any] | None,
    exchange: Exchange | None,
    others: Sequence[Sequence[Any]] = (),
) -> Agreed:
    """Agree with the other ranks on graph and options. `primals` are the graph's inputs, `others`
    those of the other slices of a batch, or of a step's other microbatches."""
    from overlapc.passes.trace import trace_joint

    if exchange is not None:
        exchange.agree(
            "trace",
            captured.trace.digest,
            "every rank must run the same model on inputs of the same shapes",
        )
        agree_on_options(step, options, exchange)
    profiles, found = profiles_of_all(captured, options, primals, others, exchange)
    sizes = {name: max(each.most.get(name, 0) for each in found) for name in found[0].most}
    unlike = any(each != sizes for rank in found for each in rank.each)
    place = 0 if exchange is None else exchange.ranks.index(exchange.rank)
    here = found[place].each if unlike else ()
    if sizes:
        captured = trace_joint(
            captured.joint, captured.num_fwd_outputs, captured.static_inputs, sizes=sizes
        )
    if exchange is not None and step.gradients is not None:
        mine = json.dumps([step.add_ns_per_kib, step.pairs]).encode()
        adding, pairs = zip(*map(json.loads, exchange.gather("adding", mine)), strict=True)
        step = replace(step, add_ns_per_kib=sum(adding) / len(adding), pairs=all(pairs))
    return Agreed(captured, step, profiles, here)


def agree_on_options(step: TrainingStep, options: Options, exchange: Exchange) -> None:
    exchange.agree(
        "options",
        f"{options.text(ALIKE)} microbatches={step.microbatches} lag={step.lag} "
        f"in_flight={step.in_flight}".strip(),
        "pass the same options, and as many microbatches, on every rank",
    )


def of_all_ranks(
    reports: Sequence[Report],
    here: Sequence[Mapping[str, int]],
    slices: int,
    exchange: Exchange | None,
) -> list[Report]:
    """The reports with the peak of each rank by its own sizes: one that has the most of every
    value, as the plan allows for, holds more than any. `here` are this rank's, of all slices of the
    batch or of each microbatch."""
    width = max(2, slices)  # two microbatches beside each other, or all slices of one
    beside = [here[i : i + width] for i in range(0, len(here), slices)]
    mine = [
        max(_held_bytes(part, each) for part in report.parts for each in beside)
        for report in reports
    ]
    told = [mine]
    if exchange is not None:
        told = [json.loads(data) for data in exchange.gather("peaks", json.dumps(mine).encode())]
    by_report = zip(*told, strict=True)  # of each the peaks of all ranks
    return [replace(each, rank_peaks=peaks) for each, peaks in zip(reports, by_report, strict=True)]


def _held_bytes(report: Report, each: Sequence[Mapping[str, int]]) -> int:
    """The peak of the report's plan where the values of each slice have so many bytes."""
    problem = report.problem
    return peak_bytes(replace(problem, trace=with_bytes(problem.trace, each)), report.plan)


def decided(decide: Callable[[], tuple[Plan, ...]], exchange: Exchange | None) -> tuple[Plan, ...]:
    """Let the leader `decide`; every rank returns its plans, or raises its Infeasible."""
    found = told(lambda: [format_plan(plan) for plan in decide()], exchange)
    return tuple(map(parse_plan, found))


def told(tell: Callable[[], Sequence[str]], exchange: Exchange | None) -> list[str]:
    """The texts that the leader tells, on every rank, or its Infeasible."""

    def written() -> str:
        try:
            return json.dumps(tell())
        except Infeasible as error:
            return f"{_NOTHING_FITS}{error.budget_bytes} {error.smallest_bytes}"

    text = written() if exchange is None else exchange.broadcast("plan", written)
    if text.startswith(_NOTHING_FITS):
        budget, smallest = text.removeprefix(_NOTHING_FITS).split()
        raise Infeasible(int(budget), int(smallest))
    found: list[str] = json.loads(text)
    return found


def this_rank() -> int | None:
    """This process's rank, if torch.distributed is initialized."""
    dist = sys.modules.get("torch.distributed")
    ready = dist is not None and dist.is_available() and dist.is_initialized()
    return dist.get_rank() if ready and dist is not None else None


def profiles_of_all(
    captured: Captured,
    options: Options,
    primals: Sequence[Any] | None,
    others: Sequence[Sequence[Any]],
    exchange: Exchange | None,
) -> tuple[list[Profile], list[Sizes]]:
    """The profiles and measured sizes of all ranks; if one rank cannot capture, all raise."""
    key = _work(captured, options, primals)

    def costs() -> tuple[Profile, Sizes]:
        """The costs, if they are not known, and the sizes with the data at hand."""
        again = () if key not in options.known or primals is None else (primals,)
        if key not in options.known:
            options.known[key] = profile_captured(captured, options, primals)
        profile, sizes = options.known[key]
        measured = measured_sizes(captured, (*again, *others)) if sizes else ()
        found = [{**sizes, **one} for one in measured]
        each = found if again and found else [sizes, *found]
        return profile, Sizes({name: max(one[name] for one in each) for name in sizes}, each)

    if exchange is None:
        profile, sizes = costs()
        return [profile], [sizes]
    known = b"1" if key in options.known else b"0"
    if b"0" in exchange.gather("known costs", known):  # all measure together, or nobody does
        options.known.pop(key, None)
    try:
        profile, sizes = exchange.during("measuring", costs)
        mine = json.dumps({**packed(profile), "sizes": sizes}).encode()
    except CaptureError as error:
        mine = json.dumps({"failed": [error.reason, error.place]}).encode()
    told = [json.loads(data) for data in exchange.gather("profile", mine)]
    for rank, data in zip(exchange.ranks, told, strict=True):
        if "failed" in data:
            reason, place = data["failed"]
            raise CaptureError(f"{reason} (on rank {rank})", place)
    return [_unpacked(data) for data in told], [Sizes(*data["sizes"]) for data in told]


def as_kept(
    kept: KeptPlans, profiles: list[Profile], step: TrainingStep, exchange: Exchange | None
) -> tuple[list[Profile], TrainingStep]:
    """The costs of an earlier run in the place of those measured now, if the leader has some that
    are near."""

    def find() -> str:
        return kept.costs([packed(profile) for profile in profiles])

    text = find() if exchange is None else exchange.broadcast("kept costs", find)
    if not text:
        return profiles, step
    ranks, adding = json.loads(text)
    return [_unpacked(rank) for rank in ranks], replace(step, add_ns_per_kib=adding)


def _work(captured: Captured, options: Options, primals: Sequence[Any] | None) -> tuple[Any, ...]:
    """A key for measured costs: the names in the graph, and the sizes that the graph leaves
    open."""
    trace = captured.trace
    sizes = str([tuple(getattr(value, "shape", (value,))) for value in primals or ()])
    names = tuple(op.name for op in trace.ops)
    return trace.digest, names, trace.groups, options.profile, options.hardware, sizes


def profile_captured(
    captured: Captured, options: Options, primals: Sequence[Any] | None
) -> tuple[Profile, dict[str, int]]:
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


def measured_sizes(
    captured: Captured, inputs: Iterable[Sequence[Any]]
) -> Iterator[Mapping[str, int]]:
    """The sizes of values with each of these inputs; none where no size depends on data."""
    from overlapc.profiler.measure import measure_sizes

    return measure_sizes(captured, inputs)


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


def packed(profile: Profile) -> dict[str, Any]:
    """A profile as JSON has it."""
    slowdown = profile.slowdown
    return {
        "costs": {
            n: [c.compute_ns, c.comm_ns, c.workspace_bytes, c.source]
            for n, c in profile.costs.items()
        },
        "slowdown": [slowdown.compute_permille, slowdown.comm_permille],
        "conditions": dict(profile.conditions),
    }


def _unpacked(found: Mapping[str, Any]) -> Profile:
    costs = {name: Cost(*cost) for name, cost in found["costs"].items()}
    return Profile(costs, Slowdown(*found["slowdown"]), found["conditions"])
