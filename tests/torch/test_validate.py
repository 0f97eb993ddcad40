"""Predictions of published runs: what is planned once for many stages is what each would be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.core.errors import Infeasible
from overlapc.core.stages import stage_cost
from overlapc.planning.road import judged
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import evaluate
from overlapc.search.frameworks.framework import slowest_of
from overlapc.search.frameworks.known import FRAMEWORKS, find_framework
from overlapc.search.layouts import Cluster, Layout, stage_layers
from overlapc.search.models.transformer import Transformer
from overlapc.search.place import Place, planned
from overlapc.search.replicas import Update
from overlapc.search.rows import Rows
from overlapc.search.units import Unit, make_unit
from overlapc.search.weights import rank_parameters
from overlapc.solvers import ONE_PLAN, solve
from overlapc.validation.nearest import load_runs
from overlapc.validation.public import load_table, predict_alike

PUBLIC = Path(__file__).parents[2] / "benchmarks" / "public"
MODEL = Transformer("tiny", layers=8, width=256, heads=4, ffn=1024, vocab=512, seq=256)
CLUSTER = Cluster("a100-sxm-80", 8, 8, 1 << 40, 32, framework="megatron-2021")
LAYOUT = Layout(2, 4, 1, 2)


@cache
def unit(most: int = 2) -> Unit:
    return make_unit(UnitKey.of(MODEL, CLUSTER, LAYOUT), bounded=False, most=most)


def place(rank: int, memory: int = CLUSTER.memory_bytes) -> Place:
    schedule = Rows.of(LAYOUT, 16).few
    cluster = replace(CLUSTER, memory_bytes=memory)
    layers = stage_layers(MODEL, LAYOUT.stages)
    return Place.of(MODEL, cluster, LAYOUT, unit(), schedule, rank, layers)


@pytest.mark.parametrize("solver", ONE_PLAN)
def test_one_plan_for_all_stages_is_that_of_each(solver: str) -> None:
    for rank in range(LAYOUT.pp):
        stage = planned(place(rank), unit(), solver, 10.0)
        problem = place(rank).problem(unit())
        alone = judged("alone", problem, solve(problem, solver))
        assert stage.report.problem == problem
        assert stage.report.plan == alone.plan
        assert stage.report.timeline == alone.timeline
        if rank not in (0, LAYOUT.pp - 1):  # without what is at the ends
            cost = stage_cost(problem, alone.plan, unit().received)
            assert stage.costs[0].whole_ns == cost.whole_ns  # as many layers as blocks
            assert stage.costs[0].saved == cost.saved


def test_what_does_not_fit_names_the_same_bytes() -> None:
    problem = place(0).problem(unit())
    peak = judged("alone", problem, solve(problem, "none")).peak_bytes
    beside = place(0).static_bytes + place(0).boundary_bytes
    planned(place(0, beside + peak), unit(), "none", 10.0)
    with pytest.raises(Infeasible) as found:
        planned(place(0, beside + peak - 1), unit(), "none", 10.0)
    assert found.value.smallest_bytes == peak + place(0).boundary_bytes


def test_few_blocks_stand_for_many() -> None:
    two, four = (
        evaluate(MODEL, CLUSTER, LAYOUT, unit(most), "megatron-full", bounded=False).found
        for most in (2, 4)
    )
    assert two.step_ns == pytest.approx(four.step_ns, rel=0.02)
    assert max(two.peak_bytes) == pytest.approx(max(four.peak_bytes), rel=0.05)


def test_pinned_rows_take_no_memory_that_plain_ones_do_not() -> None:
    steps = {}
    for schedule in ("1f1b", "zero-bubble"):
        layout = replace(LAYOUT, schedule=schedule)
        for pinned in (False, True):
            where = MODEL, CLUSTER, layout, unit(), "megatron-none"
            found = evaluate(*where, bounded=False, pinned=pinned).found
            steps[schedule, pinned] = found
    assert steps["1f1b", True] == steps["1f1b", False]
    free, pinned_found = steps["zero-bubble", False], steps["zero-bubble", True]
    assert free.step_ns <= pinned_found.step_ns < steps["1f1b", True].step_ns
    assert max(pinned_found.peak_bytes) < 1.2 * max(steps["1f1b", True].peak_bytes)
    assert max(pinned_found.peak_bytes) < max(free.peak_bytes)


def test_ends_count_as_layers_where_a_framework_says_so() -> None:
    scaling = find_framework("scaling")
    assert scaling.layers_of(40, 2) == (21, 19)
    assert scaling.layers_of(60, 16) == (3, *[4] * 14, 1)
    assert scaling.layers_of(8, 8) is None  # the last stage would have none
    assert find_framework("megatron").layers_of(40, 2) is None


def test_replicas_on_several_nodes_wait_for_the_slowest() -> None:
    framework = find_framework(CLUSTER.framework)
    layout = replace(LAYOUT, dp=2)
    steps = {}
    for per_node in (8, 16):
        cluster = replace(CLUSTER, gpus=16, gpus_per_node=per_node, global_batch=64)
        found = evaluate(MODEL, cluster, layout, unit(), "megatron-full", bounded=False).found
        steps[per_node] = found
    late = steps[8].exposed_ns["stragglers"]
    expected = framework.stragglers * slowest_of(2) * (steps[8].step_ns - late)
    assert late == pytest.approx(expected, abs=1)
    assert "stragglers" not in steps[16].exposed_ns


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_the_slowest_of_many_is_what_many_draws_have(count: int) -> None:
    drawn = np.random.default_rng(0).standard_normal((20_000, count)).max(axis=1).mean()
    assert slowest_of(count) == pytest.approx(drawn, abs=0.04)
    assert slowest_of(1) == 0
    assert find_framework("megatron").stragglers * slowest_of(8) == pytest.approx(0.026)


def test_scaling_gathers_scores_and_sums_in_float32() -> None:
    model = replace(MODEL, gated=True, vocab=4096)
    cluster = replace(CLUSTER, framework="scaling")
    key = UnitKey.of(model, cluster, Layout(2, 1, 1, 2))
    gathers = make_unit(key, bounded=False, most=1)
    parts = make_unit(replace(key, model=replace(key.model, unfused="")), bounded=False, most=1)
    starts = [op.signature for op in gathers.head.trace.ops if op.role == "start"]
    assert any("all_gather" in signature for signature in starts)
    assert gathers.head_ran.step_ns > parts.head_ran.step_ns
    scores = 2 * model.seq * model.vocab
    assert gathers.head_ran.peak_bytes == find_framework("scaling").loss_bytes * scores
    halves = Update.of(model, replace(cluster, framework="megatron"), replace(LAYOUT, dp=2))
    floats = Update.of(model, cluster, replace(LAYOUT, dp=2))
    assert floats.late_ns > 1.5 * halves.late_ns


def test_the_optimizer_takes_what_its_framework_moves() -> None:
    ours, theirs = (
        Update.of(MODEL, replace(CLUSTER, framework=name), LAYOUT).optimizer_ns
        for name in ("megatron-deepspeed", "megatron-2021")
    )
    assert theirs == pytest.approx(ours * 62 / 34, abs=2)


def test_an_optimizer_is_divided_over_the_ranks_that_hold_the_same() -> None:
    """Four replicas share dense weights, and each has experts of its own. Megatron's optimizer
    moves 46 bytes of what is a rank's, and 16 of every gradient that it holds."""
    model = replace(MODEL, gated=True, experts=4, top_k=2, expert_width=MODEL.ffn)
    layout = Layout(1, 1, 4, 1)
    cluster = replace(CLUSTER, gpus=4, framework="megatron")
    ((dense, experts),) = rank_parameters(model, layout)
    assert experts == model.moe_layers * model.mlp_parameters(model.expert_width)
    memory_ns = load_hardware(cluster.hardware).memory_ns
    moved = 46 * (dense / 4 + experts) + 16 * (dense + experts)
    assert Update.of(model, cluster, layout).optimizer_ns == round(memory_ns(moved))
    alone = Update.of(model, cluster, Layout(1, 1, 1, 1)).optimizer_ns  # divides no gradients
    ((dense, experts),) = rank_parameters(model, Layout(1, 1, 1, 1))
    assert alone == round(memory_ns((46 + 8) * (dense + experts)))


def test_the_ends_sum_the_gradients_of_the_words_that_they_share() -> None:
    tied = replace(MODEL, tied=True)
    words = 2 * MODEL.vocab * MODEL.width // LAYOUT.tp  # bytes of gradients in half precision
    for gpus, near in ((8, 2), (16, 1)):  # of a node, and of two
        cluster, layout = replace(CLUSTER, gpus=gpus), replace(LAYOUT, dp=gpus // 8)
        apart, alike = (Update.of(model, cluster, layout) for model in (MODEL, tied))
        machine = load_hardware(cluster.hardware)
        assert alike.shared_ns == machine.collective_ns("all_reduce", words, 2, near) > 0
        assert apart.shared_ns == 0
        assert alike.after_ns - alike.shared_ns == apart.after_ns
    # One rank has both ends.
    both = replace(LAYOUT, schedule="zero-bubble-v")
    assert Update.of(tied, CLUSTER, both).shared_ns == 0
    assert Update.of(tied, CLUSTER, Layout(8, 1, 1, 2)).shared_ns == 0


def test_what_stages_send_in_parts_is_gathered() -> None:
    """Between nodes each tensor-parallel rank of Megatron's sends a part of the width; of
    Scaling's, all of it; with shared sequences there is nothing to be gathered."""
    machine = load_hardware(CLUSTER.hardware)
    for name, sequence in (("megatron-2021", False), ("scaling", False), ("megatron", True)):
        cluster = replace(CLUSTER, gpus_per_node=LAYOUT.tp, framework=name)
        layout = replace(LAYOUT, sequence=sequence)
        unit = make_unit(UnitKey.of(MODEL, cluster, layout), bounded=False, most=1)
        layers = stage_layers(MODEL, layout.stages)
        schedule = Rows.of(layout, 16).few
        first = Place.of(MODEL, cluster, layout, unit, schedule, 0, layers)
        sent = planned(first, unit, "none", 10.0).costs[0].sent_ns
        whole = 2 * layout.microbatch * MODEL.seq * MODEL.width // (layout.tp if sequence else 1)
        assert unit.boundary_bytes == whole
        if name == "megatron-2021":
            gathered = machine.collective_ns("all_gather", whole, layout.tp, layout.tp)
            part = machine.collective_ns("p2p", whole // layout.tp, 2, 1)
            assert sent == part + gathered > part
        else:
            assert sent == machine.collective_ns("p2p", whole, 2, 1)


@pytest.mark.parametrize("name", ["korthikanti", "zero-bubble", "simumax-b200"])
def test_the_package_has_what_these_costs_predict(name: str) -> None:
    """Or `search` would print errors of other costs."""
    row = next(row for row in load_table(PUBLIC / f"{name}.toml").rows if row.step_ns)
    (found,) = predict_alike([row])
    kept = next(run for run in load_runs() if run.table == name)
    again = "overlapc validate --write overlapc/validation/public_runs.csv"
    assert kept.measured_ns == row.step_ns
    assert kept.predicted_ns == pytest.approx(found.step_ns, rel=1e-3), again


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 4096))
def test_buckets_are_hidden_but_for_the_last(forward: int, backward: int, dp: int) -> None:
    cluster = replace(CLUSTER, gpus=8 * dp, global_batch=2 * dp, framework="megatron-overlap")
    layout = replace(LAYOUT, dp=dp)
    late = Update.of(MODEL, replace(cluster, framework="megatron"), layout)
    hidden = Update.of(MODEL, cluster, layout)
    assert hidden.after_ns == late.optimizer_ns
    whole = late.late_ns + late.gather_ns
    assert hidden.uncovered_ns(0, 0) == whole
    left = hidden.uncovered_ns(forward, backward)
    assert max(whole - forward - backward, 0) <= left <= whole
    assert left >= hidden.bucket * whole - 1


def test_a_bucket_grows_with_the_replicas() -> None:
    model = replace(MODEL, layers=400, width=2048, ffn=8192)
    cluster = replace(CLUSTER, framework="megatron-overlap")
    few, many = (Update.of(model, cluster, replace(LAYOUT, dp=dp)) for dp in (8, 80))
    assert many.bucket == pytest.approx(2 * few.bucket)
    assert few.uncovered_ns(10**12, 10**12) < 0.05 * few.uncovered_ns(0, 0)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 64))
def test_interleaved_stages_hide_buckets_under_as_many_microbatches_as_ranks(
    forward: int, backward: int, dp: int
) -> None:
    model = replace(MODEL, layers=400, width=2048, ffn=8192)
    cluster = replace(CLUSTER, gpus=8 * dp, global_batch=8 * dp, framework="megatron-overlap")
    layout = replace(LAYOUT, dp=dp, schedule="interleaved", chunks=5)
    update = Update.of(model, cluster, layout)
    assert update.bucket == 1 / layout.chunks  # a stage's gradients
    whole, left = update.uncovered_ns(0, 0), update.uncovered_ns(forward, backward)
    hidden = layout.pp * (1 - update.bucket) * (forward + backward)
    assert max(whole - hidden, update.bucket * whole) - 2 <= left <= whole
    assert update.uncovered_ns(10**12, 10**12) == pytest.approx(update.bucket * whole, rel=1e-3)


def test_grouped_products_take_what_they_move_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(
        MODEL, width=4096, heads=32, ffn=4096, experts=16, top_k=8, expert_width=4096, seq=4096
    )
    cluster = replace(CLUSTER, framework="megatron")
    key = UnitKey.of(model, cluster, Layout(1, 8, 1, 1))
    besides = make_unit(key, bounded=False, most=1).problem
    framework = replace(find_framework("megatron"), uncovered=0.0)
    monkeypatch.setitem(FRAMEWORKS, "megatron", framework)
    alone = make_unit(key, bounded=False, most=1).problem
    machine = load_hardware(cluster.hardware)
    more = {
        op.name: besides.profile.costs[op.name].compute_ns - alone.profile.costs[op.name].compute_ns
        for op in alone.trace.ops
    }
    slower = [op for op in alone.trace.ops if more[op.name]]
    assert slower
    assert all("bmm" in op.signature for op in slower)
    # Of a weight's gradient: the gradient in float32 twice, and the activations.
    rows, wide = model.seq * model.top_k, model.expert_width
    moved = 8 * 16 * model.width * wide + 2 * rows * (model.width + wide)
    assert any(
        each == pytest.approx(machine.memory_ns(moved) / 2, rel=0.01) for each in more.values()
    )
