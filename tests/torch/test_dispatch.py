"""Tokens that are sent once to each node, and once to each rank of it, counted one by one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from overlapc.cli import main
from overlapc.core.errors import OptionError
from overlapc.profiler.hardware import load_hardware
from overlapc.search.captures import UnitKey
from overlapc.search.frameworks.dispatch import once_ns
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.megatron import megatron_arguments, replica_arguments
from overlapc.search.models.transformer import Transformer
from overlapc.search.units import make_unit

H100 = load_hardware("h100-sxm")
MODEL = Transformer(
    "experts", layers=2, width=256, heads=4, ffn=512, vocab=512, seq=256, gated=True, experts=16,
    top_k=4, expert_width=320,
)  # fmt: skip
CLUSTER = Cluster("h100-sxm", 16, 8, 1 << 40, 32, framework="megatron-overlap")
DEEP, HYBRID = map(find_framework, ("megatron+deepep", "megatron+hybridep"))
DEEPEP = replace(CLUSTER, framework="megatron-overlap+deepep")


def counted(ranks: int, near: int, experts: int, top_k: int) -> tuple[Fraction, Fraction]:
    """For each token of a rank, and all choices of experts: nodes beside its own that it is sent
    to, and the copies that a rank passes on to the others of its node for as many tokens."""
    each = experts // ranks
    crossing, passed, choices = 0, 0, 0
    for chosen in combinations(range(experts), top_k):
        there = {expert // each for expert in chosen}
        crossing += len({rank // near for rank in there} - {0})
        # What comes to a node comes to the rank of the same number in it, here 0.
        passed += sum(rank % near != 0 for rank in there)
        choices += 1
    return Fraction(crossing, choices), Fraction(passed, choices)


@pytest.mark.parametrize(
    ("ranks", "near", "experts", "top_k"),
    [(4, 2, 8, 2), (4, 2, 8, 1), (8, 4, 16, 3), (4, 4, 8, 4), (8, 8, 8, 2), (6, 2, 12, 3)],
)
def test_copies_are_those_of_all_choices(ranks: int, near: int, experts: int, top_k: int) -> None:
    tokens = 1 << 26  # bytes of a copy of all of them: so much that latencies do not count
    crossing, passed = counted(ranks, near, experts, top_k)
    link = float(tokens * passed) / (450e9 * 153 / 200)
    card = float(tokens * crossing) / (50e9 * 43 / 50)
    alpha = 44000 if near == ranks else 50000
    expected = alpha + max(link, card) * 1e9
    found = once_ns(H100, tokens * top_k, ranks, near, experts, top_k)
    assert found == pytest.approx(expected, abs=1)


def test_one_expert_a_token_is_an_all_to_all() -> None:
    """Then nothing is sent twice: the bytes are those of NCCL's, at DeepEP's rates."""
    size = 1 << 30
    once = once_ns(H100, size, 16, 8, 16, 1) - 50000
    nccl = H100.collective_ns("all_to_all", size, 16, 8) - 50000
    assert once / nccl == pytest.approx(0.6 / (43 / 50), rel=1e-3)
    assert once_ns(H100, 0, 16, 8, 16, 1) == once_ns(H100, size, 1, 1, 16, 1) == 0


def test_only_experts_are_sent_so() -> None:
    """Context parallelism's all-to-alls are as before."""
    layout = Layout(1, 1, 8, 2, cp=2, cp_comm_type="a2a", ep=16)
    took = []
    for cluster in (CLUSTER, DEEPEP):
        problem = make_unit(UnitKey.of(MODEL, cluster, layout), bounded=False, most=1).problem
        starts = [op for op in problem.trace.ops if op.role == "start"]
        took.append({op.name: (op.lane, problem.cost(op.name).comm_ns) for op in starts})
    plain, once = took
    changed = {name for name in plain if plain[name] != once[name]}
    assert len({plain[name][0] for name in changed}) == 1
    assert len(changed) == 4  # there and back, in the forward and in the backward
    size = 2 * 128 * MODEL.top_k * MODEL.width * 2
    assert {once[name][1] for name in changed} == {once_ns(H100, size, 16, 8, 16, 4)}


def test_hybridep_orders_tokens_while_it_sends_them() -> None:
    """Products, activations and what is beside experts take as long as with DeepEP."""
    layout = Layout(1, 1, 16, 2, ep=8)
    took = []
    for framework in ("megatron-overlap+deepep", "megatron-overlap+hybridep"):
        cluster = replace(CLUSTER, framework=framework + "+cuda-graphs")
        problem = make_unit(UnitKey.of(MODEL, cluster, layout), bounded=False, most=1).problem
        took.append({op.name: (op, problem.cost(op.name)) for op in problem.trace.ops})
    apart, joined = took
    changed = [op for name, (op, cost) in apart.items() if cost != joined[name][1]]
    assert {op.signature.split(".")[1] for op in changed} == {
        *("clone", "index", "index_add", "index_put", "index_select", "mul", "new_zeros", "sum"),
        "zeros_like",
    }
    assert all("moe" in problem.trace.modules[op.name] for op in changed)
    assert {joined[op.name][1].compute_ns for op in changed} == {0}


def test_a_graph_is_launched_once() -> None:
    """A step of few tokens takes what its kernels take; one by one, as long as the host."""
    layout = Layout(1, 1, 16, 1, ep=16)
    launching = []
    for options in ("", "+cuda-graphs"):
        cluster = replace(CLUSTER, framework="megatron-overlap" + options)
        key = UnitKey.of(MODEL, cluster, layout)
        launching.append(make_unit(key, bounded=False, most=1).launching)
    assert launching == [1, 0]


def test_biases_of_experts_move_what_their_ops_do() -> None:
    bias = MODEL.experts * (1 + 2 * MODEL.expert_width + MODEL.width)
    layout = Layout(1, 1, 16, 2048, ep=16)  # so many sequences that no kernel waits for the host
    took = []
    for extra in (bias, MODEL.experts):
        key = UnitKey.of(replace(MODEL, expert_extra=extra), CLUSTER, layout)
        problem = make_unit(key, bounded=False, most=1).problem
        products = [op for op in problem.trace.ops if op.signature.startswith("aten.bmm.")]
        took.append(sum(problem.cost(op.name).compute_ns for op in products))
    rows = 2048 * MODEL.seq * MODEL.top_k  # of a rank's experts, if all ranks send as many
    moved = (28 + 40) * rows * MODEL.width
    assert took[0] - took[1] == pytest.approx(H100.memory_ns(moved), rel=0.02)


def test_megatron_is_told() -> None:
    asked = Layout(1, 1, 8, 1, ep=8), (2,), 1, 8
    said = " ".join(megatron_arguments(*asked, experts=True, framework=DEEP))
    assert "--moe-token-dispatcher-type flex --moe-enable-deepep" in said
    said = " ".join(megatron_arguments(*asked, experts=True, framework=HYBRID))
    assert "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep" in said
    framework = find_framework("megatron-overlap+cuda-graphs")
    said = " ".join(replica_arguments(MODEL, asked[0], framework))
    assert "--cuda-graph-impl local --cuda-graph-scope full_iteration" in said
    assert "alltoall" in " ".join(megatron_arguments(*asked, experts=True))


def test_nodes_that_are_not_full_are_as_without() -> None:
    layout = Layout(1, 1, 9, 1, ep=9)
    model = replace(MODEL, experts=9)
    took = []
    for options in ("", "+deepep", "+hybridep"):
        cluster = replace(CLUSTER, gpus=9, framework="megatron-overlap+cuda-graphs" + options)
        problem = make_unit(UnitKey.of(model, cluster, layout), bounded=False, most=1).problem
        took.append([problem.cost(op.name) for op in problem.trace.ops])
    assert took[0] == took[1] == took[2]


def test_without_all_to_alls_nothing_is_ordered_on_the_way() -> None:
    """All experts are on each rank; context parallelism's all-to-alls are none of theirs."""
    layout = Layout(1, 1, 8, 2, cp=2, cp_comm_type="a2a", ep=1)
    took = []
    for options in ("", "+hybridep"):
        cluster = replace(CLUSTER, framework="megatron-overlap+cuda-graphs" + options)
        problem = make_unit(UnitKey.of(MODEL, cluster, layout), bounded=False, most=1).problem
        took.append([problem.cost(op.name) for op in problem.trace.ops])
    assert took[0] == took[1]


@pytest.mark.parametrize(
    "framework",
    ["megatron+deepep+hybridep", "megatron+fp16+bf16-gradients", "megatron+blocking+cuda-graphs"],
)
def test_options_that_undo_each_other_are_refused(framework: str) -> None:
    with pytest.raises(OptionError, match=r"expected one of \+"):
        find_framework(framework)


def test_what_is_priced_is_printed() -> None:
    said = {
        name: " ".join(replica_arguments(MODEL, Layout(2, 1, 4, 1, sequence=True), framework))
        for name in ("megatron", "megatron+te-loss", "megatron-overlap+tp-overlap")
        for framework in [find_framework(name)]
    }
    assert "cross-entropy" not in said["megatron"]
    assert "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te" in said["megatron+te-loss"]
    assert "--tp-comm-overlap" in said["megatron-overlap+tp-overlap"]


def test_a_block_of_ones_own_sends_its_tokens_itself(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "examples.gpt.model:for_search", "--gpus", "8", "--hardware", "h100-sxm"]
    assert main([*asked, "--framework", "megatron-overlap+deepep"]) == 2
    assert "sends its tokens itself; expected a preset" in capsys.readouterr().err
