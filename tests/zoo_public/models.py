"""Public architectures at toy sizes: what people train, as its authors wrote it.

`ZOO` maps a name to a function that builds the model, seeded, and one batch for it. Widths and
depths are small; layers, attention, norms, dropout and initialisation are the library's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 96


@dataclass
class Case:
    """A model, the arguments of one training forward, and what is around that forward, given the
    device's type."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    around: Callable[[str], Any] = contextlib.nullcontext
    device: str = "cpu"


ZOO: dict[str, Callable[[], Case]] = {}


def entry(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        ZOO[name] = make
        return make

    return register


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16)


# --------------------------------------------------------------------------- transformers


def tokens(rows: int = 2, length: int = 16) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


def images(size: int = 32, channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, channels, size, size)}


def labelled_images(size: int = 32) -> dict[str, Tensor]:
    return {**images(size), "labels": torch.tensor([1, 0])}


def hugging_face(
    name: str,
    model: str,
    inputs: Callable[[], dict[str, Any]] = tokens,
    *,
    attention: str | None = None,
    checkpointed: bool = False,
    dtype: torch.dtype | None = None,
    around: Callable[[str], Any] = contextlib.nullcontext,
    **config: Any,
) -> None:
    """Add a model of transformers, made from its config class with these values."""

    def make() -> Case:
        import transformers

        cls = getattr(transformers, model)
        made_config = cls.config_class(**config)
        made = cls._from_config(made_config, **_attention(attention))
        if dtype is not None:
            made = made.to(dtype)
        if checkpointed:
            made.gradient_checkpointing_enable()
        return Case(made, (), inputs(), around)

    ZOO[name] = make


def _attention(kind: str | None) -> dict[str, str]:
    return {} if kind is None else {"attn_implementation": kind}


ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER = {**ENCODER, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**DECODER, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

hugging_face("llama sdpa", "LlamaForCausalLM", attention="sdpa", **GROUPED)
hugging_face("llama eager attention", "LlamaForCausalLM", attention="eager", **GROUPED)
hugging_face("llama checkpointed", "LlamaForCausalLM", checkpointed=True, **GROUPED)
hugging_face("llama bf16", "LlamaForCausalLM", dtype=torch.bfloat16, **GROUPED)
hugging_face("llama autocast", "LlamaForCausalLM", around=autocast, **GROUPED)
hugging_face("mistral", "MistralForCausalLM", sliding_window=8, **GROUPED)
hugging_face("mixtral", "MixtralForCausalLM", num_local_experts=4, **GROUPED)
hugging_face("qwen2", "Qwen2ForCausalLM", **GROUPED)
hugging_face("qwen3", "Qwen3ForCausalLM", head_dim=16, **GROUPED)
hugging_face("qwen3 moe", "Qwen3MoeForCausalLM", head_dim=16, **EXPERTS, **GROUPED)
hugging_face("gemma2", "Gemma2ForCausalLM", head_dim=8, sliding_window=8, **GROUPED)
hugging_face("gemma3", "Gemma3ForCausalLM", head_dim=8, sliding_window=8, **GROUPED)
hugging_face("phi3", "Phi3ForCausalLM", resid_pdrop=0.1, **GROUPED)
hugging_face("gpt2", "GPT2LMHeadModel", **GPT2)
hugging_face("gpt2 autocast", "GPT2LMHeadModel", around=autocast, **GPT2)
hugging_face("gpt-neox", "GPTNeoXForCausalLM", hidden_dropout=0.1, **DECODER)
hugging_face("opt", "OPTForCausalLM", word_embed_proj_dim=32, ffn_dim=64, **DECODER)
hugging_face(
    "bloom", "BloomForCausalLM", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4,
    use_cache=False, hidden_dropout=0.1,
)  # fmt: skip
hugging_face("olmo2", "Olmo2ForCausalLM", **GROUPED)
hugging_face("granite", "GraniteForCausalLM", attention_dropout=0.1, **GROUPED)
hugging_face("starcoder2", "Starcoder2ForCausalLM", residual_dropout=0.1, **GROUPED)
hugging_face("cohere", "CohereForCausalLM", **GROUPED)
hugging_face(
    "deepseek-v3", "DeepseekV3ForCausalLM", moe_intermediate_size=32, n_routed_experts=4,
    n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2, topk_group=1,
    kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8, **DECODER,
)  # fmt: skip
hugging_face(
    "gpt-oss", "GptOssForCausalLM", head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=8, **GROUPED,
)  # fmt: skip
hugging_face(
    "mamba", "MambaForCausalLM", vocab_size=VOCAB, hidden_size=32, state_size=4,
    num_hidden_layers=2, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
hugging_face("bert", "BertForMaskedLM", **ENCODER)
hugging_face("bert autocast", "BertForMaskedLM", around=autocast, **ENCODER)
hugging_face("roberta", "RobertaForMaskedLM", **ENCODER)
hugging_face("albert", "AlbertForMaskedLM", embedding_size=16, **ENCODER)
hugging_face(
    "distilbert", "DistilBertForMaskedLM", vocab_size=VOCAB, dim=32, hidden_dim=64, n_layers=2,
    n_heads=4, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
hugging_face("electra", "ElectraForMaskedLM", embedding_size=16, **ENCODER)
hugging_face(
    "deberta-v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"],
    **ENCODER,
)  # fmt: skip
hugging_face(
    "modernbert", "ModernBertForMaskedLM", local_attention=8, bos_token_id=1, eos_token_id=2,
    cls_token_id=1, sep_token_id=2, **ENCODER,
)  # fmt: skip
hugging_face(
    "t5", "T5ForConditionalGeneration", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64,
    num_layers=2, num_heads=4, use_cache=False, pad_token_id=0, decoder_start_token_id=0,
)  # fmt: skip
hugging_face(
    "bart", "BartForConditionalGeneration", vocab_size=VOCAB, d_model=32, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
    decoder_ffn_dim=64, max_position_embeddings=64, use_cache=False, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
PICTURE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
hugging_face(
    "vit", "ViTForImageClassification", labelled_images, hidden_dropout_prob=0.1, **PICTURE
)
hugging_face("dinov2", "Dinov2ForImageClassification", labelled_images, **PICTURE)
hugging_face("beit", "BeitForImageClassification", labelled_images, **PICTURE)
hugging_face(
    "swin", "SwinForImageClassification", labelled_images, image_size=32, patch_size=4,
    embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4,
)  # fmt: skip
hugging_face(
    "convnext", "ConvNextForImageClassification", labelled_images, hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1], drop_path_rate=0.1,
)  # fmt: skip


def speech() -> dict[str, Any]:
    features = torch.randn(2, 16, 32)
    return {"input_features": features, "labels": torch.randint(3, VOCAB, (2, 8))}


hugging_face(
    "whisper", "WhisperForConditionalGeneration", speech, vocab_size=VOCAB, d_model=32,
    num_mel_bins=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=16,
    max_target_positions=32, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, dropout=0.1,
)  # fmt: skip


@entry("clip")
def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    text = {k: v for k, v in ENCODER.items() if k != "pad_token_id"}
    config = CLIPConfig(text_config=text, vision_config=PICTURE, projection_dim=16)
    ids = torch.randint(3, VOCAB, (2, 8))
    return Case(CLIPModel(config), (), {"input_ids": ids, **images(), "return_loss": True})


@entry("llama with LoRA")
def lora() -> Case:
    from peft import LoraConfig, get_peft_model

    case = ZOO["llama sdpa"]()
    targets = ["q_proj", "v_proj"]
    case.model = get_peft_model(
        case.model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.1)
    )
    return case


# --------------------------------------------------------------------------- torchvision


def torchvision_model(name: str, size: int = 32, **values: Any) -> None:
    def make() -> Case:
        import torchvision

        made = getattr(torchvision.models, name)(num_classes=8, **values)
        return Case(made, (torch.randn(4, 3, size, size),))

    ZOO[f"torchvision {name}"] = make


torchvision_model("resnet18")
torchvision_model("mobilenet_v3_small", 64)
torchvision_model("efficientnet_b0")
torchvision_model("shufflenet_v2_x0_5")
torchvision_model("squeezenet1_1", 64)
torchvision_model("regnet_y_400mf")


def densenet(name: str, memory_efficient: bool) -> None:
    @entry(name)
    def make() -> Case:
        from torchvision.models.densenet import DenseNet

        made = DenseNet(8, (2, 2), 16, num_classes=8, memory_efficient=memory_efficient)
        return Case(made, (torch.randn(4, 3, 32, 32),))


densenet("torchvision densenet", False)
densenet("torchvision densenet checkpointed", True)


@entry("torchvision swin v2")
def swin_v2() -> Case:
    from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlockV2

    made = SwinTransformer(
        [4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=8, block=SwinTransformerBlockV2,
        stochastic_depth_prob=0.1,
    )  # fmt: skip
    return Case(made, (torch.randn(2, 3, 32, 32),))


@entry("torchvision lraspp")
def lraspp() -> Case:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    made = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    return Case(made, (torch.randn(2, 3, 64, 64),))


# --------------------------------------------------------------------------- timm


def timm_model(name: str, size: int = 32, **values: Any) -> None:
    def make() -> Case:
        import timm

        made = timm.create_model(name, num_classes=8, **values)
        return Case(made, (torch.randn(2, 3, size, size),))

    ZOO[f"timm {name}"] = make


VIT = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8}
timm_model("vit_tiny_patch16_224", drop_rate=0.1, drop_path_rate=0.1, **VIT)
timm_model("eva02_tiny_patch14_224", 28, embed_dim=32, depth=2, num_heads=4, img_size=28)
timm_model("mixer_s32_224", 64, img_size=64)
timm_model("resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32))
timm_model("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32))
timm_model("efficientvit_b0", 64)
timm_model("pvt_v2_b0", depths=(1, 1, 1, 1))


# --------------------------------------------------------------------------- diffusers


@entry("diffusers unet")
def unet() -> Case:
    from diffusers import UNet2DModel

    made = UNet2DModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        attention_head_dim=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), dropout=0.1,
    )  # fmt: skip
    return Case(made, (torch.randn(2, 3, 16, 16, requires_grad=True), torch.tensor([1, 5])))


@entry("diffusers unet with conditions")
def conditioned_unet() -> Case:
    from diffusers import UNet2DConditionModel

    made = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        attention_head_dim=4, cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return Case(made, (torch.randn(2, 4, 8, 8), torch.tensor([1, 5]), torch.randn(2, 4, 16)))


@entry("diffusers autoencoder")
def autoencoder() -> Case:
    from diffusers import AutoencoderKL

    made = AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return Case(made, (torch.randn(2, 3, 16, 16),))


@entry("diffusers dit")
def dit() -> Case:
    from diffusers import DiTTransformer2DModel

    made = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8,
        patch_size=2, norm_num_groups=4, num_embeds_ada_norm=10, dropout=0.1,
    )  # fmt: skip
    inputs = {"timestep": torch.tensor([1, 5]), "class_labels": torch.tensor([0, 1])}
    return Case(made, (torch.randn(2, 4, 8, 8),), inputs)


@entry("diffusers flux")
def flux() -> Case:
    from diffusers import FluxTransformer2DModel

    made = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([0.1, 0.5]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(6, 3),
    }
    return Case(made, (), inputs)


# --------------------------------------------------------------------------- torch


class Recurrent(nn.Module):
    """A language model as PyTorch's word_language_model example has it."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.recurrent = kind(16, 16, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embed(ids))
        return self.head(hidden)


@entry("torch.nn LSTM")
def lstm() -> Case:
    return Case(Recurrent(nn.LSTM), (torch.randint(0, VOCAB, (2, 8)),))


@entry("torch.nn GRU")
def gru() -> Case:
    return Case(Recurrent(nn.GRU), (torch.randint(0, VOCAB, (2, 8)),))


@entry("torch.nn Transformer")
def transformer() -> Case:
    made = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)
    return Case(made, (torch.randn(2, 8, 32), torch.randn(2, 6, 32)))
