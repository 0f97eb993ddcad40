"""Tiny models of Megatron-Bridge's that see or hear, of Bridge's own classes, and their steps; and
Megatron's `LLaVAModel`, held by another module as Bridge's Nemotron VL holds it."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.megatron import bridge, models
from tests.megatron.models import Layout
from tests.vision_ops import declare

PICTURE, START = 60, 62  # tokens: in the place of features, and before them
FEATURES, PIXELS = 4, 3 * 2 * 14 * 14  # of a picture of 4 x 4 patches
QWEN = "megatron.bridge.models.qwen_vl.modeling_qwen25_vl"
GLM = "megatron.bridge.models.glm_vl.modeling_glm_45v"
AUDIO = "megatron.bridge.models.qwen_audio.modeling_qwen2_audio"
OMNI = "megatron.bridge.models.nemotron_omni.modeling_nemotron_omni"
ITS_OWN = (QWEN, GLM, AUDIO, OMNI, "megatron.bridge.training.utils.packed_seq_utils")


def stand_in() -> None:
    """Make `models` build these models."""
    declare()  # transformers imports torchvision for some of them
    bridge.find_also(ITS_OWN)
    models._models = built
    models.STEPS.update(
        {"qwen": seen, "glm": seen, "audio": heard, "omni M*M-": read, "llava": tiled}
    )
    models.packed_step = packed


def built(layout: Layout, config: Any) -> Any:
    from megatron.core.enums import ModelType

    kind = layout.model.partition(" ")[0]
    config.share_embeddings_and_output_weights = layout.tied
    config._pg_collection, config.return_dict = None, True
    config.image_token_id, config.video_token_id = PICTURE, 61
    config.vision_start_token_id = START
    position = "mrope" if kind in ("qwen", "glm") else "rope"
    config.provide_language_model = functools.partial(language_model, layout, config, position)
    model = BUILT[kind](layout, config)
    model.model_type, model.spatial_merge_size = ModelType.encoder_or_decoder, 2
    yield models._initialized(model, 0)


def language_model(
    layout: Layout,
    config: Any,
    position: str,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        ),
        vocab_size=layout.vocabulary,
        max_sequence_length=layout.sequence,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=layout.tied,
        position_embedding_type=position,
        scatter_embedding_sequence_parallel=False,
    )


def _ends() -> dict[str, bool]:
    from megatron.core import parallel_state

    return {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }


SMALL: dict[str, Any] = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16)


def _qwen(layout: Layout, config: Any) -> Any:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    config.mrope_section = [2, 1, 1]
    config.vision_config = Qwen2_5_VLVisionConfig(
        **SMALL, out_hidden_size=layout.width, fullatt_block_indexes=[0]
    )
    return importlib.import_module(QWEN).Qwen25VLModel(config, **_ends())


def _glm(layout: Layout, config: Any) -> Any:
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig

    config.mrope_section = [2, 1, 1]
    config.vision_config = Glm4vVisionConfig(**SMALL, out_hidden_size=layout.width, image_size=56)
    return importlib.import_module(GLM).GLM45VModel(config, **_ends())


def _audio(layout: Layout, config: Any) -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioEncoderConfig, Qwen2Config

    encoder = Qwen2AudioEncoderConfig(
        num_mel_bins=8,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=16,
        d_model=16,
        max_source_positions=16,
    )
    text = Qwen2Config(hidden_size=layout.width, num_attention_heads=4, num_key_value_heads=4)
    config.hf_config = Qwen2AudioConfig(audio_config=encoder, text_config=text)
    config.audio_token_id = PICTURE
    return importlib.import_module(AUDIO).Qwen2AudioModel(config, **_ends())


def _omni(layout: Layout, config: Any) -> Any:
    """Without its encoder: the embedding alone runs before the language model."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    config.logit_dtype = None
    return importlib.import_module(OMNI).NemotronOmniModel(
        language_transformer_config=config,
        language_transformer_layer_spec=hybrid_stack_spec,
        language_vocab_size=layout.vocabulary,
        language_max_sequence_length=layout.sequence,
        vision_transformer_config=config,
        vision_transformer_layer_spec=None,
        vision_projection_config=config,
        vision_projection_layer_spec=None,
        image_token_index=PICTURE,
        hybrid_layer_pattern=layout.model.partition(" ")[2],
        language_position_embedding_type="none",
        add_encoder=False,
        **_ends(),
    )


def _llava(layout: Layout, config: Any) -> Any:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TERowParallelLinear,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import (
        get_vit_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.module import MegatronModule

    config.language_model_type = "any"
    vision = copy.copy(config)
    vision.num_layers, vision.vision_model_type = 1, "clip"
    inner = LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        language_vocab_size=layout.vocabulary,
        language_max_sequence_length=2 * layout.sequence,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_transformer_engine_spec(),
        drop_vision_class_token=True,
        vision_projection_config=copy.copy(config),
        vision_projection_layer_spec=MLPSubmodules(
            linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear
        ),
        language_position_embedding_type="rope",
        img_h=56,
        img_w=56,
        image_token_index=PICTURE,
        **_ends(),
    )

    class Holder(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config=config)
            self.llava_model = inner
            self.pre_process, self.post_process = inner.pre_process, inner.post_process
            self.share_embeddings_and_output_weights = False

        def set_input_tensor(self, input_tensor: Any) -> None:
            self.llava_model.set_input_tensor(input_tensor)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.llava_model(*args, **kwargs)

    return Holder()


BUILT: dict[str, Callable[[Layout, Any], Any]] = {
    "qwen": _qwen,
    "glm": _glm,
    "audio": _audio,
    "omni": _omni,
    "llava": _llava,
}

# --------------------------------------------------------------------------- steps


def _words(data: Any) -> tuple[Tensor, Tensor, torch.Generator]:
    given, labels = next(data)
    drawn = torch.Generator().manual_seed(int(given.sum()))
    return given.clone().masked_fill(given == 0, 3), labels, drawn


def seen(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    """One picture or two in each sequence."""
    given, labels, drawn = _words(data)
    count = 1 + int(torch.randint(0, 2, (), generator=drawn))
    for at in range(2, 2 + 7 * count, 7):
        given[:, at], given[:, at + 1 : at + 1 + FEATURES] = START, PICTURE
    more = {}
    if "GLM" in type(models.innermost(model)).__name__:
        more["mm_token_type_ids"] = (given == PICTURE).int()
    count *= len(given)
    out = model(
        given,
        pixel_values=torch.randn(16 * count, PIXELS, generator=drawn),
        image_grid_thw=torch.tensor([[1, 4, 4]] * count),
        labels=labels,
        **more,
    )
    return out, functools.partial(models.loss_of, labels % 3 != 0, tokens)


def packed(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    """Two sequences in one row, with a picture each."""
    from megatron.core.packed_seq_params import PackedSeqParams

    given, labels, drawn = _words(data)
    given, labels = given.reshape(1, -1), labels.reshape(1, -1)
    total = given.shape[1]
    starts = [0, 20 + int(torch.randint(0, 12, (), generator=drawn)), total]
    for at in starts[:-1]:
        given[:, at + 2], given[:, at + 3 : at + 3 + FEATURES] = START, PICTURE
    ends, longest = torch.tensor(starts).int(), max(b - a for a, b in pairwise(starts))
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    lengths = PackedSeqParams(
        qkv_format="thd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=total,
        **dict.fromkeys(names, ends),
    )
    out = model(
        given,
        pixel_values=torch.randn(16 * 2, PIXELS, generator=drawn),
        image_grid_thw=torch.tensor([[1, 4, 4]] * 2),
        labels=labels,
        packed_seq_params=lengths,
    )
    return out, functools.partial(models.loss_of, labels % 3 != 0, tokens)


def heard(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    """A sound of another length in each sequence."""
    given, labels, drawn = _words(data)
    mask = torch.zeros(len(given), 32, dtype=torch.long)
    for row, frames in zip(given, mask, strict=True):
        count = 4 + 2 * int(torch.randint(0, 3, (), generator=drawn))
        row[2 : 2 + count], frames[: 4 * count] = PICTURE, 1
    features = torch.randn(len(given), 8, 32, generator=drawn)
    out = model(given, input_features=features, feature_attention_mask=mask, labels=labels)
    return out, functools.partial(models.loss_of, labels % 3 != 0, tokens)


def tiled(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    """One token of each sequence becomes the features of a picture."""
    given, labels, drawn = _words(data)
    given[:, 2] = PICTURE
    pictures = torch.randn(len(given), 3, 56, 56, generator=drawn)
    counted = (labels % 3 != 0).float()
    out, mask = model(pictures, given, None, None, labels=labels, loss_mask=counted)
    return out, functools.partial(models.loss_of, mask > 0, tokens)


def read(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    given, labels, _drawn = _words(data)
    out = model(given, labels=labels)
    return out, functools.partial(models.loss_of, labels % 3 != 0, tokens)


def are_there() -> bool:
    """Bridge's sources, and transformers."""
    file = bridge.FOLDER / "models/nemotron_omni/modeling_nemotron_omni.py"
    return file.is_file() and importlib.util.find_spec("transformers") is not None
