"""`Answer` is what a search says of its best layout, in words: text, page and file have the same.

The headline is what the named framework runs by itself. What overlapc makes of that framework is
said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any

from overlapc.report.table import gigabytes, milliseconds
from overlapc.search.alone import unplanned
from overlapc.search.evaluate import Found
from overlapc.search.frameworks.known import MEGATRONS, OURS, find_framework
from overlapc.search.layouts import Cluster
from overlapc.search.megatron import RUN_BY_MEGATRON, run_arguments
from overlapc.search.memory import answer, most_bytes, needed_bytes, usable_bytes
from overlapc.search.models.transformer import Model
from overlapc.search.search import Result
from overlapc.search.weights import held_bytes
from overlapc.solvers import PREFIX, modules_of
from overlapc.validation.interval import interval

_FILE = "DIR/search.json"
_OURS = f"-m overlapc.megatron --search {_FILE} pretrain_gpt.py"
_SCRIPT = "pretrain_gpt.py"
_WITH_ARGUMENTS = (OURS.name, *MEGATRONS, "megatron-2021", "megatron-2022")


def located(told: str, folder: Path) -> str:
    """What is told, if the files of the search are in `folder`."""
    return told.replace(_FILE, quote(str(folder / "search.json")))


@dataclass(frozen=True)
class Answer:
    """What is said of the best layout. Texts that have nothing to say are empty."""

    headline: str  # the layout, and who runs it
    recompute: str  # what is recomputed
    within: str  # where a measured step should be
    memory: str  # what a run needs
    script: str = ""  # what of Megatron's to start, with overlapc or without
    arguments: str = ""  # of Megatron's script
    why_none: str = ""  # why no arguments are said
    ours: str = ""  # what overlapc makes of the framework
    ours_script: str = ""
    ours_arguments: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)

    @staticmethod
    def parse(found: Mapping[str, Any]) -> Answer:
        """Read the result of `as_json`; ValueError for anything else."""
        names = {each.name for each in fields(Answer)}
        if set(found) != names or not all(isinstance(text, str) for text in found.values()):
            raise ValueError(f"answer: found {', '.join(found)}; expected texts {', '.join(names)}")
        return Answer(**found)

    @staticmethod
    def of(model: Model, cluster: Cluster, machine: Any, result: Result) -> Answer | None:
        """The answer of a search; None if nothing fits."""
        best = result.best
        if best is None:
            return None
        framework = find_framework(cluster.framework)
        by_itself = not result.alone or best.solver in result.alone
        kept = "interrupted, the best so far" if result.interrupted else "the fastest"
        by = f" that {framework.name} runs by itself" if result.alone and by_itself else ""
        if not by_itself:
            by = f" with overlapc (nothing that {framework.name} runs by itself fits)"
        told = _Told(model, cluster, machine, result.instead)
        mine = by_itself and bool(result.alone)
        script, arguments, why_none = told.start(best, mine)
        ours = (unplanned(framework, cluster.fp8), "", "")
        if (other := result.ours) is not None and other.fits:
            less = 1 - other.step_ns / best.step_ns
            much = f"{abs(less):.1%} {'less' if less >= 0 else 'more'}"
            said = (
                f"with overlapc: {other.layout}, step {milliseconds(other.step_ns)} ms ({much}), "
                f"{told.memory(other)}"
            )
            ours = (said, *told.start(other, False)[:2])
        return Answer(
            f"{kept}{by}: {best.layout}",
            recomputed(best),
            told.within(best),
            told.memory(best),
            script,
            arguments,
            why_none,
            *ours,
        )


@dataclass(frozen=True)
class _Told:
    """Words on planned layouts of one question."""

    model: Model
    cluster: Cluster
    machine: Any
    instead: Found | None  # what runs where overlapc does not

    def within(self, found: Found) -> str:
        """Where a measured step should be, and what its sources only guess."""
        between = interval(found, self.cluster)
        low, high = milliseconds(between.low_ns), milliseconds(between.high_ns)
        guessed = f"; guessed: {', '.join(between.guessed)}" if between.guessed else ""
        return f"four of five measured steps should be within {low} to {high} ms{guessed}"

    def memory(self, found: Found) -> str:
        """What a run needs, of what it may take, and whether that is risky."""
        cluster, machine = self.cluster, self.machine
        static = held_bytes(self.model, cluster, found.layout, found.layers)
        needs = most_bytes(cluster, found.layout, static, found.peak_bytes)
        said = f"needs {gigabytes(needs)} of {gigabytes(cluster.memory_bytes)} GB"
        ranks = zip(static, found.peak_bytes, strict=True)
        whole = max(needed_bytes(found.layout, *rank) for rank in ranks)
        if answer(machine, whole) != "fits":
            said += (
                f", {answer(machine, whole)}: {gigabytes(whole)} with what CUDA, NCCL and "
                f"fragments take, where {gigabytes(usable_bytes(machine))} GB leave room"
            )
        return said

    def start(self, found: Found, by_itself: bool) -> tuple[str, str, str]:
        """What to start, and its arguments; or why there are none. Run by overlapc, the arguments'
        own recompute is for steps that run plain."""
        framework, schedule = find_framework(self.cluster.framework), found.layout.schedule
        if framework.name.split("+")[0] not in _WITH_ARGUMENTS:
            return "", "", f"{framework.name} is not started by Megatron's arguments"
        if schedule not in RUN_BY_MEGATRON:
            return "", "", f"Megatron has no schedule {schedule}: search with --framework megatron"
        if self.model.experts and found.layout.tp > 1 and not found.layout.sequence:
            return "", "", "Megatron has no experts beside tp without sequence parallelism"
        if by_itself:
            said = run_arguments(self.model, self.cluster, found, found.solver)
            return _SCRIPT, " ".join(said), ""
        if self.instead is None:
            return "", "", "Megatron by itself needs more memory in this layout"
        said = run_arguments(self.model, self.cluster, found, self.instead.solver)
        return _OURS, " ".join(said), ""


def guessed(sources: Mapping[str, str]) -> str:
    """The figures of a hardware that nobody has measured or published."""
    found = [key for key, source in sources.items() if "guess" in source or "unknown" in source]
    return (
        f"{len(found)} of {len(sources)} figures of the hardware are guesses (`overlapc presets "
        f"hardware --json` has the sources){': ' * bool(found)}{', '.join(found)}"
    )


def recomputed(found: Found) -> str:
    """In words, what the plans of a layout recompute."""
    solver = found.solver
    if not found.recompute_ns:
        return "recomputes nothing"
    if solver.startswith(PREFIX):
        return f"recomputes {', '.join(modules_of(solver))} of each layer"
    kinds = {
        "selective": "recomputes the core of attention",
        "full": "recomputes every layer",
        "whole": "recomputes every layer",
    }
    kind = solver.removeprefix("megatron-")
    return kinds.get(kind, f"recomputes what the plans of {solver} choose")
