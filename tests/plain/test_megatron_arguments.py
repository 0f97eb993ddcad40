"""The layout that a search found, in Megatron's words."""

from __future__ import annotations

import pytest

from overlapc.search.layouts import Layout
from overlapc.search.megatron import megatron_arguments


@pytest.mark.parametrize(
    ("layout", "layers", "microbatches", "experts", "expected"),
    [
        (
            Layout(1, 1, 4, 2),
            (24,),
            8,
            1,
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 2 "
            "--global-batch-size 64",
        ),
        (
            Layout(2, 4, 1, 1, sequence=True),
            (3, 5, 5, 3),
            16,
            1,
            "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 "
            "--pipeline-model-parallel-layout 'Et*3|t*5|t*5|t*3L' --micro-batch-size 1 "
            "--global-batch-size 16",
        ),
        (
            Layout(1, 2, 4, 1, "interleaved", chunks=3),
            (4,) * 6,
            8,
            4,
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 3 --expert-model-parallel-size 4 "
            "--micro-batch-size 1 --global-batch-size 32",
        ),
    ],
    ids=["one stage", "uneven stages", "interleaved experts"],
)
def test_a_layout_is_written_as_megatron_reads_it(
    layout: Layout, layers: tuple[int, ...], microbatches: int, experts: int, expected: str
) -> None:
    assert " ".join(megatron_arguments(layout, layers, microbatches, experts)) == expected
