"""`load_search` reads the result of `overlapc search` for training code; `ours` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapc.core.errors import FileError, InvalidSchedule, OptionError
from overlapc.core.files import StrPath, read_json
from overlapc.core.schedule import Schedule
from overlapc.search.evaluate import Found
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Layout, expert_ranks, replicas
from overlapc.search.memory import tensor_bytes
from overlapc.search.models.transformer import Model, Transformer
from overlapc.search.weights import (
    GRADIENT_BYTES,
    divides_optimizer,
    held_bytes,
    sharing_ranks,
    stage_parameters,
)

# Version of the file; 8 had one plan, also where overlapc was not what ran it, 7 did not say who
# shares experts and the optimizer, 6 not how keys and values are exchanged, 5 not what is merged
VERSION = 9


@dataclass(frozen=True)
class Chosen:
    """The best layout of a search that overlapc runs. It has no plans: when training begins, your
    own model's graphs are planned with the costs of your own machines. The search gives the memory
    of each stage, and `Pipeline` places the rows of the schedule again by the new costs.

        chosen = load_search("out/search.json")
        step = overlapc.Pipeline(
            {number: stage}, chosen.schedule, chosen.microbatches, loss,
            memory_budget=dict(enumerate(chosen.memory_budgets)), solver=chosen.solver,
            slices=chosen.slices,
        )

    or, without a pipeline and replicas,
    `TrainStep(model, loss, memory_budget=chosen.memory_budgets[0])`. If the search planned the
    model whole (`Repeats` with its ends), these predict the same step as the search, given its
    hardware and costs, with `profile="estimate"`. For one microbatch there is also
    `optimize(model, memory_budget=chosen.memory_budgets[0])`, which does not count the time of
    adding gradients up.
    """

    tp: int
    pp: int
    dp: int
    microbatch: int  # sequences in a microbatch
    microbatches: int  # microbatches of a step, for each of the dp replicas
    schedule: Schedule
    layers: tuple[int, ...]  # by stage
    memory_budgets: tuple[int, ...]  # by stage: what weights and optimizer leave
    solver: str
    layout: Layout
    shapes: Mapping[str, Any]  # the model's shapes, as in the file
    sequence_parallel: bool = False
    merged: bool = False  # are microbatches merged, as in `overlapc.TrainStep`?
    slices: int = 1  # of each microbatch: the `slices` of `Pipeline`, `TrainStep` and `optimize`
    expert_ranks: int = 1  # that the experts are divided over
    divides_optimizer: bool = False  # over the ranks that hold the same weights
    gradient_bytes: tuple[int, ...] = ()  # by stage: what a memory budget has for them


def load_search(path: StrPath) -> Chosen:
    """Load the winner of a search, from the `search.json` in its `--out` folder."""
    document = read_json(path, "search")
    try:
        if not isinstance(document, dict) or "overlapc_search" not in document:
            raise ValueError("found no search")
        version = document["overlapc_search"]
        if version is True or version != VERSION:
            raise ValueError(f"found version {version!r}, expected {VERSION}: search again")
        if document["best"] is None:
            raise ValueError("nothing fitted in this search")
        if (run := document["ours"]) is None:
            raise ValueError("found a run without overlapc alone: start it as the search prints it")
        found = Found.parse(run["found"])
        layout, layers = found.layout, found.layers
        if len(layers) != layout.stages:
            raise ValueError(f"layers of {len(layers)} stages, expected {layout.stages}")
        schedule = found.asked
        if (len(schedule.rows), schedule.stages) != (layout.pp, layout.stages):
            raise ValueError(f"rows of {schedule.stages} stages, expected {layout.stages}")
        if not isinstance(document["model"], dict):
            raise ValueError("found no shapes of the model")
        if "ffn" in document["model"]:  # no block of one's own
            Transformer(**document["model"])  # raises if they are not those of one
        budgets, gradients = _memory(run, layout.stages)
        experts_on, divided = _sharing(run, layout)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        OptionError,
        FileError,
        InvalidSchedule,
    ) as error:
        raise FileError(
            f"{path} is not what a search found: {error!r}; expected the search.json that "
            "`overlapc search --out` wrote"
        ) from None
    return Chosen(
        layout.tp,
        layout.pp,
        layout.dp,
        layout.microbatch,
        found.microbatches,
        schedule,
        layers,
        budgets,
        found.solver,
        layout,
        document["model"],
        layout.sequence,
        found.merged,
        found.slices,
        experts_on,
        divided,
        gradients,
    )


def ours(model: Model, cluster: Cluster, found: Found | None) -> dict[str, Any] | None:
    """What `load_search` reads of a layout that overlapc runs."""
    if found is None or not found.fits:
        return None
    framework = find_framework(cluster.framework)
    shared = max(replicas(model, found.layout)) > 1
    return {
        "found": found.as_json(),
        "memory_budgets": memory_budgets(model, cluster, found),
        "gradient_bytes": gradient_bytes(model, cluster, found),
        "expert_ranks": expert_ranks(model, found.layout),
        "divides_optimizer": divides_optimizer(model, framework) and shared,
    }


def _sharing(run: Mapping[str, Any], layout: Layout) -> tuple[int, bool]:
    """Over how many ranks experts are divided; and whether the optimizer is."""
    experts_on, divided = run["expert_ranks"], run["divides_optimizer"]
    whole = type(experts_on) is int and experts_on > 0
    if not (whole and layout.ep in (0, experts_on) and isinstance(divided, bool)):
        raise ValueError(f"expert_ranks {experts_on!r}, divides_optimizer {divided!r}")
    return experts_on, divided


def _memory(document: Mapping[str, Any], stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The memory budget of each stage, and what its gradients take of it."""
    budgets, gradients = (_counts(document, name) for name in ("memory_budgets", "gradient_bytes"))
    for what, each in (("memory budgets", budgets), ("gradients", gradients)):
        if len(each) != stages:
            raise ValueError(f"{what} of {len(each)} stages, expected {stages}")
    if any(b <= g for b, g in zip(budgets, gradients, strict=True)):
        raise ValueError(f"memory budgets {budgets}, expected more than {gradients}")
    return budgets, gradients


def _counts(document: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of whole numbers, as a file has it."""
    found = document[name]
    good = isinstance(found, list) and all(type(n) is int and 0 <= n < 1 << 60 for n in found)
    if not good:
        raise ValueError(f"{name}: found {found!r:.40}, expected a list of whole numbers")
    return tuple(found)


def gradient_bytes(model: Model, cluster: Cluster, found: Found) -> list[int]:
    """What the gradients of each stage take, as `Pipeline` adds them up, or FSDP divides them."""
    parameters = stage_parameters(model, found.layout, found.layers)
    framework, parts = find_framework(cluster.framework), 1
    if framework.gathers:
        parts = sharing_ranks(found.layout, framework, cluster.gpus_per_node)
    return [GRADIENT_BYTES * sum(each) // parts for each in parameters]


def memory_budgets(model: Model, cluster: Cluster, found: Found) -> list[int]:
    """Divide a rank's memory among its stages, as `Pipeline` counts it. Each stage gets its
    gradients. The rest is divided in proportion to each stage's layers in flight, out of all that
    the rank holds at its worst moment; stages may have their worst moments at different times."""
    layout, layers = found.layout, found.layers
    schedule = layout.rows(found.microbatches)
    static = held_bytes(model, cluster, layout, layers)
    budgets = gradient_bytes(model, cluster, found)
    for rank in range(layout.pp):
        mine = layout.stages_of(rank)
        held = schedule.held(rank, {stage: layers[stage] for stage in mine})
        room = tensor_bytes(cluster, layout, static[rank]) - static[rank]
        for stage in mine:
            budgets[stage] += room * schedule.in_flight(stage) * layers[stage] // held
    return budgets
