"""Ranks whose batches differ in shape run one plan: where batches are padded by themselves, lengths
differ from step to step and from rank to rank.

The first rank plans the graph of its shapes; each other rank, and each rank that meets another
shape later, carries the plan to its own graph (`carried`). So the order of collectives never
depends on a shape, and a rank that traces again needs no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overlapc.core.errors import RankError
from overlapc.core.ir import Problem, Trace
from overlapc.core.text import format_plan, format_problem, parse_plan, parse_problem
from overlapc.planning.agreement import agree_on_options, profiles_of_all, told
from overlapc.planning.carried import carried
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import Choices, plan, reports

if TYPE_CHECKING:
    from overlapc.passes.trace import Captured
    from overlapc.ranks.exchange import Exchange


def collectives(captured: Captured) -> str:
    """What graphs of other shapes have in common: their collectives, and whether the model has
    recompute of its own."""
    trace = captured.trace
    groups = {name: str(i) for i, name in enumerate(trace.groups)}
    starts = [op for op in trace.ops if op.role == "start"]
    own = any("recompute" in node.meta for node in captured.joint.graph.nodes)
    called = [f"{op.piece.letter} {op.signature.split()[0]} {groups[op.group]}" for op in starts]
    return "; ".join([*called, f"own recompute: {own}"])


def are_alike(captured: Captured, exchange: Exchange) -> bool:
    """Do all ranks have the same graph, of the same sizes? (Symbols have no size in a digest.)"""
    trace = captured.trace
    sizes = hashlib.sha256(repr([value.bytes for value in trace.values]).encode()).hexdigest()
    return len(set(exchange.gather("shapes", f"{trace.digest} {sizes}".encode()))) == 1


def plan_unlike(
    captured: Captured,
    options: Options,
    step: TrainingStep,
    exchange: Exchange,
    *,
    primals: Sequence[Any] | None = None,
    torch_choices: Choices = tuple,
) -> Report:
    """Plan where graphs of the ranks differ in shape. All ranks call this together."""
    exchange.agree(
        "collectives", collectives(captured), "every rank must run the same parts of one model"
    )
    agree_on_options(step, options, exchange)
    profiles_of_all(captured, options, primals, (), exchange)  # the leader's plan finds its own

    def lead() -> list[str]:
        found = plan(captured, options, step, primals=primals, torch_choices=torch_choices).report
        return [format_problem(found.problem), format_plan(found.plan)]

    problem, order = told(lead, exchange)
    theirs = _with_lanes_of(captured.trace, parse_problem(problem))
    (report,) = reports(theirs, step, [replace(parse_plan(order), digest=theirs.trace.digest)])
    return carry(report, captured, step)


def carry(report: Report, captured: Captured, step: TrainingStep) -> Report:
    """The report's plan for a graph of other shapes."""
    if report.problem.trace == captured.trace:
        return report
    found = carried(report, {}, captured.trace, step, {})
    if found is None:
        raise RankError(
            "the graph of this batch cannot issue its collectives in the order that was planned "
            "for batches of other shapes; expected graphs that differ in sizes alone: pad batches "
            "to one length, or leave this model to FSDP2"
        )
    return found[0]


def _with_lanes_of(trace: Trace, problem: Problem) -> Problem:
    """Another rank's problem; its process groups may have other names."""
    theirs = problem.trace
    mine = dict(zip(theirs.lanes, trace.lanes, strict=True))
    ops = [replace(op, lane=mine.get(op.lane, op.lane)) for op in theirs.ops]
    return replace(problem, trace=replace(theirs, ops=tuple(ops)))
