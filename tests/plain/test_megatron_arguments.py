"""The layout that a search found, in Megatron's words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.search.frameworks import find_framework
from overlapc.search.layouts import Layout
from overlapc.search.megatron import megatron_arguments, replica_arguments
from overlapc.search.models import Transformer
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
