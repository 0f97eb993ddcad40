"""Recompute by module, against what Megatron-LM says of each module (its transformer_config.py,
`recompute_modules`, and the README of its mixture of experts), with bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from overlapc.core.check import check
from overlapc.core.errors import OptionError
from overlapc.core.ir import Op, Plan, Problem, issue, parse_issue
from overlapc.core.simulate import simulate
from overlapc.search.captures import UnitKey
from overlapc.search.megatron import check_modules, recompute_arguments
from overlapc.search.models.transformer import Transformer
from overlapc.search.presets import PRESETS
from overlapc.search.units import make_unit
from overlapc.solvers import PREFIX, has_one_plan, modules_of, solve

LATENT = Transformer(
    "latent", layers=1, width=256, heads=4, ffn=512, vocab=512, seq=128, gated=True, experts=4,
    top_k=2, expert_width=320, shared_width=128, q_rank=96, kv_rank=64, head_width=32,
    rope_width=16, value_width=32,
)  # fmt: skip
DENSE = replace(
    LATENT, name="dense", experts=0, top_k=0, expert_width=0, shared_width=0, post_norms=False
)
TP, BATCH = 2, 2
TOKENS = BATCH * LATENT.seq  # of whole sequences; each rank has half of them between the matrices
EACH = 2  # bytes


@cache
def problem(model: Transformer) -> Problem:
    key = UnitKey(model, "h100-sxm", 4, TP, 2 if model.experts else 1, BATCH, True)
    return make_unit(key, bounded=False, most=1).problem


def planned(model: Transformer, modules: str) -> Plan:
    of = problem(model)
    plan = solve(of, PREFIX + modules if modules else "megatron-none")
    check(of, plan)
    return plan


def kept(model: Transformer, modules: str) -> int:
    """Bytes that are kept between forward and backward."""
    trace = problem(model).trace
    saved = {trace.value[name].storage for name in planned(model, modules).saved} - trace.resident
    sizes: dict[str, int] = {}
    for value in trace.values:
        sizes[value.storage] = max(value.bytes, sizes.get(value.storage, 0))
    return sum(sizes[storage] for storage in saved)


def part(model: Transformer, op: str) -> str:
    """The block's module that the op belongs to: `norm`, `moe`."""
    return problem(model).trace.modules.get(op, "").partition("blocks.0.")[2].split(".")[0]


def is_view(model: Transformer, op: Op) -> bool:
    trace = problem(model).trace
    makes, reads = (
        {trace.value[name].storage for name in names} for names in (op.outputs, op.inputs)
    )
    return makes <= reads | trace.resident


def again(model: Transformer, modules: str) -> list[str]:
    """The modules of the ops that run again, and what they are, but for views."""
    trace, found = problem(model).trace, []
    without = set(planned(model, "").recomputed)
    for text in planned(model, modules).order:
        name, is_again = parse_issue(text)
        if is_again and name not in without and not is_view(model, trace.op[name]):
            called = trace.op[name].signature.split(" ", 1)[0].split(".")[1]
            found.append(f"{trace.modules[name].removeprefix('blocks.0.')} {called}")
    return found


def less(model: Transformer, modules: str) -> int:
    return kept(model, "") - kept(model, modules)


def test_norms_keep_what_goes_in() -> None:
    """Both results are made again: each rank has half of the tokens, all wide."""
    assert again(LATENT, "layernorm") == ["norm native_layer_norm", "attn_norm native_layer_norm"]
    assert less(LATENT, "layernorm") == 2 * TOKENS // TP * LATENT.width * EACH + statistics(2)


def statistics(norms: int) -> int:
    """Means and deviations in float32, which a norm keeps besides."""
    trace = problem(LATENT).trace
    op = next(op for op in trace.ops if op.signature.startswith("aten.native_layer_norm."))
    return norms * sum(trace.value[name].bytes for name in op.outputs[1:])


def test_the_norm_is_made_again_before_the_backward_of_what_reads_it() -> None:
    """Megatron makes it again when the gradient of attention's or of the MLP's result is there, and
    that is before this gradient is gathered."""
    trace, order = problem(LATENT).trace, planned(LATENT, "layernorm").order
    for norm, readers in (("norm", ("moe", "shared")), ("attn_norm", ("attn",))):
        made = next(op.name for op in trace.ops if part(LATENT, op.name) == norm)
        at = order.index(issue(made, True))
        backward = [
            i
            for i, text in enumerate(order)
            if not parse_issue(text)[1]
            and not trace.op[text].is_forward
            and part(LATENT, text) in readers
        ]
        assert at < min(backward)


def test_up_projections_keep_the_thin_tensors() -> None:
    """Queries, keys and padded values of this rank's heads are made again, with their norms. What
    the core of attention makes is kept."""
    found = again(LATENT, "mla_up_proj")
    assert {each.split()[0] for each in found} == {
        "attn", "attn.q", "attn.q_norm", "attn.kv", "attn.kv_norm"
    }  # fmt: skip
    assert sum(each.endswith(" mm") for each in found) == 2  # the up projections alone
    assert not any("scaled_dot_product" in each for each in found)
    heads, head = LATENT.heads // TP, LATENT.head
    made = 3 * TOKENS * heads * head * EACH  # queries, keys, values as wide as they
    made += TOKENS * (LATENT.q_rank + LATENT.kv_rank) * EACH  # behind the thin norms
    assert less(LATENT, "mla_up_proj") >= made
    thin = TOKENS * (LATENT.q_rank + LATENT.kv_rank + LATENT.rope_width) * EACH
    trace, saved = problem(LATENT).trace, planned(LATENT, "mla_up_proj").saved
    found_thin = {
        trace.value[name].storage: value.bytes
        for op in trace.ops
        if trace.modules.get(op.name, "").endswith("_thin") and "mm" in op.signature.split(" ")[0]
        and op.is_forward
        for name in op.outputs
        for value in [trace.value[name]]
    }  # fmt: skip
    assert sum(found_thin.values()) == thin
    assert set(found_thin) <= {trace.value[name].storage for name in saved}


def test_activations_keep_what_the_first_product_makes() -> None:
    """Of the experts alone: the gate's activation, and its product with the other half."""
    assert again(LATENT, "moe_act") == ["moe silu", "moe mul"]
    rows = TOKENS // TP * LATENT.top_k
    assert less(LATENT, "moe_act") == 2 * rows * LATENT.expert_width * EACH


@pytest.mark.parametrize(
    ("model", "modules", "inside"),
    [
        (DENSE, "mlp", {"mlp"}),
        (LATENT, "moe", {"moe", "shared"}),
        (LATENT, "shared_experts", {"shared"}),
    ],
    ids=["mlp", "moe", "shared_experts"],
)
def test_checkpointed_modules_run_again_whole(
    model: Transformer, modules: str, inside: set[str]
) -> None:
    """What goes in is kept, nothing within; all ops run again, also the last product and the
    collectives behind it."""
    trace, plan = problem(model).trace, planned(model, modules)
    ops = {
        op.name
        for op in trace.ops
        if op.is_forward and part(model, op.name) in inside and not is_view(model, op)
    }
    assert {name for name in plan.recomputed if name in ops} == ops
    made = {trace.value[name].storage for name in ops for name in trace.op[name].outputs}
    assert not made & {trace.value[name].storage for name in plan.saved}
    given = next(op for op in trace.ops if trace.modules.get(op.name) == "blocks.0.norm")
    assert given.outputs[0] in plan.saved


def test_several_modules_together() -> None:
    """What DeepSeek-V3 recomputes (its report, section 3.2.1: norms and up-projections), and
    Megatron's example of it."""
    both = planned(LATENT, "layernorm+mla_up_proj")
    assert both.solver == "megatron-selective:layernorm+mla_up_proj"
    assert less(LATENT, "layernorm+mla_up_proj") == less(LATENT, "layernorm") + less(
        LATENT, "mla_up_proj"
    )
    most = "moe+mla_up_proj+layernorm"
    assert kept(LATENT, most) < kept(LATENT, "layernorm+mla_up_proj") < kept(LATENT, "")
    of = problem(LATENT)
    assert simulate(of, planned(LATENT, most)).step_ns > simulate(of, both).step_ns
    assert set(again(LATENT, "moe+moe_act")) == set(again(LATENT, "moe"))  # within it


def test_the_core_of_attention_is_megatrons_selective_recompute() -> None:
    assert planned(LATENT, "core_attn").order == solve(problem(LATENT), "megatron-selective").order


def test_names() -> None:
    assert modules_of("megatron-selective:moe+core_attn") == ("core_attn", "moe")
    assert has_one_plan("megatron-selective:moe")
    with pytest.raises(OptionError, match="no module 'norm' to recompute; expected some of core_"):
        modules_of("megatron-selective:norm")
    check_modules(LATENT, "megatron-selective:moe+mla_up_proj")
    with pytest.raises(OptionError, match="gpt-7b has no moe that the search knows"):
        check_modules(PRESETS["gpt-7b"], "megatron-selective:moe")
    with pytest.raises(OptionError, match="latent has no mlp"):
        check_modules(LATENT, "megatron-selective:mlp")


def test_megatron_is_told() -> None:
    assert list(recompute_arguments("megatron-selective:moe+layernorm")) == [
        "--recompute-granularity selective",
        "--recompute-modules layernorm moe",
    ]
    assert list(recompute_arguments("megatron-full"))[1] == "--recompute-method uniform"
    assert not list(recompute_arguments("heu"))
