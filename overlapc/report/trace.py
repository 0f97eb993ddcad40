"""Functions that write timelines for other programs: Perfetto (Chrome's trace format) and JSON.

A rank is a process, and its lanes are threads: `compute`, a process group, the link to another rank
or to the rank's replicas. Events on a track do not overlap. A counter shows the most memory during
an action of a pipeline.
"""

from __future__ import annotations

from typing import Any

from overlapc.core.ir import COMPUTE, Timeline
from overlapc.core.pipeline import PipelineTimeline, Ran
from overlapc.core.schedule import format_step

VERSION = 1


def chrome_trace(timeline: Timeline | PipelineTimeline) -> dict[str, Any]:
    """Return the events of all ranks."""
    tracks: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []

    def add(rank: int, lane: str, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        if (rank, lane) not in tracks:
            tracks[rank, lane] = sum(known == rank for known, _ in tracks)
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": tracks[rank, lane],
                "name": name,
                "ts": start_ns / 1e3,
                "dur": (end_ns - start_ns) / 1e3,
                **({"args": args} if args else {}),
            }
        )

    if isinstance(timeline, Timeline):
        for span in timeline.spans:
            add(span.rank, span.lane, span.issue, span.start_ns, span.end_ns)
    else:
        for rank, row in enumerate(timeline.ran):
            for ran, level in zip(row, timeline.memory[rank], strict=True):
                add(rank, COMPUTE, format_step(ran.step), ran.start_ns, ran.end_ns)
                events.append(_level(rank, ran, level))
        for sent in timeline.transfers:
            name = format_step(sent.step)
            add(sent.rank, f"to rank {sent.to}", name, sent.start_ns, sent.end_ns)
        for one in timeline.reductions:
            add(one.rank, "replicas", f"reduce {one.stage}", one.start_ns, one.end_ns)
    names = [_named("process_name", rank, 0, f"rank {rank}") for rank in {r for r, _ in tracks}]
    names += [_named("thread_name", rank, tid, lane) for (rank, lane), tid in tracks.items()]
    return {"displayTimeUnit": "ns", "traceEvents": [*names, *events]}


def _named(what: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": tid, "name": what, "args": {"name": name}}


def _level(rank: int, ran: Ran, level: int) -> dict[str, Any]:
    args = {"bytes": level}
    return {"ph": "C", "pid": rank, "name": "memory", "ts": ran.start_ns / 1e3, "args": args}


def pipeline_json(timeline: PipelineTimeline) -> dict[str, Any]:
    """Return everything of a simulated pipeline, for scripts."""
    return {
        "overlapc_pipeline": VERSION,
        "step_ns": timeline.step_ns,
        "ranks": [
            {
                "busy_ns": timeline.busy_ns(rank),
                "bubble_ns": timeline.bubble_ns(rank),
                "peak_bytes": timeline.peak_bytes[rank],
                "memory": timeline.memory[rank],
                "held": timeline.held[rank],
                "steps": [[format_step(ran.step), ran.start_ns, ran.end_ns] for ran in row],
            }
            for rank, row in enumerate(timeline.ran)
        ],
        "transfers": [
            [format_step(sent.step), sent.rank, sent.to, sent.start_ns, sent.end_ns]
            for sent in timeline.transfers
        ],
        "reductions": [
            [one.stage, one.rank, one.start_ns, one.end_ns] for one in timeline.reductions
        ],
    }
