"""The saved sets a linear program finds, against all subsets of storages of small problems.

`_CutProgram` is right if no subset is cheaper at the same price, in its own terms. `_hull`
is right if, in the terms of plans (`complete`), its corners are the whole lower hull of all
subsets; that holds where the two agree: no views but waits', and nothing that runs only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, combinations, pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.core.check import check
from overlapc.core.ir import Cost, Problem, Profile
from overlapc.core.simulate import saved_bytes
from overlapc.solvers.choose.choice import Needs, plan_on_demand
from overlapc.solvers.choose.keep import _CutProgram, _hull, keep_sets
from tests.plain.strategies import problems
from tests.plain.tiny import tiny

Priced = Callable[[frozenset[str]], tuple[int, int]]  # kept storages -> ns, bytes


def subsets(names: list[str]) -> Iterator[frozenset[str]]:
    found = (combinations(names, count) for count in range(len(names) + 1))
    return map(frozenset, chain.from_iterable(found))


def assert_none_beats(kept: Iterable[str], names: list[str], priced: Priced) -> None:
    ns, bytes_ = priced(frozenset(kept))
    for other in subsets(names):
        other_ns, other_bytes = priced(other)
        assert other_ns >= ns or other_bytes >= bytes_, f"{sorted(other)} beats {sorted(kept)}"


def realistic(problem: Problem) -> Problem:
    """The same with microseconds and kilobytes in place of nanoseconds and bytes."""
    trace = problem.trace
    values = tuple(replace(value, bytes=value.bytes * 1000) for value in trace.values)
    costs = {
        name: Cost(cost.compute_ns * 1000, cost.comm_ns * 1000)
        for name, cost in problem.profile.costs.items()
    }
    return replace(problem, trace=replace(trace, values=values), profile=Profile(costs))


# --- the program, in its own terms --------------------------------------------------------------


def own_terms(problem: Problem, free: frozenset[str]) -> tuple[list[str], Priced]:
    """The storages to choose from and what a choice costs, by walking back from what the
    backward reads: a storage that is not kept has its maker run, the first op with a value on it.
    A nanosecond for each op breaks ties.
    """
    trace = problem.trace
    needs = Needs(trace)
    size = {value.storage: value.bytes for value in trace.values}
    maker = {trace.value[v].storage: op for op in reversed(trace.ops) for v in op.outputs}
    choosable = [
        storage
        for storage, op in maker.items()
        if op.is_forward and needs.may_rerun(op) and storage not in trace.resident
    ]

    def priced(kept: frozenset[str]) -> tuple[int, int]:
        run: set[str] = set()
        front = [name for op in trace.ops if not op.is_forward for name in op.inputs]
        while front:
            storage = trace.value[front.pop()].storage
            if storage in choosable and storage not in kept and maker[storage].name not in run:
                run.add(maker[storage].name)
                front += maker[storage].inputs
        costs = [problem.cost(name) for name in run]
        ns = sum(cost.compute_ns + cost.comm_ns + 1 for cost in costs)
        return ns, sum(size[storage] for storage in kept if storage not in free)

    return choosable, priced


@settings(max_examples=40)
@given(problems(max_ops=3).map(realistic), st.integers(0, 1000), st.data())
def test_no_subset_is_cheaper_at_the_same_price(problem, price_permille, data):
    storages, priced = own_terms(problem, frozenset())
    if not 0 < len(storages) <= 8:
        return
    free = frozenset(s for s in storages if data.draw(st.integers(0, 4)) == 4)
    storages, priced = own_terms(problem, free)
    program = _CutProgram(problem, Needs(problem.trace), free)
    if not program.columns:
        return
    for price in (0.001, price_permille / 250, 1000.0):
        kept = program.solve(price)
        assert set(kept) <= set(storages)
        ns, bytes_ = priced(frozenset(kept))
        least = min(n + price * b for n, b in map(priced, subsets(storages)))
        assert ns + price * bytes_ <= least + 0.5 + 1e-6 * least
        assert_none_beats(kept, storages, priced)


# --- the hull, in the terms of plans ------------------------------------------------------------


def layers(rng: Random) -> Problem:
    """Up to seven forward ops and collectives, each with a storage, and a backward that reads
    some of them."""
    lines, known = [], ["x"]
    for i in range(rng.randint(2, 7)):
        reads = " ".join(dict.fromkeys([known[-1], rng.choice(known)]))
        if rng.randint(0, 3) == 3:
            lines.append(f"c{i} F tp | {reads} > raw{i} | 0 + {rng.randint(0, 900)}_000")
            lines.append(f"wait{i} F | raw{i} > h{i}~raw{i}")
        else:
            lines.append(f"f{i} F | {reads} > h{i} | {rng.randint(0, 900)}_000")
        known.append(f"h{i}")
    read = [name for name in known if rng.randint(0, 2)]
    lines.append(f"grad I | t {' '.join(read)} > dx | 0")
    sizes = {f"{kind}{i}": rng.randint(0, 50) * 10**6 for i in range(7) for kind in ("h", "raw")}
    return tiny("\n".join(lines), "dx", sizes=sizes)


def plan_terms(problem: Problem, free: frozenset[str]) -> tuple[list[str], Priced]:
    """What the plan that follows from a choice recomputes and saves."""
    trace = problem.trace
    needs = Needs(trace)

    def priced(kept: frozenset[str]) -> tuple[int, int]:
        choice = needs.complete(kept)
        costs = [problem.cost(name) for name in choice.recomputed]
        saved = [name for name in choice.saved if trace.value[name].storage not in free]
        return sum(cost.compute_ns + cost.comm_ns for cost in costs), saved_bytes(problem, saved)

    made = (trace.value[v].storage for op in trace.ops if op.is_forward for v in op.outputs)
    return list(dict.fromkeys(made)), priced


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_the_corners_are_the_hull_of_all_subsets(rng):
    problem = layers(rng)
    storages, _ = plan_terms(problem, frozenset())
    free = frozenset(s for s in storages if rng.randint(0, 4) == 4)
    _, priced = plan_terms(problem, free)
    corners = _hull(problem, Needs(problem.trace), free, solves=100)
    everything = {priced(kept) for kept in subsets(storages)}
    slack = len(problem.trace.ops)  # the program adds a nanosecond to every op
    for corner in corners:
        assert (corner.ns, corner.bytes) == priced(corner.kept)
        assert not [n for n, b in everything if n < corner.ns - slack and b < corner.bytes]
    slopes = [
        (b.ns - a.ns) / (a.bytes - b.bytes) for a, b in pairwise(corners) if a.bytes > b.bytes
    ]
    for price in {0.0, *slopes, *(slope * 1.1 for slope in slopes), 1e6}:
        best = min(corner.ns + price * corner.bytes for corner in corners)
        least = min(n + price * b for n, b in everything)
        assert best <= least * (1 + 1e-6) + slack


def test_a_hull_by_hand():
    """Two products to keep: the small one that is dear, or the large one that is cheap."""
    problem = tiny(
        """
        f F | x   > h  | 900_000
        g F | h   > y  | 100_000
        d I | t h y > dx | 0
        """,
        "dx",
        sizes={"h": 1_000_000, "y": 9_000_000},
    )
    corners = _hull(problem, Needs(problem.trace), frozenset(), solves=10)
    assert [(sorted(c.kept), c.ns, c.bytes) for c in corners] == [
        (["h", "y"], 0, 10_000_000),
        (["h"], 100_000, 1_000_000),
        ([], 1_000_000, 0),
    ]


# --- the sets that are handed out ---------------------------------------------------------------


@settings(max_examples=40)
@given(problems(), st.sampled_from([4, 24, 48]))
def test_keep_sets_are_different_legal_and_begin_with_everything(problem, at_most):
    needs = Needs(problem.trace)
    sets = keep_sets(problem, needs, at_most)
    assert sets[0] == frozenset(needs.storages)
    assert len(set(sets)) == len(sets) <= 2 * at_most
    for kept in sets:
        check(problem, plan_on_demand(problem, kept, "keep", needs))
