"""Megatron patched against Megatron as it is, in one process: three steps, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.megatron import cpu
from tests.megatron.models import Layout, set_up, twins
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

QUICK = ("0.16.1", "0.19.2")
OTHERS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.17.0", "0.18.0")
SHARDED = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
# Merged plans take longest to make, so that the quick ones have one layer.
LAYOUTS = {
    "tp": Layout(tp=2, layers=1),
    "tp, sequence, dropout": Layout(
        tp=2, layers=1, dropout=0.1, config={"sequence_parallel": True}, merge=False
    ),
    "pp": Layout(pp=2),
    "dp, sharded": Layout(ddp=SHARDED),
    "ep": Layout(ep=2, experts=4, layers=1, merge=False),
    "tied": Layout(tp=2, layers=1, tied=True, position="learned_absolute", merge=False),
    "bf16": Layout(tp=2, layers=1, config={"bf16": True}, dropout=0.1, merge=False),
}

MERGED_1F1B = {"schedule": "merged"}
PLAIN = dict(layers=1, merge=False)
FUSION = {"gradient_accumulation_fusion": True}
AHEAD = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
MORE = {
    "tp, pp": Layout(ranks=4, tp=2, pp=2, dropout=0.1),
    "pp, recompute": Layout(
        pp=2, dropout=0.1, options={"memory_budget": 0.7, "solver": "overlap"}, layers=4
    ),
    "pp, not filled": Layout(pp=2, options={"fill": False}),
    "merged 1f1b": Layout(pp=2, dropout=0.1, microbatches=6, options=MERGED_1F1B),
    "merged 1f1b, tp": Layout(ranks=4, tp=2, pp=2, tied=True, options=MERGED_1F1B),
    "merged 1f1b, sharded": Layout(ranks=4, pp=2, ddp=SHARDED, options=MERGED_1F1B),
    "merged 1f1b, groups handed in": Layout(
        ranks=4,
        tp=2,
        pp=2,
        tied=True,
        tokens=True,
        config={"sequence_parallel": True},
        hands_in=True,
        options=MERGED_1F1B,
    ),
    "pp, groups handed in": Layout(pp=2, dropout=0.1, hands_in=True),
    "interleaved, groups handed in": Layout(pp=2, vpp=2, layers=4, hands_in=True),
    "groups handed in": Layout(tp=2, layers=1, hands_in=True),
    "merged 1f1b, one": Layout(pp=2, microbatches=1, options=MERGED_1F1B),
    "less memory": Layout(tp=2, dropout=0.1, options={"memory_budget": 0.75}, merge=False),
    "less memory, experts": Layout(
        ep=2, experts=4, dropout=0.1, options={"memory_budget": 0.8}, merge=False
    ),
    "pp, freed, dropout": Layout(pp=2, dropout=0.1, config={"deallocate_pipeline_outputs": True}),
    "empty stage": Layout(
        ranks=4, pp=4, config={"pipeline_model_parallel_layout": "Et|t||L"}, options={"fill": True}
    ),
    "interleaved": Layout(pp=2, vpp=2, layers=4, dropout=0.1),
    "pp, reduced early": Layout(ranks=4, pp=2, ddp=SHARDED),
    "merged experts": Layout(ep=2, experts=4, layers=1),
    "merged sequence": Layout(tp=2, dropout=0.1, config={"sequence_parallel": True}),
    "gathered experts": Layout(
        ep=2, experts=4, config={"moe_token_dispatcher_type": "allgather"}, **PLAIN
    ),
    "capacity": Layout(
        ep=2,
        experts=4,
        config={"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        **PLAIN,
    ),
    "dropped tokens": Layout(ep=2, experts=4, config={"moe_expert_capacity_factor": 1.0}, **PLAIN),
    "shared experts": Layout(
        ep=2, experts=4, config={"moe_shared_expert_intermediate_size": 32}, **PLAIN
    ),
    "expert bias": Layout(
        ep=2,
        experts=4,
        config={
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_load_balancing_type": "none",
        },
        **PLAIN,
    ),
    "experts, pp": Layout(ranks=4, pp=2, ep=2, experts=4, merge=False),
    "experts, tp": Layout(
        ranks=4, tp=2, ep=2, etp=1, experts=4, config={"sequence_parallel": True}, **PLAIN
    ),
    "experts, all tp": Layout(tp=2, etp=2, experts=4, config={"sequence_parallel": True}, **PLAIN),
    "t5": Layout(tp=2, model="t5", position="learned_absolute", **PLAIN),
    "fused": Layout(tp=2, layers=1, config=FUSION),
    "fused, tied": Layout(tp=2, tied=True, config={**FUSION, "bf16": True}, **PLAIN),
    "tied, pp": Layout(pp=2, tied=True, position="learned_absolute"),
    "scaled": Layout(tp=2, scale=64.0, **PLAIN),
    "scaled experts, per token": Layout(ep=2, experts=4, scale=64.0, tokens=True, **PLAIN),
    "per token": Layout(tp=2, tokens=True, **PLAIN),
    "without ddp": Layout(tp=2, ddp=None, **PLAIN),
    "reduced early": Layout(ddp={"overlap_grad_reduce": True}, tied=True, layers=1),
    "groups, gates": Layout(
        tp=2,
        config={"num_query_groups": 2, "gated_linear_unit": True, "normalization": "LayerNorm"},
        **PLAIN,
    ),
    "recompute": Layout(
        tp=2,
        dropout=0.1,
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        **PLAIN,
    ),
    "selective": Layout(tp=2, dropout=0.1, config={"recompute_granularity": "selective"}, **PLAIN),
    "recomputed norms": Layout(
        tp=2,
        config={
            "normalization": "RMSNorm",
            "recompute_granularity": "selective",
            "recompute_modules": ["layernorm", "core_attn"],
        },
        **PLAIN,
    ),
    "one microbatch": Layout(tp=2, layers=1, microbatches=1),
    "several tokens ahead": Layout(tp=2, layers=1, config=AHEAD),
    "several tokens ahead, fused": Layout(tp=2, layers=1, config={**FUSION, **AHEAD}),
    "several tokens ahead, fused, tied": Layout(
        tp=2, tied=True, config={**FUSION, **AHEAD, "bf16": True}, **PLAIN
    ),
    "several tokens ahead, rms": Layout(
        tp=2, config={"normalization": "RMSNorm", **AHEAD}, **PLAIN
    ),
}
ALL = LAYOUTS | MORE
FAST = ("tp, sequence, dropout", "pp", "dp, sharded", "ep")
GROUPS = {
    "fast": FAST,
    "quick": tuple(name for name in LAYOUTS if name not in FAST),
    "more": tuple(MORE),
}
LIMIT_S = {"fast": 300, "quick": 300, "more": 900}


def on_rank(rank: int, ranks: int, version: str, fused: bool, names: list[str]) -> dict[str, Any]:
    cpu.use(version, fused)
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        found[name] = compared(ALL[name])
        dist.barrier()
        for group in list(c10d._world.pg_map):  # Megatron leaves them, and each keeps threads
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    dist.destroy_process_group()
    return found


def compared(layout: Layout) -> dict[str, Any]:
    """Train one model by Megatron as it is and its twin by Megatron patched."""
    from megatron.core.pipeline_parallel import schedules

    import overlapc.megatron as patched

    set_up(layout)
    before = dict(vars(schedules))
    plain, ours = twins(layout)
    expected = [plain.step(number) for number in range(3)]
    patched.patch(
        **{"merge": layout.merge, "solver": "heu", "profile": "estimate", **layout.options}
    )
    found = [ours.step(number) for number in range(3)]
    assert patched._steps is not None
    chunks = list(patched._steps.chunks.values())
    patched.unpatch()
    left = [name for name, value in before.items() if vars(schedules)[name] is not value]
    left += [name for c in chunks for name in vars(c.module) if name == "forward"]
    return {
        "wrong": [
            f"step {number}: {difference}"
            for number, (one, other) in enumerate(zip(expected, found, strict=True))
            for difference in differences(one, other)
        ],
        "ran": [dict(chunk.ran) for chunk in chunks],
        "why": [reason for chunk in chunks for reason in chunk.why_plain],
        "left": left,
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"{what} {i}"
        for what in expected
        for i, (one, other) in enumerate(zip(expected[what], found[what], strict=True))
        if not (one is other is None or torch.equal(one, other))
    ]


def cases() -> Iterator[Any]:
    """Versions, whether Megatron fuses functions by `torch.compile`, as it does by default, numbers
    of ranks and groups; a process imports one version."""
    for version, fused in product((*QUICK, *OTHERS), (True, False)):
        for group, names in GROUPS.items():
            if group == "more" and version in OTHERS:
                continue
            marks = [pytest.mark.timeout(LIMIT_S[group])]
            quick = group == "fast" and (version, fused) == (QUICK[-1], True)
            marks += [] if quick else [pytest.mark.slow]
            for ranks in sorted({ALL[name].ranks for name in names}):
                how = "fused" if fused else "apart"
                case = f"{version}-{how}-{ranks}-{group}"
                yield pytest.param(version, fused, ranks, group, marks=marks, id=case)


@pytest.mark.parametrize(("version", "fused", "ranks", "group"), [*cases()])
def test_a_patched_step_is_megatrons(
    version: str, fused: bool, ranks: int, group: str, subtests: pytest.Subtests
) -> None:
    cpu.need(version)
    names = [name for name in GROUPS[group] if ALL[name].ranks == ranks]
    ran = run_ranks(on_rank, ranks, version, fused, names, timeout_s=LIMIT_S[group] - 10)
    for name in names:
        with subtests.test(name):
            check(ALL[name], [found[name] for found in ran])


def check(layout: Layout, ran: list[dict[str, Any]]) -> None:
    count = 3 * layout.microbatches
    for one in ran:
        assert [one[what] for what in ("wrong", "why", "left")] == [[], [], []]
        for chunk in one["ran"]:
            assert (chunk["planned"], chunk["plain"]) == (count, 0)
            assert (chunk["merged"] > 0) == layout.merges
        assert len(one["ran"]) == (layout.vpp or 1)
        if layout.pp > 1 and not layout.options:
            assert all(chunk["late"] == count for chunk in one["ran"])
