"""`check` compares the layout of an `overlapc search` with the layout of a Megatron script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch.distributed as dist

from overlapc.core.errors import OptionError
from overlapc.search.chosen import Chosen
from overlapc.search.megatron import RUN_BY_MEGATRON
from overlapc.solvers.pipeline.partition import layout as layer_layout


def check(
    chosen: Chosen, config: Any, ddp_config: Any, given: Mapping[str, Any], replicas: int
) -> None:
    """Raise an OptionError that lists every difference between a run and the searched layout.

    `config` is Megatron's config of the model, `ddp_config` that of its DDP, if it has one, `given`
    the arguments of the schedule, `replicas` the number of data-parallel ranks. All ranks find the
    same differences.
    """
    found = list(_mismatches(chosen, config, ddp_config, given, replicas))
    if found:
        raise OptionError(
            "search: its layout is not that of this run:\n  "
            + "\n  ".join(found)
            + "\npass what is named, or search again for this run"
        )


_Term: TypeAlias = tuple[str, Any, Any, str]  # what, found, expected, what to do


def _mismatches(
    chosen: Chosen, config: Any, ddp_config: Any, given: Mapping[str, Any], replicas: int
) -> Iterator[str]:
    schedule = chosen.layout.schedule
    if schedule not in RUN_BY_MEGATRON:
        yield f"schedule: Megatron does not have {schedule}: search with --schedule 1f1b"
    sequences = chosen.microbatch * chosen.microbatches * chosen.dp
    ranks = chosen.tp * chosen.layout.cp * chosen.pp * chosen.dp
    size, count, tokens = (
        given[name] for name in ("micro_batch_size", "num_microbatches", "seq_length")
    )
    seq = chosen.shapes.get("seq")
    terms = [
        *_divided(chosen, config),
        *_experts(chosen, config),
        ("data-parallel ranks", replicas, chosen.dp, _started(ranks)),
        (
            "sequences of a microbatch",
            size,
            chosen.microbatch,
            f"pass --micro-batch-size {chosen.microbatch}",
        ),
        (
            "microbatches of a step",
            _in_the_end(count, size * replicas),
            chosen.microbatches,
            f"pass --global-batch-size {sequences}",
        ),
        ("tokens of a sequence", tokens, seq, f"pass --seq-length {seq}"),
    ]
    if chosen.divides_optimizer and ddp_config is not None:
        divided = bool(ddp_config.use_distributed_optimizer)
        terms.append(("distributed optimizer", divided, True, "pass --use-distributed-optimizer"))
    shapes = chosen.shapes
    if "ffn" in shapes:
        terms += [*_widths(shapes, config), *_kinds(shapes, config)]
    else:  # a block of one's own
        width = shapes.get("width")
        terms.append(("hidden_size", config.hidden_size, width, f"pass --hidden-size {width}"))
    for what, found, expected, remedy in terms:
        if expected is not None and found != expected:
            yield f"{what}: found {found}, expected {expected}: {remedy}"


def _in_the_end(count: int, sequences: int) -> int:
    """The microbatches of a step, once Megatron's batch has grown to its full size."""
    from megatron.core import num_microbatches_calculator as counts

    calculator: Any = getattr(counts, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    full = getattr(calculator, "global_batch_size", None)  # of calculators that let it grow
    if full is None or calculator.get() != count:
        return count
    return int(full) // sequences


def _divided(chosen: Chosen, config: Any) -> list[_Term]:
    """How the model and its sequences are divided over ranks."""
    cp, chunks = chosen.layout.cp, len(chosen.layers) // chosen.pp
    kind = chosen.layout.cp_comm_type
    sharing = "pass" if chosen.sequence_parallel else "leave out"
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    virtual = config.virtual_pipeline_model_parallel_size or 1
    divided = f"pass --num-layers {sum(chosen.layers)}"
    chunked = f"pass --num-virtual-stages-per-pipeline-rank {chunks}"
    if len(set(chosen.layers)) > 1:  # Megatron takes one of both
        divided += f" --pipeline-model-parallel-layout '{layer_layout(chosen.layers)}'"
        chunked = "pass the layout of layers named here"
    return [
        ("tensor-parallel ranks", tp, chosen.tp, f"pass --tensor-model-parallel-size {chosen.tp}"),
        (
            "sequence parallelism",
            bool(config.sequence_parallel),
            chosen.sequence_parallel,
            f"{sharing} --sequence-parallel",
        ),
        (
            "context-parallel ranks",
            config.context_parallel_size,
            cp,
            f"pass --context-parallel-size {cp}",
        ),
        (
            "communication of context parallelism",
            communication_of(config) if cp > 1 else kind,
            kind,
            f"pass --cp-comm-type {kind}",
        ),
        ("ranks of a pipeline", pp, chosen.pp, f"pass --pipeline-model-parallel-size {chosen.pp}"),
        ("stages of a rank", virtual, chunks, chunked),
        ("layers of each stage", layers_of(config), chosen.layers, divided),
    ]


def _started(ranks: int) -> str:
    running = dist.get_world_size() if dist.is_initialized() else 0
    return "divide the model as named here" if running == ranks else f"start {ranks} processes"


def _widths(shapes: Mapping[str, Any], config: Any) -> Iterator[_Term]:
    """The sizes of the matrices; those that the search does not name are not compared."""
    latent, experts = shapes.get("kv_rank"), shapes.get("experts")
    named = {"width": ("hidden_size", "--hidden-size")}
    named["heads"] = ("num_attention_heads", "--num-attention-heads")
    if latent:
        named["kv_rank"] = ("kv_lora_rank", "--multi-latent-attention --kv-lora-rank")
        named["q_rank"] = ("q_lora_rank", "--q-lora-rank")
        named["head_width"] = ("qk_head_dim", "--qk-head-dim")
        named["rope_width"] = ("qk_pos_emb_head_dim", "--qk-pos-emb-head-dim")
        named["value_width"] = ("v_head_dim", "--v-head-dim")
    else:
        named["kv_heads"] = ("num_query_groups", "--group-query-attention --num-query-groups")
        named["head_width"] = ("kv_channels", "--kv-channels")
    if not experts or shapes.get("dense_first") or shapes.get("moe_every", 1) > 1:
        named["ffn"] = ("ffn_hidden_size", "--ffn-hidden-size")
    if experts:
        named["top_k"] = ("moe_router_topk", "--moe-router-topk")
        named["expert_width"] = ("moe_ffn_hidden_size", "--moe-ffn-hidden-size")
    shared = "moe_shared_expert_intermediate_size"
    named["experts"] = ("num_moe_experts", "--num-experts")
    named["shared_width"] = (shared, f"--{shared.replace('_', '-')}")
    alone = {"kv_heads": shapes["heads"], "head_width": shapes["width"] // shapes["heads"]}
    for shape, (field, flag) in named.items():
        if shape in shapes:
            expected = shapes[shape] or alone.get(shape, 0)
            remedy = f"pass {flag} {expected}" if expected else f"leave out {flag}"
            yield field, getattr(config, field, None) or 0, expected, remedy


def _kinds(shapes: Mapping[str, Any], config: Any) -> Iterator[_Term]:
    """What kind of layers there are, and how many."""

    def switch(what: str, found: Any, expected: Any, flag: str) -> _Term:
        remedy = f"pass {flag}" if expected else f"leave out {flag}"
        return what, bool(found), bool(expected), remedy

    if "gated" in shapes:
        yield switch("gated MLP", config.gated_linear_unit, shapes["gated"], "--swiglu")
    if "kv_rank" in shapes:
        latent = getattr(config, "multi_latent_attention", False)
        flag = "--multi-latent-attention"
        yield switch("latent attention", latent, shapes["kv_rank"], flag)
    yield switch(
        "multi-token prediction",
        getattr(config, "mtp_num_layers", None),
        False,
        "--mtp-num-layers: no search counts it, pass a memory_budget instead",
    )
    if shapes.get("experts") and config.num_moe_experts:
        given, layers = config.moe_layer_freq, config.num_layers
        found = sum(given) if isinstance(given, list) else len(range(0, layers, given))
        first, every = shapes.get("dense_first", 0), shapes.get("moe_every", 1)
        expected = (shapes["layers"] - first) // every
        freq = every if every > 1 else f"'([0]*{first}+[1]*{expected})'"
        yield "layers with experts", found, expected, f"pass --moe-layer-freq {freq}"


def _experts(chosen: Chosen, config: Any) -> list[_Term]:
    """How experts are divided over ranks, and how tokens come to them."""
    if not chosen.shapes.get("experts"):
        return []
    ep, etp = chosen.expert_ranks, chosen.layout.etp
    shared = getattr(config, "expert_tensor_parallel_size", None) or chosen.tp
    dispatcher = config.moe_token_dispatcher_type
    gathers = dispatcher == "allgather" and ep > 1
    return [
        (
            "expert-parallel ranks",
            config.expert_model_parallel_size,
            ep,
            f"pass --expert-model-parallel-size {ep}",
        ),
        (
            "tensor-parallel ranks of an expert",
            shared,
            etp,
            f"pass --expert-tensor-parallel-size {etp}",
        ),
        (
            "dispatcher of tokens",
            dispatcher,
            "alltoall" if gathers else dispatcher,
            "pass --moe-token-dispatcher-type alltoall",
        ),
    ]


def communication_of(config: Any) -> str:
    """How context-parallel ranks exchange keys and values; of layers that differ, all ways."""
    given = getattr(config, "cp_comm_type", None) or "p2p"  # Transformer Engine's default
    each = [given] if isinstance(given, str) else given
    kinds = {"all_gather" if kind == "allgather" else kind for kind in each}
    return " ".join(sorted(kinds))


def layers_of(config: Any) -> tuple[int, ...]:
    """Count the transformer layers of each stage, as Megatron divides them among ranks."""
    ranks = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size or 1
    stages = range(ranks * chunks)
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is not None:
        return tuple(
            sum(kind.name == "decoder" for kind in layout.layout[stage % ranks][stage // ranks])
            for stage in stages
        )
    first = config.num_layers_in_first_pipeline_stage
    last = config.num_layers_in_last_pipeline_stage
    embedding = int(config.account_for_embedding_in_pipeline_split)
    loss = int(config.account_for_loss_in_pipeline_split)
    others = max(1, ranks - (first is not None) - (last is not None))
    each = (config.num_layers + embedding + loss - (first or 0) - (last or 0)) // others
    of_rank = [each] * ranks
    of_rank[0] = each if first is None else first
    of_rank[-1] = of_rank[-1] if last is None else last
    layers = [of_rank[stage % ranks] // chunks for stage in stages]
    layers[0] -= embedding
    layers[-1] -= loss
    return tuple(layers)
