"""`Door` has the members by which every front door says what it planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Door:
    """A front door: the twin of `optimize`, `TrainStep`, `Pipeline`, `PipelineSchedule` and
    Megatron's.

    graphs        a `Report` for each planned graph: its problem, plan and timeline
    step_ms       predicted milliseconds of these graphs, one after the other; of a `TrainStep`,
                  of the microbatches of one shape that ran last, and of a `Pipeline`'s step
    peak_bytes    predicted bytes that a step holds at most, on this rank
    fallbacks     what runs as plain PyTorch, with the reason
    differences   lines of the model whose trace may give other results than eager
    explain()     all of this as text: of every collective, what hides it and what does not
    """

    @property
    def graphs(self) -> Sequence[Any]:
        raise NotImplementedError

    @property
    def fallbacks(self) -> list[str]:
        return []

    @property
    def differences(self) -> list[str]:
        return []

    @property
    def step_ms(self) -> float:
        total_ns: int = sum(report.step_ns for report in self.graphs)
        return total_ns / 1e6

    @property
    def peak_bytes(self) -> int:
        return max((report.peak_bytes for report in self.graphs), default=0)
