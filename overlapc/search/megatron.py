"""A predicted run as arguments of Megatron's scripts: `run_arguments` has all of them.

`megatron_arguments` writes the layout, `model_arguments` the shapes, `replica_arguments` how
replicas share the optimizer, and `recompute_arguments` what a baseline's plans recompute. What a
prediction does not depend on, such as data, learning rate and tokenizer, is the user's.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapc.core.errors import OptionError
from overlapc.search.evaluate import Found
from overlapc.search.frameworks.framework import Framework
from overlapc.search.frameworks.known import FRAMEWORKS, MEGATRONS, find_framework
from overlapc.search.layouts import Cluster, Layout, expert_ranks, replicas
from overlapc.search.models.transformer import Model, Transformer
from overlapc.search.weights import divides_optimizer
from overlapc.solvers import PREFIX, modules_of
from overlapc.solvers.pipeline.partition import layout as layer_layout

MEGATRON = FRAMEWORKS["megatron"]
RUN_BY_MEGATRON = ("1f1b", "interleaved")  # schedules that Megatron runs


def megatron_arguments(
    layout: Layout,
    layers: tuple[int, ...],
    microbatches: int,
    expert_ranks: int = 1,
    fp8: bool = False,
    experts: bool = False,
    framework: Framework = MEGATRON,
) -> Iterator[str]:
    """Return the arguments, `--flag value`, with which Megatron's scripts train in this layout
    as the framework runs it."""
    yield f"--tensor-model-parallel-size {layout.tp}"
    if layout.sequence:
        yield "--sequence-parallel"
    if layout.cp > 1:
        yield f"--context-parallel-size {layout.cp}"
        yield f"--cp-comm-type {layout.cp_comm_type}"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    if len(set(layers)) > 1:
        yield f"--pipeline-model-parallel-layout '{layer_layout(layers)}'"
    elif layout.stages > layout.pp:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.stages // layout.pp}"
    if expert_ranks > 1:
        yield f"--expert-model-parallel-size {expert_ranks}"
        if framework.dispatcher != "alltoall":
            backend = f"--moe-flex-dispatcher-backend {framework.dispatcher}"
            older = framework.dispatcher == "deepep"  # by a name that older versions know, too
            yield f"--moe-token-dispatcher-type flex {'--moe-enable-deepep' if older else backend}"
        else:
            yield "--moe-token-dispatcher-type alltoall"  # by default they gather all tokens
    if experts and layout.tp > 1:
        yield f"--expert-tensor-parallel-size {layout.etp}"  # by default as many as tp
    yield "--fp16" if framework.fp16 else "--bf16"
    if fp8:
        yield "--fp8-format hybrid"
        yield f"--fp8-recipe {'delayed' if framework.delayed else 'tensorwise'}"
    yield f"--micro-batch-size {layout.microbatch}"
    yield f"--global-batch-size {layout.microbatch * microbatches * layout.dp}"


def replica_arguments(model: Model, layout: Layout, framework: Framework) -> Iterator[str]:
    """Return the arguments with which Megatron's replicas divide the optimizer and hide the sums of
    gradients as the search counts both in this framework."""
    if framework.gradient_bytes == 2 and not framework.fp16:
        yield "--grad-reduce-in-bf16"
    if framework.beside and layout.sequence:
        yield "--tp-comm-overlap"
    if framework.name.split("+")[0] in MEGATRONS and "loss" not in framework.unfused.split():
        yield "--cross-entropy-loss-fusion"
        if "replaced" in framework.unfused:
            yield "--cross-entropy-fusion-impl te"
    if framework.graphs:
        yield "--cuda-graph-impl local --cuda-graph-scope full_iteration"
        yield "--no-check-for-nan-in-loss-and-grad"
        if expert_ranks(model, layout) > 1:
            yield "--moe-pad-experts-for-cuda-graph-inference"  # asked of training, too
    if max(replicas(model, layout)) == 1:
        return
    if framework.gathers:
        yield "--use-distributed-optimizer --use-megatron-fsdp"
        yield "--data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
        return
    divided = divides_optimizer(model, framework)
    in_buckets = framework.buckets[0] > 0
    if divided:
        yield "--use-distributed-optimizer"
    if framework.hides_reduction or in_buckets:
        yield "--overlap-grad-reduce"
    if divided and in_buckets:
        yield "--overlap-param-gather"


def model_arguments(model: Transformer, framework: Framework) -> Iterator[str]:
    """Return the arguments that describe the model's blocks. What Megatron's scripts have no words
    for is left out: norms behind attention and MLP, biases of experts."""
    yield f"--num-layers {model.layers} --hidden-size {model.width}"
    yield f"--ffn-hidden-size {model.ffn} --num-attention-heads {model.heads}"
    if model.kv_rank:
        yield f"--multi-latent-attention --kv-lora-rank {model.kv_rank}"
        if model.q_rank:
            yield f"--q-lora-rank {model.q_rank}"
        yield f"--qk-head-dim {model.head_width} --qk-pos-emb-head-dim {model.rope_width}"
        yield f"--v-head-dim {model.value_width}"
    else:
        if model.kv_heads not in (0, model.heads):
            yield f"--group-query-attention --num-query-groups {model.kv_heads}"
        if model.head_width:
            yield f"--kv-channels {model.head_width}"
    if model.head_norms:
        yield "--qk-layernorm"
    yield f"--seq-length {model.seq} --max-position-embeddings {model.positions or model.seq}"
    if model.gated:
        yield "--swiglu --normalization RMSNorm --disable-bias-linear"
    if not model.positions:
        yield "--position-embedding-type rope"
    if not model.tied:
        yield "--untie-embeddings-and-output-weights"
    if not framework.dropout:
        yield "--attention-dropout 0 --hidden-dropout 0"
    if model.moe_layers:
        yield from _expert_arguments(model)


def _expert_arguments(model: Transformer) -> Iterator[str]:
    yield f"--num-experts {model.experts} --moe-router-topk {model.top_k} --moe-grouped-gemm"
    yield f"--moe-ffn-hidden-size {model.expert_width}"
    if model.shared_width:
        yield f"--moe-shared-expert-intermediate-size {model.shared_width}"
    if model.moe_every > 1:
        times = model.layers // model.moe_every
        yield f"--moe-layer-freq '([0]*{model.moe_every - 1}+[1])*{times}'"
    elif model.dense_first:
        first = f"[0]*{model.dense_first}+[1]*{model.layers - model.dense_first}"
        yield f"--moe-layer-freq '({first})'"


def run_arguments(model: Model, cluster: Cluster, found: Found, solver: str) -> list[str]:
    """Return all arguments of the run in a planned layout, which recomputes what the plans of this
    solver do."""
    framework, layout = find_framework(cluster.framework), found.layout
    return [
        *(model_arguments(model, framework) if isinstance(model, Transformer) else ()),
        *megatron_arguments(
            layout,
            found.layers,
            found.microbatches,
            expert_ranks(model, layout),
            cluster.fp8,
            model.experts > 0,
            framework,
        ),
        *replica_arguments(model, layout, framework),
        *recompute_arguments(solver),
    ]


def recompute_arguments(solver: str) -> Iterator[str]:
    """Return the arguments with which Megatron recomputes what the plans of this baseline
    recompute; none of other solvers."""
    if solver in ("megatron-full", "full", "whole"):
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif solver in ("megatron-selective", "selective"):
        yield "--recompute-granularity selective"
    elif solver.startswith(PREFIX):
        yield "--recompute-granularity selective"
        yield f"--recompute-modules {' '.join(modules_of(solver))}"


def check_modules(model: Model, solver: str) -> None:
    """Raise OptionError if the model has none of a kind of module that the solver recomputes."""
    if not solver.startswith(PREFIX):
        return
    there: set[str] = set()
    if isinstance(model, Transformer):
        there |= {"core_attn", "layernorm"}
        there |= {"mla_up_proj"} if model.kv_rank else set()
        there |= {"mlp"} if model.moe_layers < model.layers else set()
        there |= {"moe", "moe_act"} if model.moe_layers else set()
        there |= {"shared_experts"} if model.moe_layers and model.shared_width else set()
    for name in modules_of(solver):
        if name not in there:
            raise OptionError(
                f"solver {solver!r}: {model.name} has no {name} that the search knows; expected "
                f"{'some of ' + ', '.join(sorted(there)) if there else 'a preset or a config.json'}"
            )
