"""The layout that a search found, in Megatron's words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.profiler.hardware import load_hardware
from overlapc.report.answer import Answer
from overlapc.report.verdict import counted
from overlapc.search.alone import alone, unplanned
from overlapc.search.cache import PlannedLayouts
from overlapc.search.evaluate import Found
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import ANY, Cluster, Layout, layouts
from overlapc.search.megatron import megatron_arguments, replica_arguments
from overlapc.search.models.transformer import Transformer
from overlapc.search.running import Running
from overlapc.search.search import Result, _Asked, _Searches
from overlapc.search.weights import static_bytes


@pytest.mark.parametrize(
    ("layout", "layers", "microbatches", "experts", "expected"),
    [
        (
            Layout(1, 1, 4, 2),
            (24,),
            8,
            1,
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --bf16 "
            "--micro-batch-size 2 --global-batch-size 64",
        ),
        (
            Layout(2, 4, 1, 1, sequence=True),
            (3, 5, 5, 3),
            16,
            1,
            "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 "
            "--pipeline-model-parallel-layout 'Et*3|t*5|t*5|t*3L' --bf16 --micro-batch-size 1 "
            "--global-batch-size 16",
        ),
        (
            Layout(1, 2, 4, 1, "interleaved", chunks=3),
            (4,) * 6,
            8,
            4,
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 3 --expert-model-parallel-size 4 "
            "--moe-token-dispatcher-type alltoall --bf16 "
            "--micro-batch-size 1 --global-batch-size 32",
        ),
    ],
    ids=["one stage", "uneven stages", "interleaved experts"],
)
def test_a_layout_is_written_as_megatron_reads_it(
    layout: Layout, layers: tuple[int, ...], microbatches: int, experts: int, expected: str
) -> None:
    assert " ".join(megatron_arguments(layout, layers, microbatches, experts)) == expected


DENSE = Transformer("dense", layers=4, width=256, heads=4, ffn=1024, vocab=512, seq=256)
EXPERTS = replace(DENSE, name="experts", experts=4, top_k=2, expert_width=256)
ALONE, PAIR = Layout(2, 2, 1, 1), Layout(2, 2, 2, 1)


@pytest.mark.parametrize(
    ("model", "layout", "framework", "expected"),
    [
        (DENSE, ALONE, "overlapc", ""),
        (DENSE, PAIR, "overlapc", "--use-distributed-optimizer --overlap-grad-reduce"),
        (DENSE, replace(ALONE, cp=2), "megatron", "--use-distributed-optimizer"),
        (EXPERTS, ALONE, "megatron", ""),
        (EXPERTS, replace(ALONE, sequence=True, ep=1), "megatron", "--use-distributed-optimizer"),
        (EXPERTS, replace(ALONE, sequence=True, ep=2), "megatron", ""),
        (EXPERTS, replace(ALONE, sequence=True), "megatron", ""),  # divided by as many as can
        (DENSE, replace(ALONE, sequence=True), "megatron", ""),
        (
            DENSE,
            PAIR,
            "megatron-overlap",
            "--cross-entropy-loss-fusion "
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ),
        (DENSE, PAIR, "megatron-2021", "--grad-reduce-in-bf16"),
    ],
)
def test_replicas_share_the_optimizer_as_its_memory_is_counted(
    model: Transformer, layout: Layout, framework: str, expected: str
) -> None:
    """Memory is counted as divided if and only if the printed arguments divide it."""
    asked = find_framework(framework)
    assert " ".join(replica_arguments(model, layout, asked)) == expected
    divided = static_bytes(model, layout, framework=asked)
    whole = static_bytes(model, layout, framework=replace(asked, shards_optimizer=False))
    assert (divided < whole) == ("--use-distributed-optimizer" in expected)


@pytest.mark.parametrize(
    ("framework", "recipe"), [("megatron", "tensorwise"), ("megatron+delayed-scaling", "delayed")]
)
def test_scales_of_fp8_are_those_of_the_framework(framework: str, recipe: str) -> None:
    run = find_framework(framework)
    said = list(megatron_arguments(ALONE, (2, 2), 1, fp8=True, framework=run))
    assert f"--fp8-recipe {recipe}" in said


CLUSTER = Cluster("h100-sxm", 8, 8, 10**10, 64, framework="megatron", of_run=True)


@pytest.mark.parametrize(
    ("model", "framework", "expected"),
    [
        (DENSE, "overlapc", ()),
        (DENSE, "megatron", ("megatron-none", "megatron-selective", "megatron-full")),
        (
            EXPERTS,
            "megatron-overlap",
            (
                "megatron-none",
                "megatron-selective",
                "megatron-selective:moe_act",
                "megatron-full",
            ),
        ),
        (DENSE, "torchtitan", ("none", "full")),
        (DENSE, "llm-foundry+whole-layers", ("none", "whole")),
        (DENSE, "megatron-deepspeed", ("none", "selective", "whole")),
    ],
)
def test_a_framework_runs_its_own_plans_alone(
    model: Transformer, framework: str, expected: tuple[str, ...]
) -> None:
    assert alone(find_framework(framework), model) == expected
    assert alone(find_framework(framework), model, "heu") == expected
    for solver in expected:
        assert alone(find_framework(framework), model, solver) == (solver,)


def test_overlapc_says_where_it_plans_nothing() -> None:
    assert unplanned(find_framework("overlapc"), fp8=True) == ""
    assert unplanned(find_framework("megatron-overlap+bf16-gradients")) == ""
    assert "CUDA graphs and FP8" in unplanned(find_framework("megatron+cuda-graphs"), fp8=True)
    assert "no plan of overlapc sees" in unplanned(find_framework("fsdp"))
    assert "does not run in scaling" in unplanned(find_framework("scaling"))


def test_the_headline_is_what_the_framework_runs_and_ours_is_beside_it() -> None:
    """With arguments that recompute; those of ours recompute where overlapc does not run."""
    shape = {"layers": (2, 2), "peak_bytes": (1, 2)}
    own = Found(PAIR, "megatron-full", 2000, microbatches=32, recompute_ns=1, **shape)
    ours = Found(ALONE, "heu", 1500, microbatches=64, **shape)
    kinds = "megatron-none", "megatron-full"
    result = Result(own, [own], alone=kinds, ours=ours, instead=replace(ours, solver=kinds[1]))
    said = Answer.of(DENSE, CLUSTER, load_hardware("h100-sxm"), result)
    assert said is not None
    assert said.headline == f"the fastest that megatron runs by itself: {PAIR}"
    assert said.recompute == "recomputes every layer"
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert said.arguments.endswith(full)
    assert said.arguments.startswith("--num-layers 4 --hidden-size 256 --ffn-hidden-size 1024")
    assert "with overlapc: tp=2 pp=2 dp=1" in said.ours
    assert "(25.0% less)" in said.ours
    assert said.ours_script == "-m overlapc.megatron --search DIR/search.json pretrain_gpt.py"
    assert said.ours_arguments.endswith(full)
    assert Answer.parse(said.as_json()) == said


def test_layouts_have_the_schedules_of_the_framework() -> None:
    def schedules(framework: str) -> set[str]:
        where = replace(CLUSTER, framework=framework)
        return {layout.schedule for layout in layouts(DENSE, where)}

    assert schedules("megatron") == {"1f1b", "interleaved"}
    assert schedules("megatron-deepspeed") == {"1f1b"}
    assert schedules("overlapc") > schedules("megatron")


def test_a_search_that_is_stopped_judges_no_layout_that_it_has_not_looked_at() -> None:
    every = list(layouts(DENSE, CLUSTER))
    run = Running(DENSE, CLUSTER, "megatron-none", PlannedLayouts(None, DENSE, CLUSTER, ""), 5)
    run.add_all(every)
    seen = every[0]
    run.heap = [(bound, layout) for bound, layout in run.heap if layout != seen]
    run.take(Found(seen, "megatron-none", step_ns=10**9, layers=(4,)))
    asked = _Asked(ANY, every, (), (), 5, (), 1, 0.0, lambda _: None)
    result = replace(_Searches(asked, [run], [], [], interrupted=True).result(), seconds=1.0)
    assert (result.pruned, result.counted, result.left) == (0, 1, len(every) - 1)
    assert not result.certain
    assert 0 < result.bound_ns == min(bound for bound, _ in run.heap)
    assert counted(result) == (
        f"1 layouts planned or found too large, 0 cannot win, {len(every) - 1} not looked at, 1.0 s"
    )
