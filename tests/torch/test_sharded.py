"""Weights, gradients and optimizer that replicas divide, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.cli import main
from overlapc.core.errors import FileError, OptionError
from overlapc.profiler.hardware import load_hardware
from overlapc.search.chosen import gradient_bytes
from overlapc.search.evaluate import Found
from overlapc.search.frameworks.known import find_framework
from overlapc.search.frameworks.sharded import Shards, Times
from overlapc.search.layouts import Cluster, Fixed, Layout, layouts
from overlapc.search.megatron import replica_arguments
from overlapc.search.models.transformer import Transformer
from overlapc.search.presets import PRESETS
from overlapc.search.weights import held_bytes, layer_and_ends, static_bytes
from overlapc.validation.public import load_table, predict_alike
from tests.sharded import ENDS, asked

MODEL = Transformer("tiny", layers=3, width=256, heads=4, ffn=1024, vocab=512, seq=256)
CLUSTER = Cluster("a100-sxm-80", 16, 8, 1 << 40, 32, framework="fsdp")
ALONE = Layout(1, 1, 16, 1)


def simulated(
    shards: Shards, log: Iterable[tuple[str, int]], run: float, first: float, last: float
) -> float:
    """When a phase ends whose log is known, by streams that wait for events: one of kernels, and
    one of collectives. `first` is run before all layers, `last` behind them."""
    log = list(log)
    forward = not any(kind == "scatter" for kind, _ in log)
    kernels, lane = 0.0, 0.0
    there: dict[int, float] = {}
    begun: list[float] = []  # when the kernels of each layer begin, as their weights are copied out
    layers = [layer for kind, layer in log if kind == "run"]
    if not forward:
        kernels = first
    for place, (kind, layer) in enumerate(log):
        if kind == "gather":
            # The buffer is that of the gathering before, which is free when its layer begins.
            waits = 0.0
            behind = [one for what, one in log[:place] if what == "gather" and one != ENDS]
            if shards.again and behind:
                at = layers.index(behind[-1])
                # A layer that is still to begin does so when its weights are there.
                waits = begun[at] if at < len(begun) else max(kernels, there[behind[-1]])
            took = shards.ends_gather if layer == ENDS else shards.gather
            lane = max(lane, waits) + took
            there[layer] = lane
            if layer == ENDS:
                kernels = lane + first
        elif kind == "run":
            begin = max(kernels, there.get(layer, 0.0))
            begun.append(begin)
            others = [one for one in layers if one != layer]
            beside = shards.gather * bool(others) if forward else 0.0
            if not forward:
                beside = shards.gather * (shards.again and layer > 0)
                beside += shards.scatter * (layer < max(layers))
            elif layer == max(layers):
                beside = 0.0
            slow = shards.slowdown
            kernels = begin + run + min(beside * (1 - 1 / slow), run * (slow - 1))
        else:
            if layer == ENDS:
                kernels += last
            took = shards.ends_scatter if layer == ENDS else shards.scatter
            lane = max(lane, kernels) + took
    return kernels + last if forward else max(kernels, lane)


times = st.floats(0, 100, allow_nan=False)


@given(
    layers=st.integers(1, 6),
    forward=times,
    backward=times,
    ends=st.tuples(times, times, times, times),
    traffic=st.tuples(times, times, times, times),
    again=st.booleans(),
    slow=st.sampled_from([1.0, 1.2]),
)
def test_times_are_those_of_streams_that_wait(
    layers: int,
    forward: float,
    backward: float,
    ends: tuple[float, float, float, float],
    traffic: tuple[float, float, float, float],
    again: bool,
    slow: float,
) -> None:
    gather, scatter, ends_gather, ends_scatter = traffic
    shards = Shards(gather, scatter, ends_gather, ends_scatter, 0.0, again, slow)
    before, behind = ends[:2], ends[2:]
    more = shards.more_ns(Times(layers, forward, backward, before, behind))
    there, back = asked(layers, again)
    expected = (
        simulated(shards, there, forward, before[0], behind[0])
        - (layers * forward + before[0] + behind[0]),
        simulated(shards, back, backward, behind[1], before[1])
        - (layers * backward + before[1] + behind[1]),
    )
    assert more == pytest.approx(expected, abs=1)
    assert min(more) >= 0


def test_nothing_is_added_where_one_rank_has_all() -> None:
    shards = Shards.of(MODEL, replace(CLUSTER, gpus=1), Layout(1, 1, 1, 1))
    assert shards.more_ns(Times(3, 1e6, 2e6, (1e3, 1e3), (1e5, 1e5))) == (0, 0)


def test_bytes_are_those_of_a_layer_and_of_the_ends() -> None:
    machine = load_hardware("a100-sxm-80")
    shards = Shards.of(MODEL, CLUSTER, ALONE)
    layer, ends = layer_and_ends(MODEL, ALONE)
    assert MODEL.layers * layer + ends == MODEL.parameters()
    assert shards.gather == machine.collective_ns("all_gather", 2 * layer, 16, 8)
    assert shards.scatter == machine.collective_ns("reduce_scatter", 4 * layer, 16, 8)
    assert shards.ends_scatter == machine.collective_ns("reduce_scatter", 4 * ends, 16, 8)
    half = Shards.of(MODEL, replace(CLUSTER, framework="fsdp+bf16-sums"), ALONE)
    assert half.scatter == machine.collective_ns("reduce_scatter", 2 * layer, 16, 8)
    hybrid = Shards.of(MODEL, replace(CLUSTER, framework="fsdp+hybrid"), ALONE)
    assert hybrid.gather == machine.collective_ns("all_gather", 2 * layer, 8, 8)
    inside = machine.collective_ns("reduce_scatter", 4 * layer, 8, 8)
    assert hybrid.scatter == inside + machine.collective_ns("all_reduce", 4 * layer // 8, 2, 1)


def test_memory_is_a_part_of_all_and_two_layers_whole() -> None:
    layer, ends = layer_and_ends(MODEL, ALONE)
    total = MODEL.parameters()
    whole = 2 * (2 * layer + ends) + (2 + 4) * (layer + ends)
    assert held_bytes(MODEL, CLUSTER, ALONE) == [whole + 16 * total // 16]
    kept = replace(CLUSTER, framework="fsdp+kept-weights")
    assert held_bytes(MODEL, kept, ALONE) == [whole + 2 * layer + 16 * total // 16]
    hybrid = replace(CLUSTER, framework="fsdp+hybrid")
    assert held_bytes(MODEL, hybrid, ALONE) == [whole + 16 * total // 8]
    assert held_bytes(MODEL, CLUSTER, ALONE) < static_bytes(MODEL, ALONE)


def test_only_layouts_without_a_pipeline_are_listed() -> None:
    found = list(layouts(PRESETS["gpt-1.3b"], CLUSTER))
    assert {layout.pp for layout in found} == {1}
    assert {layout.tp for layout in found} > {1, 2}


@pytest.mark.parametrize(
    ("framework", "model", "words"),
    [
        ("fsdp", PRESETS["mixtral-8x7b"], "experts, 8 in mixtral-8x7b"),
        (
            "megatron+kept-weights",
            MODEL,
            "found +kept-weights with megatron; expected one of fsdp",
        ),
        ("fsdp+fsdp", MODEL, "; expected one of megatron, megatron-fused-loss"),
        ("overlapc+fsdp", MODEL, "; expected one of megatron, megatron-fused-loss"),
    ],
)
def test_what_no_figure_is_known_of_is_refused(
    framework: str, model: Transformer, words: str
) -> None:
    with pytest.raises(OptionError) as caught:
        list(layouts(model, replace(CLUSTER, framework=framework)))
    assert words in str(caught.value)


def test_recompute_is_pytorchs_checkpoints() -> None:
    assert find_framework("fsdp").plan("full") == "full"
    assert find_framework("llm-foundry+whole-layers").plan("full") == "whole"
    assert find_framework("megatron+fsdp").plan("full") == "megatron-full"


def test_megatrons_arguments_divide_weights() -> None:
    framework = find_framework("megatron-overlap+fsdp")
    said = " ".join(replica_arguments(MODEL, ALONE, framework))
    assert "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params" in said
    assert "--overlap-grad-reduce" not in said


TABLE = """
version = 1
source = "a test"
conditions = "none"
role = "held out"
rows = '''
framework,gpus,pp,batch,step_ms
{}
'''
[same]
hardware = "a100-sxm-80"
recompute = "none"
layers = 4
width = 1024
heads = 8
vocab = 1024
seq = 512
microbatch = 8
"""


def test_links_that_cost_nothing_leave_a_step_as_it_was(tmp_path: Path) -> None:
    """A step takes longer by what its gathers and sums leave exposed, and never less than alone."""
    path = tmp_path / "rows.toml"
    path.write_text(TABLE.format("fsdp,1,1,64,1\nfsdp,8,1,512,1\nfsdp,64,1,4096,1"))
    alone, node, nodes = predict_alike(load_table(path).rows)
    assert alone.step_ns < node.step_ns < nodes.step_ns
    for row, words in (
        ("fsdp,8,2,512,1", "pp=2 with fsdp, which divides weights"),
        ("fsdp+hybrid,12,1,96,1", "expected replicas that fill nodes"),
    ):
        path.write_text(TABLE.format(row))
        with pytest.raises(FileError, match=words):
            load_table(path)
    path.write_text(TABLE.format("fsdp,8,1,64,1") + 'schedule = "interleaved"\n')
    with pytest.raises(FileError, match="schedule interleaved with fsdp"):
        load_table(path)


def test_options_may_stand_in_any_order_and_bf16_is_no_slower(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    names = (
        "megatron+fsdp+bf16-gradients", "megatron+bf16-gradients+fsdp",
        "fsdp", "fsdp+bf16-sums", "fsdp+kept-weights",
    )  # fmt: skip
    path.write_text(TABLE.format("\n".join(f"{name},16,1,128,1" for name in names)))
    one, other, plain, half, kept = (p.step_ns for p in predict_alike(load_table(path).rows))
    assert one == other
    assert max(half, kept) < plain


def test_a_searched_budget_leaves_gradients_their_part() -> None:
    layout = Layout(1, 1, 16, 1)
    found = Found(layout, "none", layers=(3,), microbatches=2)
    total = MODEL.parameters()
    assert gradient_bytes(MODEL, CLUSTER, found) == [4 * total // 16]
    assert gradient_bytes(MODEL, replace(CLUSTER, framework="megatron"), found) == [4 * total]


@pytest.mark.parametrize("fixed", [Fixed(pp=2), Fixed(schedule="zero-bubble"), Fixed(chunks=2)])
def test_a_pipeline_is_refused(fixed: Fixed) -> None:
    with pytest.raises(OptionError, match=r"divides weights over replicas.*expected no pipeline"):
        list(layouts(MODEL, CLUSTER, fixed))


def test_it_is_searched(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, '
        '"num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 1024, '
        '"max_position_embeddings": 512}'
    )
    asked_for = [str(config), "--gpus", "8", "--hardware", "a100-sxm-80", "--batch", "16"]
    assert (
        main(["search", *asked_for, "--framework", "fsdp", "--compare", "full", "--tp", "1"]) == 0
    )
    said = capsys.readouterr().out
    assert "weights, gradients and optimizer divided over replicas" in said
    assert "PyTorch's FSDP gathers and sums around layers" in said
