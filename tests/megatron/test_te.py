"""Megatron with Transformer Engine's layers, of a stand-in: bitwise, planned, traced once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tests.megatron import cpu
from tests.megatron.models import Layout, innermost, set_up, twins
from tests.megatron.test_patch import differences
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

FUSED = {"gradient_accumulation_fusion": True}
NO_BIAS = {**FUSED, "add_bias_linear": False}
SEQUENCE = {"sequence_parallel": True}
GROUPED = {"moe_grouped_gemm": True}
DEEPEP = {**GROUPED, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
HYBRIDEP = DEEPEP | {"moe_flex_dispatcher_backend": "hybridep"}
KERNELS = {
    "apply_rope_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
}
BF16 = {"bf16": True}
SHORT: dict[str, Any] = dict(te=True, microbatches=3, merge=False)
LAYOUTS = {
    "tp, fused": Layout(**SHORT, tp=2, layers=1, config=FUSED),
    "ep, grouped, fused": Layout(**SHORT, ep=2, experts=4, layers=1, config=FUSED | GROUPED),
    "tp": Layout(**SHORT, tp=2),
    "tp, fused kernels": Layout(**SHORT, tp=2, config=FUSED | KERNELS),
    "tp, fused kernels, less memory": Layout(
        **SHORT,
        tp=2,
        config=FUSED | KERNELS,
        options={"memory_budget": 0.6, "solver": "overlap"},
    ),
    "ep, fused kernels": Layout(
        **SHORT,
        ep=2,
        experts=4,
        layers=1,
        config={**FUSED, **GROUPED, **KERNELS, "moe_permute_fusion": True},
    ),
    "tp, merged, fused": Layout(te=True, tp=2, layers=1, microbatches=3, config=FUSED),
    "tp, sequence": Layout(**SHORT, tp=2, dropout=0.1, config=SEQUENCE),
    "tp, sequence, fused": Layout(**SHORT, tp=2, dropout=0.1, config=SEQUENCE | FUSED | BF16),
    "pp": Layout(**SHORT, pp=2),
    "pp, fused": Layout(**SHORT, pp=2, dropout=0.1, config=FUSED),
    "vpp": Layout(te=True, pp=2, vpp=2, layers=4),
    "vpp, fused": Layout(te=True, pp=2, vpp=2, layers=4, dropout=0.1, config=FUSED),
    "ep, grouped": Layout(**SHORT, ep=2, experts=4, layers=1, config=GROUPED),
    "ep, grouped, fused, less memory": Layout(
        **SHORT,
        ep=2,
        experts=4,
        layers=1,
        config=FUSED | GROUPED,
        options={"memory_budget": 0.85, "solver": "overlap"},
    ),
    "less memory, fused": Layout(
        **SHORT,
        tp=2,
        dropout=0.1,
        config=FUSED | BF16,
        options={"memory_budget": 0.8, "solver": "overlap"},
    ),
    "packed, tp, fused": Layout(**SHORT, tp=2, layers=1, packed=True, config=FUSED),
    "packed, pp, less memory": Layout(
        te=True,
        microbatches=3,
        pp=2,
        packed=True,
        dropout=0.1,
        config=FUSED,
        options={"memory_budget": 0.8, "solver": "overlap"},
    ),
    "packed, tp, sequence, fused kernels": Layout(
        te=True, tp=2, microbatches=3, packed=True, config=FUSED | KERNELS | SEQUENCE
    ),
    "packed, ep": Layout(**SHORT, ep=2, experts=4, layers=1, packed=True, config=FUSED | GROUPED),
    "adapters, tp, fused": Layout(**SHORT, tp=2, adapters=True, dropout=0.1, config=FUSED),
    "adapters, packed, tp, sequence": Layout(
        te=True, tp=2, microbatches=3, packed=True, adapters=True, config=FUSED | SEQUENCE
    ),
    "adapters, pp, less memory": Layout(
        te=True,
        microbatches=3,
        pp=2,
        adapters=True,
        config=FUSED,
        options={"memory_budget": 0.8, "solver": "overlap"},
    ),
    "ep, DeepEP, fused": Layout(**SHORT, ep=2, experts=4, layers=1, config=FUSED | DEEPEP),
    "ep, DeepEP, less memory": Layout(
        **SHORT,
        ep=2,
        experts=4,
        layers=1,
        config={**FUSED, **DEEPEP, "moe_permute_fusion": True},
        options={"memory_budget": 0.8, "solver": "overlap"},
    ),
    "tp, sequence, ep, DeepEP": Layout(
        te=True, tp=2, experts=4, layers=1, microbatches=3, config=FUSED | DEEPEP | SEQUENCE
    ),
    "ep, DeepEP, experts recompute": Layout(
        **SHORT,
        ep=2,
        experts=4,
        layers=1,
        config={
            **FUSED,
            **DEEPEP,
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act", "layernorm"],
        },
    ),
    "ep, HybridEP, fused": Layout(**SHORT, ep=2, experts=4, layers=1, config=FUSED | HYBRIDEP),
    "packed, sections": Layout(
        **SHORT, tp=2, packed=True, position="mrope", config={**FUSED, "mrope_section": [2, 1, 1]}
    ),
    "sees, tp, sequence": Layout(**SHORT, tp=2, sees=True, dropout=0.1, config=FUSED | SEQUENCE),
    "sees, tp, merged": Layout(te=True, microbatches=3, tp=2, sees=True, config=FUSED),
    "sees, tied, overlapped": Layout(
        **SHORT,
        sees=True,
        tied=True,
        config=FUSED,
        ddp=dict(overlap_grad_reduce=True, bucket_size=2000),
    ),
    "sees, pp, less memory": Layout(
        te=True,
        microbatches=3,
        pp=2,
        sees=True,
        config=FUSED,
        options={"memory_budget": 0.8, "solver": "overlap"},
    ),
    "adapters, ep": Layout(
        **SHORT, ep=2, experts=4, layers=1, adapters=True, config=FUSED | GROUPED
    ),
    "adapters, ep, DeepEP": Layout(
        **SHORT, ep=2, experts=4, layers=1, adapters=True, config=FUSED | DEEPEP
    ),
    "mamba, tp, fused": Layout(**SHORT, tp=2, model="M*M-", config=FUSED),
    "mamba, tp, sequence": Layout(
        **SHORT, tp=2, model="M*-M", dropout=0.1, config=SEQUENCE | FUSED
    ),
    "mamba, pp, less memory": Layout(
        te=True,
        microbatches=3,
        pp=2,
        model="M*|M-",
        config=FUSED,
        options={"memory_budget": 0.8, "solver": "overlap"},
    ),
    "mamba, ep, DeepEP": Layout(**SHORT, ep=2, experts=4, model="EM", config=FUSED | DEEPEP),
    "mamba, packed": Layout(**SHORT, tp=2, model="M*M-", packed=True, config=FUSED),
    "tied, fused": Layout(**SHORT, tp=2, tied=True, config=FUSED),
    "rms, fused": Layout(
        **SHORT,
        tp=2,
        config={**FUSED, "normalization": "RMSNorm", "qk_layernorm": True, "num_query_groups": 2},
    ),
    "one microbatch, measured": Layout(
        te=True, tp=2, layers=1, microbatches=1, config=FUSED, options={"profile": "measure"}
    ),
    "sharded, fused": Layout(
        **SHORT,
        config=FUSED | BF16,
        ddp=dict(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        ),
    ),
}
GATE = (
    *("tp, fused", "ep, grouped, fused", "packed, tp, fused"),
    *("adapters, ep, DeepEP", "mamba, packed"),
)
STEPS = 3
TOGETHER = 10  # layouts in one process: Megatron's groups leave threads behind


def on_rank(
    rank: int, ranks: int, version: str, te: str, names: list[str]
) -> dict[str, dict[str, Any]]:
    cpu.use(version, te=te)
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        found[name] = compared(LAYOUTS[name])
        dist.barrier()
        for group in list(c10d._world.pg_map):  # Megatron leaves them, and each keeps threads
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    dist.destroy_process_group()
    return found


def compared(layout: Layout, change: Any = None) -> dict[str, Any]:
    """Train one model by Megatron as it is and its twin by Megatron patched, each with a `change`;
    count the traces of each step."""
    import overlapc.megatron as patched
    from overlapc.megatron import planning

    set_up(layout)
    plain, ours = twins(layout)
    for trained in (plain, ours) if change is not None else ():
        change(innermost(trained.models[0]))
    expected = [plain.step(number) for number in range(STEPS)]
    traces, real = [0] * STEPS, planning.traced

    def counted(*args: Any) -> Any:
        traces[number] += 1
        return real(*args)

    planning.traced = counted
    found = []
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            options = {"merge": layout.merge, "solver": "heu", "profile": "estimate"}
            patched.patch(**{**options, **layout.options})
            for number in range(STEPS):
                found.append(ours.step(number))
    finally:
        planning.traced = real
    assert patched._steps is not None
    said, chunks = patched.explain(), [*patched._steps.chunks.values()]
    patched.unpatch()
    return {
        "wrong": [
            f"step {i}: {difference}"
            for i, (one, other) in enumerate(zip(expected, found, strict=True))
            for difference in differences(one, other)
        ],
        "ran": [dict(chunk.ran) for chunk in chunks],
        "why": [reason for chunk in chunks for reason in chunk.why_plain],
        "told": [str(each.message) for each in told if "overlapc" in str(each.message)],
        "traces": traces,
        "said": said,
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("version", "te", "names"),
    [
        pytest.param("0.19.2", "2.9", GATE, id="gate"),
        pytest.param("0.19.2", "2.9", tuple(LAYOUTS)[2:], id="2.9", marks=pytest.mark.slow),
        pytest.param("0.19.2", "2.18", tuple(LAYOUTS), id="2.18", marks=pytest.mark.slow),
        pytest.param("0.16.1", "2.9", tuple(LAYOUTS)[:9], id="0.16.1", marks=pytest.mark.slow),
    ],
)
def test_layers_of_transformer_engine_are_planned(
    version: str, te: str, names: tuple[str, ...], subtests: pytest.Subtests
) -> None:
    cpu.need(version)
    for first in range(0, len(names), TOGETHER):
        together = [*names[first : first + TOGETHER]]
        ran = run_ranks(on_rank, 2, version, te, together, timeout_s=590)
        for name in together:
            with subtests.test(name):
                for found in ran:
                    check(LAYOUTS[name], found[name])


def check(layout: Layout, found: dict[str, Any]) -> None:
    assert [found[what] for what in ("wrong", "why", "told")] == [[], [], []]
    count = STEPS * layout.microbatches
    for chunk in found["ran"]:
        assert (chunk["planned"], chunk["plain"]) == (count, 0)
    assert found["traces"][1:] == [0] * (STEPS - 1)
    assert "one op each" in found["said"]


def shared(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """A model that sees, of which a parameter is also used before or behind its planned part."""
    cpu.use("0.19.2", te="2.9")
    dist.init_process_group("gloo")
    short: dict[str, Any] = dict(SHORT, ranks=1, layers=1, sees=True)
    return {
        "before": compared(Layout(**short, tied=True)),
        "behind": compared(Layout(**short), penalized),
    }


def penalized(model: Any) -> None:
    real, weight = model.forward, model.language_model.decoder.layers[0].mlp.linear_fc2.weight
    model.forward = lambda *args, **kwargs: real(*args, **kwargs) + weight.square().sum()


def test_what_is_used_outside_of_the_planned_part_is_named() -> None:
    cpu.need("0.19.2")
    (found,) = run_ranks(shared, 1)
    (why,) = found["before"]["why"]
    assert "is used both in it and before it" in why
    assert found["before"]["wrong"] == []
    (told,) = found["behind"]["told"]
    assert "is also used outside of its forward" in told


def refused(rank: int, ranks: int) -> dict[str, list[str]]:
    """Why a chunk runs plain with what is known of a layer and not served."""
    cpu.use("0.19.2", te="2.9")
    from transformer_engine.pytorch.fp8 import fp8_autocast

    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    found = {}
    layout = Layout(ranks=1, te=True, layers=1, microbatches=2, config=NO_BIAS)
    set_up(layout)
    for name in ("fp8", "shared", "delayed"):
        plain, ours = twins(layout)
        for trained in (plain, ours):
            layer = trained.models[0].module.decoder.layers[0]
            if name == "shared":
                twice = _Twice()
                twice.inner = layer.self_attention.linear_proj
                layer.self_attention.linear_proj = twice
            if name == "delayed":
                layer.mlp.linear_fc2.wgrad_store.enabled = True
                layer.mlp.linear_fc2.wgrad_store.put = lambda given, function: function(*given)
        with warnings.catch_warnings(), fp8_autocast(enabled=name == "fp8"):
            warnings.simplefilter("ignore")
            expected = plain.step(0)
            patched.patch(solver="heu", profile="estimate")
            got = ours.step(0)
        assert patched._steps is not None
        (chunk,) = patched._steps.chunks.values()
        found[name] = [*chunk.why_plain, *differences(expected, got)]
        patched.unpatch()
    dist.destroy_process_group()
    return found


class _Twice(nn.Module):
    def forward(self, x: Any) -> Any:
        out, bias = self.inner(x)
        return self.inner(out + x)[0], bias


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_is_not_served_of_a_layer_is_named() -> None:
    cpu.need("0.19.2")
    (found,) = run_ranks(refused, 1, timeout_s=190)
    words = {"fp8": "runs in FP8", "shared": "more than once", "delayed": "until backward_dw()"}
    for name, expected in words.items():
        (why,) = found[name]
        assert expected in why, name
