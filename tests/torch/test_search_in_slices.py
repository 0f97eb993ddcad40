"""`search(slices=)` finds layouts that are the fastest only in slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.gpt.model import GPTConfig, with_ends
from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import Found, lower_bound
from overlapc.search.layouts import ANY, Cluster, Layout, layouts, microbatches, stage_layers
from overlapc.search.models.own import Repeats
from overlapc.search.presets import find_model
from overlapc.search.search import search
from overlapc.search.tasks import as_it_runs_or_none
from overlapc.search.units import make_unit
from overlapc.solvers.order import slices as slices_solver
from tests.slow import slow_link

WHERE = f"{__name__}:own"


def own(tensor: Any, expert: Any) -> Repeats:
    return with_ends(GPTConfig(vocab=64, layers=2, width=512, heads=4, max_seq=128), tensor)


def cluster(folder: Path, rate: str) -> Cluster:
    return Cluster(slow_link(folder, rate), 2, 2, 10**10, 2)


def in_slices(model: Any, where: Cluster, layout: Layout) -> int:
    """What the layout takes in two slices."""
    layers = tuple(stage_layers(model, layout.stages, layout.ends))
    found = Found(layout, "heu", layers=layers, microbatches=microbatches(where, layout))
    outcome = as_it_runs_or_none(model, where, found, 2)
    assert outcome is not None
    return outcome.found.step_ns


@pytest.mark.parametrize(
    ("rate", "slices"), [("1e8", 2), pytest.param("1e9", 1, marks=pytest.mark.slow)]
)
def test_the_fastest_in_slices_is_found_though_it_is_not_listed(
    rate: str, slices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow link a pipeline is faster than tensor parallelism, but not than that in slices;
    nothing but the fastest is listed. Every layout is planned to compare."""
    monkeypatch.setattr(slices_solver, "MERGED", 20_000)
    model, where = find_model(WHERE), cluster(tmp_path, rate)
    uncut = search(model, where, workers=1, shown=1).best
    result = search(model, where, workers=1, shown=1, slices=(2,))
    best = result.best
    assert uncut is not None
    assert best is not None
    divisible = [each for each in layouts(model, where, ANY) if each.microbatch % 2 == 0]
    took = {layout: in_slices(model, where, layout) for layout in divisible}
    assert best.step_ns == min(uncut.step_ns, *took.values())
    assert best.slices == slices
    assert (best.layout != uncut.layout) == (slices == 2)
    if slices == 2:
        assert uncut.layout.microbatch % 2  # it cannot be cut at all
        assert result.bound_ns <= best.step_ns < uncut.step_ns
    for layout, step_ns in took.items():
        unit = make_unit(UnitKey.of(model, where, layout))
        assert lower_bound(model, where, layout, unit.cut) <= step_ns
        assert lower_bound(model, where, layout, unit.cut) <= lower_bound(
            model, where, layout, unit
        )


def test_nothing_is_planned_in_slices_where_no_bound_is_below_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, where = find_model(WHERE), replace(cluster(tmp_path, "1e8"), global_batch=1)
    with pytest.warns(RuntimeWarning, match="in 2 slices: microbatches of 1 sequences"):
        result = search(model, where, workers=1, shown=1, slices=(2,))
    assert result.best is not None
    assert result.best.slices == 1
