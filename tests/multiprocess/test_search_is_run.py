"""What `search` says of a layout is what `Pipeline` and `TrainStep` plan for it and predict."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gpt.model import GPTConfig, with_ends
from overlapc.core.schedule import format_schedule
from overlapc.runtime.pipeline import Pipeline
from overlapc.runtime.train_step import TrainStep
from overlapc.search.chosen import memory_budgets
from overlapc.search.evaluate import Found
from overlapc.search.layouts import Cluster, Fixed
from overlapc.search.models.own import Repeats
from overlapc.search.presets import find_model
from overlapc.search.search import search
from overlapc.solvers.order import merging
from overlapc.solvers.order import slices as slices_solver
from tests.multiprocess.spawn import run_ranks
from tests.slow import slow_link

pytestmark = pytest.mark.multiprocess

SIZE = GPTConfig(vocab=64, layers=2, width=64, heads=4, max_seq=32)
BATCH = 8
CLUSTER = Cluster("cpu-gloo", 2, 2, 10**9, BATCH)
WHERE = f"{__name__}:own"
EFFORT = 20_000  # to merge microbatches with: any will do, if it is the same for both


def own(tensor: Any, expert: Any) -> Repeats:
    return with_ends(SIZE, tensor)


def found_by(fixed: Fixed, cluster: Cluster, slices: tuple[int, ...] = ()) -> Found:
    best = search(find_model(WHERE), cluster, fixed, workers=1, slices=slices).best
    assert best is not None
    assert best.whole
    return best


def planned_on_rank(rank: int, ranks: int, found: Found, budgets: list[int], hardware: str) -> Any:
    """The step that a rank predicts of this layout; the rows it runs."""
    merging.MERGED = slices_solver.MERGED = EFFORT
    dist.init_process_group("gloo")
    model, layout = find_model(WHERE), found.layout
    tp = layout.tp
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    tensor = [dist.new_group([*range(i, i + tp)]) for i in range(0, ranks, tp)][rank // tp]
    others = [dist.new_group([*range(i, ranks, tp)]) for i in range(tp)][rank % tp]
    torch.manual_seed(0)
    drawn = torch.randint(0, SIZE.vocab, (found.microbatches, layout.microbatch, SIZE.max_seq))
    batches = list(drawn)
    how: Any = {"solver": found.solver, "profile": "estimate"}
    how["hardware"] = hardware
    if tp == ranks:
        part, _ = model.stage(SIZE.layers, True, True, drawn[0], tensor, None)
        step = TrainStep(part, memory_budget=budgets[0], slices=found.slices, **how)
        report = step.predict([(batch, batch) for batch in batches])
        assert report is not None
        dist.barrier()  # rank 0 holds the store, which the other still asks when it has planned
        return report.step_ns, report.pair is not None, report.merged is not None
    stage = rank if layout.pp == 2 else 0
    last = stage == layout.pp - 1
    own = tensor if tp > 1 else None
    part, _ = model.stage(found.layers[stage], stage == 0, last, drawn[0], own, None)
    loss, part.loss = part.loss, None
    pipeline = Pipeline(
        {stage: part},
        found.asked,
        found.microbatches,
        loss,
        group=others if layout.pp == 2 else alone,
        data_parallel=others if layout.dp == 2 else None,
        memory_budget=dict(enumerate(budgets)),
        slices=found.slices,
        **how,
    )
    pipeline(batches, batches)
    assert pipeline.timeline is not None
    assert bool(pipeline.timeline.reductions) == (layout.dp == 2)
    dist.barrier()
    merged = pipeline.reports[stage].merged is not None
    return pipeline.timeline.step_ns, format_schedule(pipeline.schedule), merged


@pytest.mark.parametrize(
    ("fixed", "slices", "slow"),
    [
        pytest.param(
            Fixed(tp=2, pp=1, dp=1, microbatch=2, sequence=False), 1, False, marks=pytest.mark.slow
        ),
        (Fixed(tp=2, pp=1, dp=1, microbatch=2, sequence=False), 1, True),
        (Fixed(tp=1, pp=2, dp=1, microbatch=2, schedule="1f1b"), 1, False),
        (Fixed(tp=1, pp=1, dp=2, microbatch=2), 1, False),
        pytest.param(
            Fixed(tp=2, pp=1, dp=2, microbatch=1, sequence=False), 1, True, marks=pytest.mark.slow
        ),
        (Fixed(tp=2, pp=1, dp=1, microbatch=8, sequence=False), 2, True),
    ],
    ids=["tp", "tp on a slow link", "pp", "dp", "tp and dp on a slow link", "slices"],
)
def test_a_search_predicts_what_is_planned_on_the_ranks(
    fixed: Fixed, slices: int, slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("overlapc.search.search.planners", lambda count: ThreadPoolExecutor(1))
    monkeypatch.setattr("overlapc.search.running._LESS", ())  # memory is not asked about here
    for solver in (merging, slices_solver):
        monkeypatch.setattr(solver, "MERGED", EFFORT)
    ranks = fixed.tp * fixed.pp * fixed.dp
    cluster = replace(CLUSTER, gpus=ranks)
    if slow:
        cluster = replace(cluster, hardware=slow_link(tmp_path))
    found = found_by(fixed, cluster, (slices,))
    budgets = memory_budgets(find_model(WHERE), cluster, found)
    assert found.slices == slices  # which are faster, where they were asked for
    assert found.merged == (fixed.tp == 2 and slices == 1)
    for told_ns, how, merged in run_ranks(
        planned_on_rank, ranks, found, budgets, cluster.hardware, timeout_s=280
    ):
        assert told_ns == found.gradients_ns
        assert merged == found.merged
        if fixed.tp == ranks:
            assert how == (slices == 1)  # in pairs
        else:
            assert how == format_schedule(found.asked if found.merged else found.schedule)


def test_layouts_that_may_be_faster_than_the_winner_are_planned_whole_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overlapc.search.search.planners", lambda count: ThreadPoolExecutor(1))
    monkeypatch.setattr("overlapc.search.running._LESS", ())
    fixed = Fixed(microbatch=4, sequence=False)
    model = find_model(WHERE)
    result = search(model, CLUSTER, fixed, workers=1)
    best = result.best
    assert best is not None
    whole = [found for found in result.tried if found.whole]
    assert best in whole
    assert best == result.tried[0]
    # By a few blocks another layout was the fastest: whole, averaging its many small gradients
    # takes longer.
    assert {found.layout.dp for found in whole} == {1, 2}
    assert best.layout.dp == 1
    assert all(found.step_ns >= best.step_ns for found in result.tried if found.fits)
    alone = search(model, CLUSTER, fixed, workers=1, shown=1).best
    assert alone is not None
    assert alone.step_ns > best.step_ns
