"""A graph captured with many sequences and given the sizes of fewer is the graph of those fewer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.batch import of_batch
from overlapc.search.captures import UnitKey, captures
from overlapc.search.frameworks.known import FRAMEWORKS
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Transformer
from overlapc.search.units import make_units

GPT = Transformer("tiny", layers=8, width=256, heads=4, ffn=1024, vocab=512, seq=256)
LLAMA = replace(GPT, gated=True, kv_heads=2, head_norms=True, post_norms=True)
EXPERTS = replace(GPT, experts=4, top_k=2, expert_width=512, moe_every=2)
LATENT = replace(
    EXPERTS, gated=True, head_width=32, q_rank=48, kv_rank=64, rope_width=16, value_width=32,
    shared_width=128, moe_every=1, dense_first=1,
)  # fmt: skip
ALONE = Layout(1, 1, 1, 1)
PAIR = Layout(2, 1, 2, 1)
SHARED = replace(PAIR, sequence=True)


def keys(model, layout, framework="overlapc", batches=(1, 2, 3, 8), **more):
    cluster = Cluster("h100-sxm", 4, 8, 1 << 36, 16, framework=framework, **more)
    return [UnitKey.of(model, cluster, replace(layout, microbatch=batch)) for batch in batches]


def together_is_alone(every):
    alone = [captures([key], 2)[0] for key in every]
    for one, other in zip(captures(every, 2), alone, strict=True):
        # What differs is found sooner in parts.
        assert one.blocks.described.trace.ops == other.blocks.described.trace.ops
        assert one.blocks.described.trace.values == other.blocks.described.trace.values
        assert one.head.described.works == other.head.described.works
        assert one == other


MODELS = {"gpt": GPT, "llama": LLAMA, "experts": EXPERTS, "latent": LATENT}
QUICK = [("gpt", ALONE), ("experts", PAIR)]


def slow_but(quick, every):
    return [pytest.param(one, marks=() if one in quick else pytest.mark.slow) for one in every]


@pytest.mark.parametrize(
    "case",
    slow_but(QUICK, product(MODELS, (ALONE, PAIR, SHARED))),
    ids=lambda case: "-".join(map(str, case)),
)
def test_all_kinds_of_blocks(case):
    name, layout = case
    together_is_alone(keys(MODELS[name], layout))


@pytest.mark.slow
@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_all_frameworks(framework):
    together_is_alone(keys(LLAMA, SHARED, framework))
    together_is_alone(keys(GPT, PAIR, framework))


@pytest.mark.slow
def test_parts_of_sequences_and_shared_experts():
    together_is_alone(keys(LLAMA, Layout(2, 1, 1, 1, sequence=True, cp=2)))
    together_is_alone(keys(EXPERTS, replace(SHARED, shares_experts=True)))


@pytest.mark.slow
def test_experts_that_words_do_not_fill_evenly_are_captured_each_for_itself():
    model = replace(EXPERTS, experts=3, top_k=1)
    assert not model.scales(256)
    together_is_alone(keys(model, ALONE))


@pytest.mark.slow
def test_units_are_alike():
    every = keys(LATENT, PAIR, batches=(1, 3), fp8=True)
    alone = [make_units([key])[0] for key in every]
    assert list(make_units(every)) == alone


def test_a_batch_of_one_is_refused():
    with pytest.raises(CaptureError, match="expected 2 or more"), of_batch(None, 1):
        pass
