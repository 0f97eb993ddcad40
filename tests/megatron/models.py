"""Tiny GPTs of Megatron, trained a few steps: `train(layout, patched)`."""

from __future__ import annotations

import copy
import functools
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.megatron import adapters, seeing
from tests.megatron.cpu import device


@dataclass(frozen=True)
class Layout:
    """How a tiny GPT is cut, and what is special about it."""

    ranks: int = 2
    tp: int = 1
    pp: int = 1
    vpp: int = 0
    ep: int = 1
    etp: int = 0
    experts: int = 0
    layers: int = 2
    width: int = 32
    sequence: int = 16
    batch: int = 2
    vocabulary: int = 64
    microbatches: int = 4
    dropout: float = 0.0
    tied: bool = False
    adapters: bool = False  # of low rank, on a frozen model
    position: str = "rope"
    model: str = "gpt"  # or "bert", "t5", a pattern: Mamba M, attention *, MLP -, MoE E
    te: bool = False  # with Transformer Engine's layers
    sees: bool = False  # pictures, by a vision model before the language model
    packed: bool = False  # sequences of other lengths in each microbatch, one behind the other
    scale: float = 0.0  # of the loss
    tokens: bool = False  # loss per token
    ddp: dict[str, Any] | None = field(default_factory=dict)  # None: without Megatron's DDP
    config: dict[str, Any] = field(default_factory=dict)
    hands_in: bool = False  # process groups and communicator, as training loops do from 0.17 on
    merge: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # of patch()

    @property
    def merges(self) -> bool:
        """Whether microbatches are merged: where there are collectives to hide."""
        may = self.merge if self.pp == 1 else self.options.get("schedule") == "merged"
        return may and self.microbatches > 1 and max(self.tp, self.ep) > 1


def set_up(layout: Layout) -> None:
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    parallel_state.destroy_model_parallel()
    # 0.12 forgets these.
    parallel_state._EMBEDDING_GLOBAL_RANKS = parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp or None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or None,
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(123)


class Trained:
    """A tiny GPT with its DDP, optimizer and random states."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.microbatches, self.sequence = layout.microbatches, layout.sequence
        self.config = _config(layout)
        self.models = [self._wrapped(model) for model in _models(layout, self.config)]
        self._schedule()
        self.optimizer: Any = None
        if layout.ddp is not None and layout.ddp.get("use_distributed_optimizer"):
            from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

            settings = OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                use_distributed_optimizer=True,
                bf16=self.config.bf16,
                params_dtype=self.config.params_dtype,
                clip_grad=1.0,
            )
            settings.overlap_param_gather = bool(layout.ddp.get("overlap_param_gather"))
            self.optimizer = get_megatron_optimizer(settings, self.models)
        self.random = random_states()

    def _wrapped(self, model: Any) -> Any:
        from megatron.core.distributed import DistributedDataParallel as DDP
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        if self.config.bf16:
            model = Float16Module(self.config, model)
        if self.layout.ddp is not None:
            settings = DistributedDataParallelConfig(**self.layout.ddp)
            model = DDP(self.config, settings, model, disable_bucketing=False)
        return model

    def _schedule(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        config, layout = self.config, self.layout
        if layout.scale:
            config.grad_scale_func = lambda loss: loss * layout.scale
        config.calculate_per_token_loss = layout.tokens
        if layout.ddp is None:
            return
        config.finalize_model_grads_func = (
            finalize_model_grads
            if callable(finalize_model_grads)
            else finalize_model_grads.finalize_model_grads
        )

        def each(name: str) -> Any:
            found = [getattr(model, name) for model in self.models]
            return found if len(found) > 1 else found[0]

        config.no_sync_func = each("no_sync")
        if layout.ddp.get("overlap_grad_reduce") and layout.pp > 1:
            config.grad_sync_func = each("start_grad_sync")

    def gradients(self, number: int) -> list[Tensor]:
        """Those of a step, without the optimizer's part; a parameter without has none."""
        self._train(number)
        return [g for p in self._parameters() if (g := _gradient(p)) is not None]

    def step(self, number: int) -> dict[str, Any]:
        """Losses, and after the step everything that it has changed."""
        losses = self._train(number)
        parameters = self._parameters()
        gradients = [_gradient(p) for p in parameters]
        gradients = [None if each is None else each.clone() for each in gradients]
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.add_(gradient.to(parameter.dtype), alpha=-0.1)
        self.random = random_states()
        return {
            "losses": [loss["loss"] for loss in losses],
            "gradients": gradients,
            "parameters": [p.detach().clone() for p in parameters],
            "buffers": [b.clone() for m in self.models for b in innermost(m).buffers()],
            "random states": list(self.random.values()),
            "logged": list(_logged().values()),
        }

    def validate(self) -> list[Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with torch.no_grad():
            losses = get_forward_backward_func()(**{**self._given(99), "forward_only": True})
        return [loss["loss"] for loss in losses]

    def _train(self, number: int) -> list[dict[str, Tensor]]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        restore(self.random)
        self._zero()
        losses: list[dict[str, Tensor]] = get_forward_backward_func()(**self._given(number))
        return losses

    def _parameters(self) -> list[Any]:
        return [p for model in self.models for p in model.parameters()]

    def _zero(self) -> None:
        for model in self.models:
            for parameter in model.parameters():
                parameter.grad = None
            if self.layout.ddp is not None:
                model.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _given(self, number: int) -> dict[str, Any]:
        from megatron.core import parallel_state

        replica = parallel_state.get_data_parallel_rank()
        replicas = parallel_state.get_data_parallel_world_size()
        seed = number * replicas + replica
        shape = self.layout.batch, self.sequence
        each = [*batches(seed, self.microbatches, shape)]
        if self.layout.packed:
            shape = 1, self.layout.batch * self.sequence
        data = [iter(each) for _ in self.models]
        several = len(self.models) > 1
        step = packed_step if self.layout.packed else STEPS.get(self.layout.model, forward_step)
        return {
            "forward_step_func": functools.partial(step, self.layout.tokens),
            "data_iterator": data if several else data[0],
            "model": self.models if several else self.models[0],
            "num_microbatches": self.microbatches,
            "seq_length": shape[1],
            "micro_batch_size": shape[0],
            "decoder_seq_length": shape[1],
            "forward_only": False,
            **(self._handed_in() if self.layout.hands_in else {}),
        }

    def _handed_in(self) -> dict[str, Any]:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.use_mpu_process_groups()
        line = P2PCommunicator(pp_group=groups.pp, config=self.config)
        return {"p2p_communicator": line, "pg_collection": groups}


def twins(layout: Layout) -> tuple[Trained, Trained]:
    """Two that train alike."""
    one, other = Trained(layout), Trained(layout)
    other.random = {name: state.clone() for name, state in one.random.items()}
    return one, other


def _config(layout: Layout) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    given: dict[str, Any] = dict(
        num_layers=layout.layers,
        hidden_size=layout.width,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp or None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or None,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        hidden_dropout=layout.dropout,
        attention_dropout=layout.dropout,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    if layout.vpp:
        given |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    if layout.experts:
        given |= dict(
            num_moe_experts=layout.experts,
            moe_router_topk=2,
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=False,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
            add_bias_linear=False,
            moe_ffn_hidden_size=2 * layout.width,
        )
    if layout.config.get("bf16"):
        given |= dict(params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    if "M" in layout.model:
        given |= dict(
            num_layers=sum(each in "M*-E" for each in layout.model.partition("/")[0]),
            is_hybrid_model=True,
            mamba_state_dim=8,
            mamba_head_dim=8,
            mamba_num_groups=2,
            add_bias_linear=False,
        )
    return TransformerConfig(**(given | layout.config))


def _models(layout: Layout, config: Any) -> Iterator[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    if layout.model != "gpt":
        other = {"bert": _bert, "t5": _t5}.get(layout.model, _hybrid)
        yield _initialized(other(layout, config), 0)
        return
    layers = get_gpt_layer_with_transformer_engine_spec if layout.te else get_gpt_layer_local_spec
    spec = layers(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    further: dict[str, Any] = {"scatter_embedding_sequence_parallel": not layout.sees}
    if config.mtp_num_layers:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        further["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=layout.te
        )
    for chunk in range(layout.vpp or 1):
        ends: dict[str, Any] = {}
        if layout.vpp:
            ends = dict(ignore_virtual=False, vp_stage=chunk)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=layout.vocabulary,
            max_sequence_length=layout.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=layout.tied,
            position_embedding_type=layout.position,
            parallel_output=True,
            **({"vp_stage": chunk} if layout.vpp else {}),
            **further,
        )
        if layout.adapters:
            adapters.adapt(model, config, layout.dropout)
        model = seeing.seeing(model) if layout.sees else model
        yield _initialized(model, chunk)


def _initialized(model: Any, chunk: int) -> Any:
    """Give a model the same weights whenever it is made."""
    for name, parameter in model.named_parameters():
        own = dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else ""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{chunk} {name} {own}".encode()))
        own_bias = any(part in name for part in ("mixer", "vis", "audio", "multi_modal"))
        drawn = own_bias or not name.endswith("bias")
        if "norm" not in name and drawn:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.train().to(device())


def _bert(layout: Layout, config: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config=config,
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=layout.vocabulary,
        max_sequence_length=layout.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def _t5(layout: Layout, config: Any) -> Any:
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    return T5Model(
        config=config,
        encoder_config=copy.deepcopy(config),
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(config.num_layers),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(config.num_layers),
        vocab_size=layout.vocabulary,
        max_sequence_length=layout.sequence,
        parallel_output=True,
    )


def _hybrid(layout: Layout, config: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_stack_spec,
        hybrid_layer_pattern=layout.model,
        vocab_size=layout.vocabulary,
        max_sequence_length=layout.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=layout.tied,
    )


def batches(seed: int, count: int, shape: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(count):
        tokens = torch.randint(0, 16, (shape[0], shape[1] + 1), generator=generator)
        tokens = tokens.to(device())
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward_step(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    """What a training script gives to Megatron's schedules."""
    given, labels = next(data)
    batch, sequence = given.shape
    places = torch.arange(sequence, device=given.device).unsqueeze(0).expand(batch, -1)
    whole = torch.ones(sequence, sequence, dtype=torch.bool, device=given.device)
    mask = torch.triu(whole, 1)[None, None]
    sees = hasattr(innermost(model), "language_model")
    seen = {"pixels": seeing.pixels_of(given)} if sees else {}
    out = model(given, places, mask, labels=labels, **seen)
    return out, functools.partial(loss_of, labels % 3 != 0, tokens)


def packed_step(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    """As Megatron-Bridge's steps do it: sequences in one row, with padding behind some."""
    from megatron.core.packed_seq_params import PackedSeqParams

    given, labels = (each.reshape(1, -1) for each in next(data))
    total = given.shape[1]
    drawn = torch.Generator().manual_seed(int(given.sum()))
    starts, lengths = [0], []
    while starts[-1] < total:
        place = min(int(torch.randint(1, total // 2, (), generator=drawn)), total - starts[-1])
        lengths.append(max(1, place - int(torch.randint(0, 2, (), generator=drawn))))
        starts.append(starts[-1] + place)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    padded, longest = torch.tensor(starts).int(), max(b - a for a, b in pairwise(starts))
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **({"total_tokens": total} if hasattr(PackedSeqParams, "total_tokens") else {}),
    )
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])[None]
    if innermost(model).config.mrope_section is not None:
        places = torch.stack([places, places // 2, places % 3])
    out = model(given, places, None, labels=labels, packed_seq_params=packed)
    return out, functools.partial(loss_of, labels % 3 != 0, tokens)


def bert_step(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    given, labels = next(data)
    kinds = (torch.arange(given.shape[1], device=given.device) > 7).long().expand_as(given)
    out = model(given, torch.ones_like(given), tokentype_ids=kinds, lm_labels=labels)

    def loss(out: Any) -> Any:
        words, next_one = out
        total = words.float().mean() + next_one.float().square().mean()
        return total, {"loss": total.detach()}

    return out, loss


def t5_step(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    given, labels = next(data)
    batch, sequence = given.shape
    none = torch.zeros(batch, 1, sequence, sequence, dtype=torch.bool, device=given.device)
    later = torch.triu(torch.ones_like(none), 1)
    out = model(given, given, none, later, none, lm_labels=labels)
    return out, functools.partial(loss_of, labels % 3 != 0, tokens)


STEPS = {"gpt": forward_step, "bert": bert_step, "t5": t5_step}


def loss_of(mask: Tensor, tokens: bool, out: Tensor, **_: Any) -> Any:
    weights = mask.float().view(-1)
    total, count = (out.float().view(-1) * weights).sum(), weights.sum()
    if tokens:
        return total, count.to(torch.int), {"loss": torch.stack([total.detach(), count])}
    loss = total / count
    return loss, {"loss": loss.detach()}


def innermost(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def _gradient(parameter: Any) -> Tensor | None:
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def random_states() -> dict[str, Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    named = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    if torch.cuda.is_available():
        named["cuda"] = torch.cuda.get_rng_state()
    return {"": torch.get_rng_state(), **named}


def restore(states: dict[str, Tensor]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states[""])
    named = {name: state.clone() for name, state in states.items() if name}
    if "cuda" in named:
        torch.cuda.set_rng_state(named.pop("cuda"))
    get_cuda_rng_tracker().set_states(named)


def _logged() -> dict[str, Tensor]:
    """The auxiliary losses noted down since the last call."""
    from megatron.core import parallel_state

    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        try:
            from megatron.core.transformer.moe.moe_utils import (
                get_moe_layer_wise_logging_tracker as tracker_of,
            )
        except ImportError:
            tracker_of = parallel_state.get_moe_layer_wise_logging_tracker
        tracker = tracker_of()
        found = {name: entry["values"].clone() for name, entry in tracker.items()}
    else:
        tracker = get_moe_metrics_tracker()
        found = {name: entry.values.clone() for name, entry in tracker.metrics.items()}
    tracker.clear()
    return found


def two_steps(trained: Trained) -> tuple[list[dict[str, Any]], list[str], Any]:
    """Two patched steps, and then none more: what they gave, the warnings, the chunk that ran."""
    import overlapc.megatron as patched

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [trained.step(number) for number in range(2)]
    assert patched._steps is not None
    (chunk,) = patched._steps.chunks.values()
    patched.unpatch()
    return found, [str(each.message) for each in told], chunk
