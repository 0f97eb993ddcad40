"""`picture` draws a rank's timeline as text, one line for each lane."""

from __future__ import annotations

from overlapc.core.ir import COMPUTE, Timeline


def picture(timeline: Timeline, columns: int = 100) -> str:
    """Draw `#` for an op, `R` for recompute, `=` for a collective, `.` for nothing."""
    lanes = dict.fromkeys([COMPUTE, *(span.lane for span in timeline.spans)])
    width = max(map(len, lanes))
    lines = []
    for lane in lanes:
        line = ["."] * columns
        for span in timeline.spans:
            if span.lane != lane or span.rank:
                continue
            first = span.start_ns * columns // max(1, timeline.step_ns)
            last = max(first + 1, span.end_ns * columns // max(1, timeline.step_ns))
            mark = "=" if lane != COMPUTE else "R" if span.is_recompute else "#"
            for i in range(first, min(columns, last)):
                line[i] = mark
        lines.append(f"{lane.ljust(width)}  {''.join(line)}")
    return "\n".join(lines)
