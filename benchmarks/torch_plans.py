"""What PyTorch itself would run on a problem of the set, as plans: its knapsack's saved sets, and
the orders that its overlap scheduler gives the graphs that come of them.

PyTorch's partitioner and scheduler run for real, on the captured graph; the scheduler is told
the problem's own costs of every op, which it would not have otherwise.
"""

from __future__ import annotations

import functools
import heapq
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.problems import Case, captured, costed
from overlapc.core.check import check
from overlapc.core.ir import Plan, Problem, issue
from overlapc.solvers.choose.choice import Needs
from overlapc.solvers.order.work import Work, backward_work, forward_work

BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.15, 0.0)  # of torch's activation_memory_budget


def torch_plans(case: Case, problem: Problem) -> Iterator[Plan]:
    """All that torch offers for the case, in the graphs' own order and in its scheduler's."""
    for plan in _plans(case.stage, case.hardware):
        yield replace(plan, digest=problem.trace.digest)


@functools.lru_cache(maxsize=8)
def _plans(stage: Any, hardware: str) -> tuple[Plan, ...]:
    problem = costed(stage, hardware)
    found = []
    for forward, backward in _partitions(stage):
        for overlap in (False, True):
            plan = _plan(problem, captured(stage), forward, backward, overlap)
            check(problem, plan)
            found.append(plan)
    return tuple(found)


@functools.lru_cache(maxsize=2)
def _partitions(stage: Any) -> list[Any]:
    from overlapc.passes.emit.torch_choice import torch_partitions

    return list(torch_partitions(captured(stage), [], BUDGETS))


def _plan(problem: Problem, graph: Any, forward: Any, backward: Any, overlap: bool) -> Plan:
    """The plan that runs torch's graphs. What they left out as needless runs before its user."""
    from overlapc.passes.emit.torch_choice import saved_names

    trace = problem.trace
    needs = Needs(trace)
    kept = {trace.value[name].storage for name in saved_names(graph, backward)}
    choice = needs.complete(frozenset(kept))
    if overlap:
        forward, backward = (_overlapped(problem, module) for module in (forward, backward))
    wish = [node.name for node in forward.graph.nodes if node.name in trace.op]
    for node in backward.graph.nodes:
        if node.op == "call_function" and node.name in trace.op:
            wish.append(issue(node.name, trace.op[node.name].is_forward))
    at = {text: i for i, text in enumerate(wish)}
    works = (forward_work(problem), backward_work(problem, choice))
    order = tuple(text for work in works for text in _ordered(work, at))
    return Plan(trace.digest, "torch", choice.saved, order, status="baseline")


def _ordered(work: Work, at: dict[str, int]) -> tuple[str, ...]:
    """The nodes of the work in the wished order; those without a wish come before their users."""
    last = float(len(at))
    texts = dict(zip(work.nodes, work.text(work.nodes), strict=True))
    rank: dict[int, float] = {}
    for n in reversed(work.nodes):
        users = min((rank[user] for user in work.after[n]), default=last)
        rank[n] = min(users, at.get(texts[n], last))
    missing = dict(work.needs)
    ready = [(rank[n], n) for n in work.nodes if not missing[n]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, n = heapq.heappop(ready)
        order.append(n)
        for user in work.after[n]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (rank[user], user))
    return work.text(order)


def _overlapped(problem: Problem, module: Any) -> Any:
    """A copy of the graph in the order of torch's overlap scheduler."""
    import copy

    from torch._inductor.fx_passes import overlap_scheduling

    def milliseconds(node: Any, override_size: int | None = None) -> float:
        if node.name not in problem.trace.op:
            return 0.0
        cost = problem.cost(node.name)
        return (cost.compute_ns + cost.comm_ns) / 1e6

    module = copy.copy(module)
    module.graph = copy.deepcopy(module.graph)
    with patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", milliseconds):
        return overlap_scheduling.schedule_overlap_bucketing(
            module,
            custom_runtime_estimation=milliseconds,
            compute_estimator="analytical",
            max_memory_increase_gb=64.0,
            max_memory_increase_ratio=1.0,
        )
