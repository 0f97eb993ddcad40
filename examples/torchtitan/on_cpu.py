"""torchtitan's trainers without a GPU, data or a tokenizer: a model, sharded as torchtitan shards
it, and one step's `forward_backward_step`.

torchtitan is in a folder of its own (the Makefile puts it there), without what it logs and reads
with: modules of these names stand in.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(sys.prefix) / "torchtitan"
_UNUSED = (
    *("tensorboard", "torch.utils.tensorboard", "wandb", "datasets", "datasets.distributed"),
    "torchtitan.distributed.minimal_async_ep.kernels",
)
_SEEDED_OPS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_COMPILED = ["annotate_flex_attention_for_regional_inductor_pass", "regional_inductor_pass"]
_WRAPPED = "_checkpoint_wrapped_module."


def is_there() -> bool:
    return (FOLDER / "torchtitan").is_dir() or importlib.util.find_spec("torchtitan") is not None


def load() -> None:
    """Make torchtitan importable, for the CPU."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    for name in _UNUSED:
        if name not in sys.modules and (name.count(".") or importlib.util.find_spec(name) is None):
            sys.modules[name] = _Unused(name)
    import torch._inductor.utils as speeds
    import torch.utils._runtime_estimation as more_speeds
    import torchtitan.tools.utils as tools

    tools.device_type, tools.device_module = "cpu", torch.cpu  # before others take them from there
    import torchtitan.distributed.activation_checkpoint as checkpoints
    from torchtitan.experiments.graph_trainer import memory_policy

    for module in (speeds, more_speeds):
        module.get_gpu_dram_gbps = lambda: 1000
    more_speeds.get_device_tflops = lambda _: 100
    _let_cpus_run_flex_attention()
    saved = checkpoints._get_default_save_ops()
    for module in (checkpoints, memory_policy):
        module._get_default_save_ops = lambda: saved | {_SEEDED_OPS}


def _let_cpus_run_flex_attention() -> None:
    """Flex attention as the sums that it stands for: PyTorch has these for a CPU's backward, too,
    and no kernels."""
    import torch.nn.attention.flex_attention as flex
    from torchtitan.models.common import attention

    flex._validate_device = lambda *_: None
    attention.FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)
    attention._compiled_create_block_mask = flex.create_block_mask


class _Unused(types.ModuleType):
    """A module of which nothing is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def config_of(
    model: str,
    layers: int = 2,
    width: int = 0,
    *,
    flavor: str = "debugmodel",
    sequence: int = 64,
    attention: str = "sdpa",
    chunks: int = 0,
    precision: str = "float32",
    **parallelism: Any,
) -> Any:
    """A graph trainer's config of a debug model or of another of torchtitan's, or of a llama3 of
    another width. `chunks` of the sequence for its loss."""
    from dataclasses import replace

    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.experiments.graph_trainer.chunked_loss import ChunkedLossWrapperWithParamGrads
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
    from torchtitan.experiments.graph_trainer.trainer import GraphTrainer

    module = importlib.import_module(f"torchtitan.experiments.graph_trainer.{model}")
    kinds = {"moe_comm_backend": "standard"} if model == "deepseek_v3" else {}
    spec = module.model_registry(flavor, attn_backend=attention, **kinds)
    if width:
        spec = replace(spec, model=_as_wide(spec.model, layers, width))
    spec.model.layers = spec.model.layers[:layers]
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    if chunks:
        loss = ChunkedLossWrapperWithParamGrads.Config(num_chunks=chunks, loss_fn=loss)
    return GraphTrainer.Config(
        model_spec=replace(spec),
        compile=GraphTrainerCompileConfig(
            enable=True, disable_passes=["cudagraph_pass", *_COMPILED]
        ),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=sequence,
            disable_cuda_graphs=True,
            mixed_precision_param=precision,
            mixed_precision_reduce="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        loss=loss,
    )


def _as_wide(model: Any, layers: int, width: int) -> Any:
    """A llama3 of this width, whose heads have 64 channels, with the same attention."""
    from dataclasses import replace

    from torchtitan.models import llama3

    rope = replace(model.layers[0].attention.rope, dim=64)
    blocks = llama3._build_llama3_layers(
        n_layers=layers,
        dim=width,
        n_heads=width // 64,
        hidden_dim=3 * width,
        rope=rope,
        attn_backend="flex",
    )
    for block in blocks:
        block.attention.inner_attention = model.layers[0].attention.inner_attention
    return replace(
        model,
        dim=width,
        tok_embeddings=replace(model.tok_embeddings, embedding_dim=width),
        norm=replace(model.norm, normalized_shape=width),
        lm_head=replace(model.lm_head, in_features=width),
        layers=blocks,
    )


def eager_of(config: Any) -> Any:
    """The same for torchtitan's plain trainer: FSDP2, eager."""
    from dataclasses import fields, replace

    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import CompileConfig
    from torchtitan.trainer import Trainer

    kind = config.model_spec.name.removeprefix("graph_trainer/")
    module = importlib.import_module(f"torchtitan.models.{kind}")
    given = config.model_spec.model
    base = next(c for c in type(given).__mro__ if c.__module__.startswith(module.__name__))
    model = base(**{each.name: getattr(given, each.name) for each in fields(base)})
    sharded = next(getattr(module, n) for n in dir(module) if n.startswith("parallelize_"))
    spec = replace(config.model_spec, model=model, parallelize_fn=sharded)
    kept = {each.name: getattr(config, each.name) for each in fields(Trainer.Config)}
    if isinstance(kept["loss"], ChunkedLossWrapper.Config):
        chunks, inner = kept["loss"].num_chunks, kept["loss"].loss_fn
        kept["loss"] = ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=inner)
    return Trainer.Config(**kept | {"model_spec": spec, "compile": CompileConfig()})


def sum_alone(model: torch.nn.Module) -> None:
    """Have FSDP2 divide by itself, as a traced step does: on gloo it averages otherwise."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


class Titan:
    """A trainer of a config as far as one step needs it. Without `values` nothing is drawn: for a
    step that is traced and does not run."""

    def __init__(self, config: Any, ranks: int, values: bool = True) -> None:
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed import utils as distributed
        from torchtitan.experiments.graph_trainer.registry import POST_INIT_HOOKS
        from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
        from torchtitan.trainer import Trainer

        distributed.set_spmd_backend(config.parallelism.spmd_backend)
        dims = ParallelDims.from_config(config.parallelism, ranks)
        dims.build_mesh()
        spec = config.model_spec
        spec.model.update_from_config(config=config)
        torch.manual_seed(0)
        with torch.device("cpu" if values else "meta"):
            model = spec.model.build()
        with torch.no_grad():
            if values:
                model.init_states(buffer_device=None)
        model.train()
        graphed = isinstance(config, GraphTrainer.Config)
        self.model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None if graphed else config.activation_checkpoint,
            dump_folder="",
        )
        if not values:
            self.model.to_empty(device="cpu")
        kind = GraphTrainer if graphed else Trainer
        self.trainer = object.__new__(kind)
        self.trainer.__dict__ |= {
            "config": config,
            "parallel_dims": dims,
            "model_parts": [self.model],
            "model_config": spec.model,
            "device": torch.device("cpu"),
            "loss_fn": config.loss.build(compile_config=config.compile),
            "train_context": distributed.get_spmd_context(parallel_dims=dims),
            "ntokens_seen": 0,
            "_traced_step": None,
        }
        if hasattr(self.trainer.loss_fn, "set_lm_head"):
            self.trainer.loss_fn.set_lm_head(self.model.lm_head)
            self.model._skip_lm_head = True
        self.trainer.fwd_bwd_fn = self.trainer._forward_backward_body
        self.shape = config.training.local_batch_size, config.training.seq_len
        self.tokens = torch.tensor(float(math.prod(self.shape) * ranks))
        self.vocabulary = spec.model.vocab_size
        pipeline = getattr(config.compile, "pass_pipeline", "")
        POST_INIT_HOOKS.get(pipeline, lambda _: None)(self.trainer)

    def step(self, rank: int, number: int = 0) -> torch.Tensor:
        """The loss of a step; gradients are added up."""
        chance = torch.Generator().manual_seed(100 * number + rank)
        drawn = (torch.randint(self.vocabulary, self.shape, generator=chance) for _ in range(2))
        tokens, labels = drawn
        # Several documents a row, as torchtitan packs them.
        positions = (torch.arange(self.shape[1]) % (20 + number)).expand(self.shape)
        loss: torch.Tensor = self.trainer.forward_backward_step(
            input_dict={"input": tokens, "positions": positions},
            labels=labels,
            global_valid_tokens=self.tokens,
        )
        return loss.detach()

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            assert grad is not None, name
            found[name.replace(_WRAPPED, "")] = (
                grad.to_local() if hasattr(grad, "to_local") else grad
            ).clone()
        return found

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        named = self.model.named_buffers()
        return {name.replace(_WRAPPED, ""): buffer.clone() for name, buffer in named}
