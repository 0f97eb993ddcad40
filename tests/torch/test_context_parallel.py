"""Context parallelism in the search, counted by hand: what is gathered or goes round, what is
divided, kept and hidden."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from overlapc.core.errors import OptionError
from overlapc.core.ir import Op, Problem
from overlapc.core.simulate import simulate
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.evaluate import evaluate
from overlapc.search.layouts import CP_COMM_TYPES, Cluster, Fixed, Layout, layouts
from overlapc.search.megatron import megatron_arguments
from overlapc.search.models.transformer import Transformer
from overlapc.search.replicas import Update
from overlapc.search.search import search
from overlapc.search.units import Unit, make_unit
from overlapc.search.weights import static_bytes
from overlapc.solvers import solve

GROUPED = Transformer(
    "grouped", layers=2, width=256, heads=4, ffn=512, vocab=512, seq=256, kv_heads=2, gated=True
)
LATENT = replace(
    GROUPED, name="latent", kv_heads=0, head_width=32, kv_rank=64, rope_width=16, value_width=24
)
CLUSTER = Cluster("a100-sxm-80", 4, 8, 1 << 40, 8)


@cache
def unit(model: Transformer, layout: Layout) -> Unit:
    return make_unit(UnitKey.of(model, CLUSTER, layout), bounded=False)


# Of a token: keys and values of 2 heads of 64; of 4 heads keys of 32 + 16, values of 24.
@pytest.mark.parametrize(("model", "each"), [(GROUPED, 2 * (64 + 64)), (LATENT, 4 * (48 + 24))])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_gathers_keys_and_values_once(
    model: Transformer, each: int, sequence: bool
) -> None:
    tp = 2 if sequence else 1
    layout = Layout(tp, 1, 4 // tp // 2, 2, sequence=sequence, cp=2, cp_comm_type="all_gather")
    problem = unit(model, layout).problem
    plain = unit(model, Layout(tp, 1, 4 // tp, 2, sequence=sequence)).problem
    size = 2 * 256 * each * 2 // tp  # sequences, tokens, elements, bytes
    machine = load_hardware(CLUSTER.hardware)
    near = 2 if CLUSTER.gpus_per_node >= 4 else 1
    for kind in ("all_gather", "reduce_scatter"):
        expected = machine.collective_ns(kind, size, 2, near)

        def took(starts: object, kind: str = kind) -> list[int]:
            return [
                starts.cost(op.name).comm_ns  # type: ignore[attr-defined]
                for op in starts.trace.ops  # type: ignore[attr-defined]
                if op.role == "start" and kind in op.signature
            ]

        mine = took(problem)
        assert len(mine) - len(took(plain)) == model.layers
        assert mine.count(expected) >= model.layers


def test_everything_else_is_divided() -> None:
    one, two = (unit(GROUPED, Layout(1, 1, 4 // cp, 2, cp=cp)) for cp in (1, 2))
    assert one.boundary_bytes == 2 * two.boundary_bytes
    large = replace(GROUPED, width=4096, heads=32, kv_heads=8, ffn=14336, seq=8192, layers=1)
    whole, part = (unit(large, Layout(1, 1, 4 // cp, 1, cp=cp)) for cp in (1, 2))
    took = [sum(cost.compute_ns for cost in each.problem.costs) for each in (whole, part)]
    assert took[1] / took[0] == pytest.approx(0.5, rel=0.1)  # but sums of weight gradients


def test_weights_are_those_of_all_replicas() -> None:
    """Context-parallel ranks have the same weights: they sum gradients and share the optimizer."""
    by_data, by_context = Layout(1, 1, 4, 2), Layout(1, 1, 2, 2, cp=2)
    assert static_bytes(GROUPED, by_context) == static_bytes(GROUPED, by_data)
    parameters = GROUPED.parameters()
    assert static_bytes(GROUPED, by_context) == [parameters * 6 + parameters * 12 // 4]
    assert Update.of(GROUPED, CLUSTER, by_context) == Update.of(GROUPED, CLUSTER, by_data)


def test_layouts_have_it_only_when_asked() -> None:
    assert {layout.cp for layout in layouts(GROUPED, CLUSTER)} == {1}
    found = list(layouts(GROUPED, CLUSTER, Fixed(cp=2)))
    assert found
    for layout in found:
        assert layout.tp * layout.cp * layout.pp * layout.dp == 4
        assert layout.cp == 2
        assert str(layout).startswith(
            f"tp={layout.tp}{'+sp' * layout.sequence} cp=2 {layout.cp_comm_type} pp="
        )
    for model, cluster, cp in (
        (GROUPED, CLUSTER, 3),
        (replace(GROUPED, seq=250), CLUSTER, 2),
        (GROUPED, replace(CLUSTER, framework="megatron-2021"), 2),
    ):
        with pytest.raises(OptionError, match=f"cp={cp} on 4 GPUs"):
            list(layouts(model, cluster, Fixed(cp=cp)))


@pytest.mark.slow
def test_a_step_of_long_sequences_needs_less_memory() -> None:
    cluster = replace(CLUSTER, global_batch=4)
    steps = [
        evaluate(GROUPED, cluster, layout, unit(GROUPED, layout)).found
        for layout in (Layout(1, 1, 4, 1), Layout(1, 1, 2, 1, cp=2))
    ]
    assert steps[1].peak_bytes < steps[0].peak_bytes
    assert steps[1].microbatches == 2 * steps[0].microbatches
    assert steps[1].exposed_ns["tp"] > 0
    best = search(GROUPED, cluster, Fixed(tp=1, pp=1, cp=2), workers=1).best
    assert best is not None
    assert best.layout.cp == 2


@pytest.mark.parametrize("kind", CP_COMM_TYPES)
def test_megatron_is_told(kind: str) -> None:
    said = list(megatron_arguments(Layout(2, 1, 2, 1, cp=4, cp_comm_type=kind), (8,), 8))
    assert "--context-parallel-size 4" in said
    assert f"--cp-comm-type {kind}" in said
    assert "--global-batch-size 16" in said


def test_every_exchange_is_tried_that_the_heads_allow() -> None:
    def kinds(model: Transformer, fixed: Fixed) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for layout in layouts(model, CLUSTER, fixed):
            found.setdefault(layout.tp, set()).add(layout.cp_comm_type)
        return found

    both = {"p2p", "all_gather"}
    assert kinds(GROUPED, Fixed(cp=2)) == {1: {*both, "a2a"}, 2: both}  # two heads of keys
    assert kinds(LATENT, Fixed(cp=2)) == {1: both, 2: both}
    assert kinds(GROUPED, Fixed(cp=2, cp_comm_type="a2a")) == {1: {"a2a"}}
    assert kinds(GROUPED, Fixed()).keys() == {1, 2, 4}
    for wrong in ({"cp_comm_type": "p2p"}, {"cp": 2, "cp_comm_type": "ring"}):
        with pytest.raises(OptionError, match="cp_comm_type"):
            Fixed(**wrong)  # type: ignore[arg-type]
    assert str(Fixed(cp=2, cp_comm_type="a2a")) == "--cp 2 --cp-comm-type a2a"


# ------------------------------------------------------------------------ a ring, and all-to-alls

RANKS, ROWS, HEADS, KEYS, WIDTH = 4, 8192, 32, 8, 128
LARGE = replace(
    GROUPED, width=HEADS * WIDTH, heads=HEADS, kv_heads=KEYS, ffn=64, seq=RANKS * ROWS, layers=1
)
MACHINE = load_hardware(CLUSTER.hardware)
SENT = 2 * ROWS * KEYS * WIDTH * 2  # bytes of a rank's keys and values


def exchanged(kind: str, model: Transformer = LARGE, cluster: Cluster = CLUSTER) -> Problem:
    layout = Layout(1, 1, 1, 1, cp=RANKS, cp_comm_type=kind)
    return make_unit(UnitKey.of(model, cluster, layout), bounded=False).problem


@cache
def ring() -> Problem:
    return exchanged("p2p")


def ops_of(problem: Problem, name: str, forward: bool | None = None) -> list[Op]:
    return [
        op
        for op in problem.trace.ops
        if name in op.signature.split(" ")[0] and forward in (None, op.is_forward)
    ]


def test_keys_and_values_go_round_once_and_back_with_their_gradients() -> None:
    for forward, times in ((True, 1), (False, 2)):
        sends = ops_of(ring(), "all_to_all_single", forward)
        took = [ring().cost(op.name).comm_ns for op in sends]
        assert took == [MACHINE.collective_ns("p2p", SENT, RANKS, RANKS)] * times * (RANKS - 1)


@pytest.mark.parametrize(("forward", "times"), [(True, 1.0), (False, 2.5)])
def test_a_ring_makes_half_of_the_scores_in_each_step(forward: bool, times: float) -> None:
    kernels, kind = MACHINE.kernels, "attention_forward" if forward else "attention_backward"
    assert kernels is not None
    waves = HEADS * (ROWS // 128) / kernels.multiprocessors
    part = kernels.parts[kind] * waves / (waves + kernels.fills[f"{kind}_fill"])
    made = times * 4 * HEADS * ROWS * (ROWS / 2) * WIDTH  # flops: of two products, or of five
    beside_ns = made / (MACHINE.half_flops * part) * 1e9 + MACHINE.launch_ns
    diagonal_ns = made / (MACHINE.half_flops * part * ROWS / (ROWS + 512)) * 1e9 + MACHINE.launch_ns

    found = [ring().cost(op.name).compute_ns for op in ops_of(ring(), "ring_attention", forward)]
    found = found if forward else found[::-1]  # the diagonal is the last of the backward
    assert found == pytest.approx([diagonal_ns] + [beside_ns] * (RANKS - 1), rel=1e-6)


def test_a_ring_takes_as_long_as_whole_attention_where_each_fills_the_machine() -> None:
    (whole,) = ops_of(exchanged("a2a"), "scaled_dot_product", True)
    assert f"[1,{HEADS // RANKS},{RANKS * ROWS},{WIDTH}]" in whole.signature
    took = exchanged("a2a").cost(whole.name).compute_ns
    steps = [ring().cost(op.name).compute_ns for op in ops_of(ring(), "ring_attention", True)]
    assert sum(steps) == pytest.approx(took, rel=0.02)


def test_without_measured_kernels_a_score_takes_as_long_beside_the_diagonal_as_on_it() -> None:
    problem = exchanged("p2p", cluster=replace(CLUSTER, hardware="l40"))
    took = {problem.cost(op.name).compute_ns for op in ops_of(problem, "ring_attention", True)}
    assert len(took) == 1


def test_a_rank_keeps_queries_one_part_of_keys_and_values_the_result_and_its_sums() -> None:
    trace = ring().trace
    read = [name for op in ops_of(ring(), "ring_attention", False) for name in op.inputs]
    bases = {trace.value[trace.value[name].storage] for name in read}
    storages = {
        base.name: base.bytes
        for base in bases
        if base.producer and trace.op[base.producer].is_forward
    }
    held = ROWS * HEADS * WIDTH * 2  # of queries, and of the result
    assert sorted(storages.values()) == sorted([held, held, SENT, ROWS * HEADS * 4])
    saved = {trace.value[name].storage for name in solve(ring(), "none").saved}
    made = {
        trace.value[name].storage
        for op in (*ops_of(ring(), "ring_", True), *ops_of(ring(), "wait_tensor", True))
        for name in op.outputs
    }
    assert saved & made == storages.keys() & made


def exposures(problem: Problem) -> list[tuple[int, int]]:
    """What each send takes, and what of it is exposed, if nothing is recomputed."""
    found = simulate(problem, solve(problem, "megatron-none")).exposures
    return [(one.comm_ns, one.exposed_ns) for one in found if "all_to_all" in one.issue]


def test_long_sequences_hide_a_ring_and_short_ones_do_not() -> None:
    assert len(exposures(ring())) == 3 * (RANKS - 1)
    assert all(left == 0 for _, left in exposures(ring()))

    short = exchanged("p2p", replace(LARGE, seq=RANKS * 256))
    slowed = MACHINE.intra.slowdown.compute_permille / 1000
    steps = [short.cost(op.name).compute_ns for op in ops_of(short, "ring_attention", True)]
    merges = [0, *(short.cost(op.name).compute_ns for op in ops_of(short, "ring_merge", True))]
    forward = exposures(short)[: RANKS - 1]
    for (took, left), step, merge in zip(forward, steps, merges, strict=False):
        assert left == pytest.approx(took - slowed * (step + merge), rel=0.02)
        assert left > 0


def test_recomputed_attention_goes_round_again() -> None:
    plan = solve(ring(), "megatron-selective:core_attn")
    trace = ring().trace
    again = [op.name for op in ops_of(ring(), "all_to_all_single", True)]
    assert [name for name in plan.recomputed if name in again] == again
    made = {name for op in ops_of(ring(), "ring_", True) for name in op.outputs}
    assert made.isdisjoint(plan.saved)
    assert trace.value[ops_of(ring(), "wait_tensor", True)[-1].outputs[0]].storage not in {
        trace.value[name].storage for name in plan.saved
    }


def test_all_to_alls_carry_queries_keys_values_and_results_alone() -> None:
    problem = exchanged("a2a")
    queries, keys = ROWS * HEADS * WIDTH * 2, SENT // 2
    for forward, sizes in ((True, [queries, keys, keys, queries]), (False, None)):
        took = [
            problem.cost(op.name).comm_ns for op in ops_of(problem, "all_to_all_single", forward)
        ]
        sizes = sizes or [queries, queries, keys, keys]
        assert took == [MACHINE.collective_ns("all_to_all", n, RANKS, RANKS) for n in sizes]
