"""Over how many ranks the search divides experts, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.cli import main
from overlapc.core.errors import OptionError
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.frameworks.known import find_framework
from overlapc.search.groups import spread
from overlapc.search.layouts import Cluster, Fixed, Layout, expert_ranks, expert_replicas, layouts
from overlapc.search.models.transformer import Transformer
from overlapc.search.replicas import Update
from overlapc.search.search import search
from overlapc.search.units import make_unit
from overlapc.search.weights import stage_parameters, static_bytes
from overlapc.validation.public import load_table

MODEL = Transformer(
    "experts", layers=2, width=256, heads=4, ffn=512, vocab=512, seq=128, gated=True, experts=16,
    top_k=2, expert_width=320,
)  # fmt: skip
CLUSTER = Cluster("a100-sxm-80", 32, 8, 1 << 40, 64)
SIZE = 3 * 256 * 320  # parameters of an expert
TWO = Layout(2, 1, 16, 2, sequence=True)


@pytest.mark.parametrize(
    ("layout", "ep", "held", "replicas"),
    [
        (TWO, 16, 1, 2),  # as many as can: all 32 ranks have other tokens, there are 16 experts
        (replace(TWO, ep=8), 8, 2, 4),
        (replace(TWO, ep=1), 1, 16, 32),
        (replace(TWO, sequence=False), 16, 1, 1),  # ranks of a tensor-parallel group have the same
        (replace(TWO, sequence=False, ep=4), 4, 4, 4),
        (replace(TWO, shares_experts=True, ep=4), 4, 4, 4),
        (Layout(1, 2, 12, 1), 4, 4, 3),  # of 12 ranks and 16 experts 4 divide both
    ],
)
def test_ranks_and_replicas_of_experts(layout: Layout, ep: int, held: int, replicas: int) -> None:
    assert expert_ranks(MODEL, layout) == ep
    assert expert_replicas(MODEL, layout) == replicas
    experts = sum(experts for _, experts in stage_parameters(MODEL, layout))
    assert experts == 2 * held * SIZE // layout.etp


def test_the_optimizer_is_divided_by_those_that_hold_the_same() -> None:
    (sixteen,), (eight,) = (static_bytes(MODEL, replace(TWO, ep=ep)) for ep in (16, 8))
    more = 2 * SIZE  # an expert more in each of two layers
    assert eight - sixteen == more * (2 + 4) + 12 * (2 * more // 4 - more // 2)


@pytest.mark.parametrize(
    ("layout", "near"),
    [
        (replace(TWO, ep=8), 8),  # eight ranks next to each other
        (replace(TWO, ep=16), 8),
        (replace(TWO, ep=8, shares_experts=True), 4),  # each second rank
        (replace(TWO, ep=8, sequence=False), 4),
    ],
)
def test_tokens_go_to_neighbours(layout: Layout, near: int) -> None:
    """The all-to-all crosses nodes only where the ranks that divide the experts do."""
    key = UnitKey.of(MODEL, CLUSTER, layout)
    problem = make_unit(key, bounded=False, most=1).problem
    starts = [op for op in problem.trace.ops if "all_to_all" in op.signature and op.role == "start"]
    tokens = layout.microbatch * MODEL.seq // (layout.tp if layout.sequence else 1)
    size = tokens * MODEL.top_k * MODEL.width * 2
    machine = load_hardware(CLUSTER.hardware)
    expected = machine.collective_ns("all_to_all", size, layout.ep, min(near, layout.ep))
    assert {problem.cost(op.name).comm_ns for op in starts} == {expected}
    assert (
        f"{layout.ep} ranks, {min(near, layout.ep)} a node" in problem.profile.conditions["groups"]
    )


@pytest.mark.parametrize(
    ("count", "step", "ranks", "expected"),
    [
        (8, 1, 32, [0, 1, 2, 3, 4, 5, 6, 7]),
        (16, 1, 32, list(range(16))),
        (4, 2, 32, [0, 2, 4, 6]),
        (6, 1, 24, [0, 1, 8, 9, 10, 11]),  # ranks 6 to 11: two and four on a node
        (6, 1, 6, [0, 1, 2, 3, 4, 5]),  # there is no other
        (3, 4, 24, [0, 1, 8]),  # ranks 0, 4 and 8
        (12, 1, 24, list(range(12))),  # eight and four, or four and eight
        (5, 1, 40, [0, 1, 2, 8, 9]),  # ranks 5 to 9: three and two
    ],
)
def test_the_worst_group_is_priced(count: int, step: int, ranks: int, expected: list[int]) -> None:
    """Groups that do not divide a node lie on two, some of them: the slowest sets the time."""
    assert sorted(spread(count, step, ranks, 8)) == expected


def test_six_of_eight_cross_nodes() -> None:
    model = replace(MODEL, experts=12, seq=1024)
    cluster = replace(CLUSTER, gpus=24, global_batch=24)
    key = UnitKey.of(model, cluster, Layout(1, 1, 24, 1, ep=6))
    problem = make_unit(key, bounded=False, most=1).problem
    assert "6 ranks, 4 a node" in problem.profile.conditions["groups"]
    sizes = {found.ep for found in layouts(model, cluster, Fixed(tp=1, pp=1, microbatch=1))}
    assert sizes == {12, 4}  # six would not stay inside


def test_biases_of_experts_go_with_them() -> None:
    """GPT-OSS has them: 16 of 100 numbers here, and 7 of the layer."""
    plain, biased = MODEL, replace(MODEL, expert_extra=16 * 100 + 7)
    layout = replace(TWO, ep=8)
    ((dense, experts),) = stage_parameters(plain, layout)
    assert stage_parameters(biased, layout) == [(dense + 2 * 7, experts + 2 * 2 * 100)]
    assert biased.parameters() - plain.parameters() == 2 * (16 * 100 + 7)


def test_gradients_of_experts_are_summed_over_their_replicas() -> None:
    """With eight ranks a node, and the experts over eight, replicas are on as many nodes."""
    layout, machine = replace(TWO, ep=8), load_hardware(CLUSTER.hardware)
    ((dense, experts),) = stage_parameters(MODEL, layout)
    expected = machine.collective_ns("reduce_scatter", 4 * dense, 16, 4)
    expected += machine.collective_ns("reduce_scatter", 4 * experts, 4, 1)
    assert Update.of(MODEL, CLUSTER, layout).reduce_ns == (expected,)


def test_it_is_listed() -> None:
    asked = Fixed(tp=1, pp=1, microbatch=2)
    assert {found.ep for found in layouts(MODEL, CLUSTER, asked)} == {16, 8}  # 8 are a node's
    assert {found.ep for found in layouts(MODEL, CLUSTER, replace(asked, ep=2))} == {2}
    assert not list(layouts(MODEL, CLUSTER, replace(asked, ep=3)))


@pytest.mark.slow
def test_it_is_searched() -> None:
    small = replace(CLUSTER, gpus=8, global_batch=16)
    every = list(layouts(MODEL, small, Fixed(microbatch=2)))
    open_, fixed = (
        search(MODEL, small, Fixed(microbatch=2, tp=2, pp=1, ep=ep), workers=1).best
        for ep in (0, 8)
    )
    assert open_ is not None
    assert fixed is not None
    assert "ep=8" in str(fixed.layout)
    assert open_.step_ns <= fixed.step_ns
    assert all(found.ep for found in every)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--ep 3.* an ep that divides 16 experts"):
        search(MODEL, CLUSTER, Fixed(ep=3), workers=1)
    dense = Transformer("dense", 2, 256, 4, 512, 512, 128)
    with pytest.raises(OptionError, match=r"--ep 2.* experts, of which this model has none"):
        search(dense, CLUSTER, Fixed(ep=2), workers=1)


TABLE = """version = 1
source = "nobody"
conditions = "none"
role = "held out"
rows = '''
layers,width,heads,vocab,seq,experts,top_k,expert_width,gpus,batch,microbatch,ep,step_ms
2,256,4,512,128,16,2,320,8,16,2,{ep},1
'''
[same]
hardware = "a100-sxm-80"
framework = "megatron"
recompute = "none"
"""


def test_a_table_may_say_it(tmp_path, capsys) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TABLE.format(ep=4))
    (row,) = load_table(path).rows
    assert row.layout.ep == 4
    path.write_text(TABLE.format(ep=3))
    assert main(["validate", str(path)]) == 1
    said = capsys.readouterr().err
    assert "row 1: ep is 3; expected a divisor of 16 experts and of the ranks of a stage" in said
    path.write_text(
        TABLE.format(ep=8).replace("experts,top_k,expert_width,", "").replace("16,2,320,", "")
    )
    assert main(["validate", str(path)]) == 1
    assert "row 1: ep is 8; expected none, or experts" in capsys.readouterr().err


def test_the_host_launches_more_for_experts() -> None:
    """A few tokens wait for their host: each op of the module, what Megatron's has besides, and
    each product of the experts that a rank holds."""
    model, layout = replace(MODEL, seq=32), Layout(1, 1, 16, 1, ep=8)
    cluster = replace(CLUSTER, gpus=16, framework="megatron")
    unit = make_unit(UnitKey.of(model, cluster, layout), bounded=False, most=1)
    framework = find_framework("megatron")
    for is_forward, more, products in ((True, 24, 2), (False, 17, 4)):
        ops = [op for op in unit.problem.trace.ops if op.is_forward == is_forward]
        costs = [unit.problem.cost(op.name) for op in ops]
        kernels = sum(cost.compute_ns > 0 for cost in costs)
        starts = sum(op.role == "start" for op in ops)
        expected = (kernels + more) * framework.host_ns + starts * framework.host_collective_ns
        expected += 2 * products * framework.host_ns  # two experts a rank
        took = sum(cost.compute_ns + cost.comm_ns for cost in costs)
        assert took == pytest.approx(expected, abs=kernels)
    assert unit.launching == 1
