"""`scoreboard` prints how far predictions are from published measurements, table by table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

from overlapc.report.table import milliseconds, table
from overlapc.validation.public import Predicted, Table

_WORST = 5


@dataclass(frozen=True)
class Score:
    """The errors of a table's times and peaks, relative to the measured values."""

    rows: int
    middle: float = 0.0  # median of the absolute errors
    most: float = 0.0  # 90th percentile of the absolute errors
    bias: float = 0.0  # mean of the signed errors
    spearman: float = 0.0  # rank correlation of predicted and measured; 1 is the same order
    refused: int = 0
    memory: float | None = None  # median absolute error of peaks
    fits_right: tuple[int, int] = (0, 0)  # (right, of so many) rows said to fit or not
    risky: int = 0  # rows of which neither is said
    within: float = 0.0  # share of the measured steps that are in the predicted interval

    @staticmethod
    def of(predicted: Sequence[Predicted]) -> Score:
        timed = [each for each in predicted if each.row.step_ns and not each.refused]
        refused = sum(bool(each.refused) for each in predicted)
        errors = [each.error for each in timed]
        sizes = sorted(map(abs, errors))
        peaks = [
            abs(each.peak_bytes / each.row.peak_bytes - 1)
            for each in predicted
            if each.row.peak_bytes and not each.refused
        ]
        judged = [each for each in predicted if not each.refused]
        if all(each.row.fits for each in judged):
            judged = []  # of a table that tells nothing of runs that failed
        certain = [each for each in judged if each.answer != "risky"]
        right = sum((each.answer == "fits") == each.row.fits for each in certain)
        fits, risky = (right, len(certain)), len(judged) - len(certain)
        memory = median(peaks) if peaks else None
        if not timed:
            return Score(0, refused=refused, memory=memory, fits_right=fits, risky=risky)
        return Score(
            len(timed),
            median(sizes),
            sizes[min(len(sizes) - 1, len(sizes) * 9 // 10)],
            mean(errors),
            spearman([each.step_ns for each in timed], [each.row.step_ns for each in timed]),
            refused,
            memory,
            fits,
            risky,
            mean(each.is_within for each in timed),
        )


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""
    if len(left) < 2:
        return 1.0

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        at = 0
        while at < len(order):
            end = at
            while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
                end += 1
            for i in order[at : end + 1]:
                found[i] = (at + end) / 2
            at = end + 1
        return found

    one, other = ranks(left), ranks(right)
    a, b = mean(one), mean(other)
    cov = sum((x - a) * (y - b) for x, y in zip(one, other, strict=True))
    size = sum((x - a) ** 2 for x in one) * sum((y - b) ** 2 for y in other)
    return float(cov / size**0.5) if size else 1.0


def scoreboard(judged: Sequence[tuple[Table, Sequence[Predicted]]]) -> str:
    """Write a line for each table, sums of those that count, without composed steps and with them,
    and the worst rows."""
    rows: list[tuple[str, ...]] = [
        (
            "table",
            "rows",
            "median",
            "90%",
            "bias",
            "Spearman",
            "within",
            "memory",
            "fits or not",
            "risky",
            "refused",
        )
    ]
    rows += [_line(one.titled, Score.of(found)) for one, found in judged]
    held_out = [(one, found) for one, found in judged if not one.calibrates]
    measured = [found for one, found in held_out if not one.composed]
    if measured:
        rows.append(_line("all that count", _total(measured)))
    if len(measured) < len(held_out):
        rows.append(_line("with composed ones", _total([found for _, found in held_out])))
    lines = table(rows)
    for one, found in judged:
        timed = [each for each in found if each.row.step_ns and not each.refused]
        timed.sort(key=lambda each: -abs(each.error))
        lines += ["", f"{one.name}: {one.source}. {one.conditions}"]
        lines += [f"  composed: {one.composed}"] if one.composed else []
        worst = [
            (
                f"{each.error:+.1%}",
                f"{milliseconds(each.step_ns)} ms, measured {milliseconds(each.row.step_ns)}",
                each.row.text,
            )
            for each in timed[:_WORST]
        ]
        lines += table(worst, "  ") if worst else []
        reasons = {each.refused for each in found if each.refused}
        lines += [f"  refused: {reason}" for reason in sorted(reasons)]
    return "\n".join(lines)


def _total(tables: Sequence[Sequence[Predicted]]) -> Score:
    """The score of several tables' rows. Of a table that tells nothing of runs that failed, it is
    not counted who fits."""
    scores = [Score.of(found) for found in tables]
    right, known = (sum(count) for count in zip(*(s.fits_right for s in scores), strict=True))
    total = Score.of([each for found in tables for each in found])
    return replace(total, fits_right=(right, known), risky=sum(s.risky for s in scores))


def _line(name: str, score: Score) -> tuple[str, ...]:
    right, known = score.fits_right
    timed = score.rows > 0
    return (
        name,
        str(score.rows),
        f"{score.middle:.1%}" if timed else "-",
        f"{score.most:.1%}" if timed else "-",
        f"{score.bias:+.1%}" if timed else "-",
        f"{score.spearman:.3f}" if timed else "-",
        f"{score.within:.0%}" if timed else "-",
        "-" if score.memory is None else f"{score.memory:.1%}",
        f"{right} of {known}" if known else "-",
        str(score.risky) if known else "-",
        str(score.refused),
    )


def as_json(judged: Sequence[tuple[Table, Sequence[Predicted]]]) -> list[dict[str, Any]]:
    return [
        {
            "table": one.name,
            "source": one.source,
            "calibrates": one.calibrates,
            "composed": one.composed,
            "rows": [
                {
                    "row": each.row.text,
                    "measured_ns": each.row.step_ns,
                    "predicted_ns": each.step_ns,
                    "measured_peak_bytes": each.row.peak_bytes,
                    "within": None if each.within is None else asdict(each.within),
                    "predicted_peak_bytes": each.peak_bytes,
                    "needed_bytes": each.needed_bytes,
                    "fits": each.row.fits,
                    "answer": each.answer,
                    "refused": each.refused,
                }
                for each in found
            ],
        }
        for one, found in judged
    ]
