"""overlapc under Megatron: Megatron's own training script runs, with planned model chunks in it.

    import overlapc.megatron
    overlapc.megatron.patch(memory_budget="8GB")     # before or after Megatron is imported

Data, loss, DDP, optimizer, checkpoints and pipeline communication stay Megatron's. overlapc plans
which values are saved or recomputed, the order of ops, and when weight gradients run. Losses,
gradients and weights stay bitwise those of Megatron alone. A chunk that cannot be planned runs as
plain Megatron, with one warning that says why. `TrainStep` is for a training loop of one's own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlapc.core.door import Door
    from overlapc.core.files import StrPath
    from overlapc.megatron.loop import TrainStep
    from overlapc.megatron.steps import Steps

__all__ = ["TrainStep", "explain", "patch", "report", "unpatch"]
_steps: Steps | None = None


def __getattr__(name: str) -> Any:
    if name != "TrainStep":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from overlapc.megatron.loop import TrainStep

    return TrainStep


def patch(
    *,
    merge: bool = True,
    fill: bool = True,
    schedule: str = "1f1b",
    search: StrPath | None = None,
    **options: Any,
) -> None:
    """Run the training steps of Megatron planned, from the next one on.

    merge       without a pipeline, a microbatch's backward is one graph with the next's forward
    fill        in a pipeline, recompute and weight gradients run while other stages are waited
                for, as far as the budget has room
    schedule    "1f1b": as Megatron has it; "merged": each forward in it is one graph with a
                backward, where chunks are not interleaved
    search      the search.json that `overlapc search --out` wrote: its memory budgets, solver and
                slices are used unless they are given here, and the first step raises an
                OptionError if its layout is not the script's

    Other options are those of `overlapc.Options`. With `slices=k` each microbatch is cut along its
    samples into k slices, which hide each other's communication; forwards and backwards are not
    merged then. Slices that would give anything else than the whole microbatch, but for rounding,
    are an OptionError on all ranks in the first step. `slices="auto"`: each chunk runs whole, or
    in 2 or 4 slices, as is predicted to be fastest. The memory budget is for the most that a step
    allocates; the default is what the script's own recompute arguments would take (they are not
    followed). A second call replaces the first, unless it raises.
    """
    global _steps
    from overlapc.megatron import seams
    from overlapc.ranks import roll

    try:
        steps = _made(merge, fill, schedule, search, options)
        seams.install(steps.run, roll.tell)
    except Exception as error:
        if _steps is None:
            roll.tell(f"its overlapc.megatron.patch() raised {type(error).__name__}: {error}")
        raise
    _steps = steps
    roll.tell()


def _made(
    merge: bool,
    fill: bool,
    schedule: str,
    search: StrPath | None,
    options: dict[str, Any],
) -> Steps:
    from overlapc.core.errors import OptionError
    from overlapc.megatron.steps import Steps
    from overlapc.planning.options import Options
    from overlapc.search.chosen import load_search
    from overlapc.solvers import SOLVERS

    if not isinstance(search, (str, os.PathLike, type(None))):
        raise OptionError(f"search={search!r}: expected the path of a search.json")
    chosen = None if search is None else load_search(search)
    if chosen is not None:
        options = {"solver": chosen.solver, "slices": chosen.slices, **options}
        if options["solver"] == chosen.solver and chosen.solver not in SOLVERS:
            raise OptionError(
                f"search: its plans are of solver {chosen.solver!r}, Megatron's own recompute; "
                "pass another solver, or run the script as the search prints it, without overlapc"
            )
    return Steps(Options.parse(options, "megatron"), merge, fill, schedule, chosen)


def unpatch() -> None:
    """Leave Megatron as it was."""
    global _steps
    if _steps is not None:
        from overlapc.megatron import seams
        from overlapc.ranks import roll

        seams.remove()
        _steps = None
        roll.tell(roll.UNPATCHED)


def report() -> Door | None:
    """What was planned on this rank, as every front door says it; None if not patched."""
    return _steps


def explain() -> str:
    """Say what was planned for each model chunk of this rank, and what ran as plain Megatron."""
    return "overlapc.megatron: not patched" if _steps is None else _steps.explain()
