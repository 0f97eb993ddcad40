"""Models that people train are read from their `config.json`, parameter by parameter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlapc.core.errors import FileError, OptionError
from overlapc.search.layouts import Layout
from overlapc.search.models.configs import from_config
from overlapc.search.presets import find_model
from overlapc.search.weights import stage_parameters


def llama(layers: int, width: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any) -> Any:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    } | more


def deepseek(layers: int, width: int, heads: int, ffn: int, vocab: int, **more: Any) -> Any:
    latent = {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_layer_freq": 1,
    }
    return llama(layers, width, heads, heads, ffn, vocab, **latent) | more


def gemma3(width: int, ffn: int, layers: int, **more: Any) -> Any:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    return {"model_type": "gemma3", "text_config": text | more}


QWEN_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
V3 = {
    "q_lora_rank": 1536,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}
# name -> (config.json, parameters as its checkpoint has them, without heads for further tokens)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-8B": (
        llama(36, 4096, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128),
        8_190_735_360,
    ),
    "Qwen3-0.6B": (
        llama(
            28, 1024, 16, 8, 3072, 151936, model_type="qwen3", head_dim=128,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
    "Qwen3-30B-A3B": (
        llama(48, 2048, 32, 4, 6144, 151936, moe_intermediate_size=768) | QWEN_MOE,
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        llama(94, 4096, 64, 4, 12288, 151936, moe_intermediate_size=1536) | QWEN_MOE,
        235_093_634_560,
    ),
    "Qwen2.5-7B": (
        llama(28, 3584, 28, 4, 18944, 152064, model_type="qwen2"),
        7_615_616_512,
    ),
    "Llama-3.1-8B": (llama(32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
    "Llama-3.1-405B": (llama(126, 16384, 128, 8, 53248, 128256), 405_853_388_800),
    "Llama-3.2-1B": (
        llama(16, 2048, 32, 8, 8192, 128256, tie_word_embeddings=True, head_dim=64),
        1_235_814_400,
    ),
    "Mistral-7B": (
        llama(32, 4096, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096),
        7_241_732_096,
    ),
    "Mistral-Nemo": (
        llama(40, 5120, 32, 8, 14336, 131072, model_type="mistral", head_dim=128),
        12_247_782_400,
    ),
    "Phi-4": (llama(40, 5120, 40, 10, 17920, 100352, model_type="phi3"), 14_659_507_200),
    "gemma-2-9b": (
        llama(
            42, 3584, 16, 8, 14336, 256000, model_type="gemma2", head_dim=256,
            hidden_act="gelu_pytorch_tanh", sliding_window=4096, tie_word_embeddings=True,
        ),
        9_241_705_984,
    ),
    "gemma-3-1b": (
        llama(
            26, 1152, 4, 1, 6912, 262144, model_type="gemma3_text", head_dim=256,
            hidden_activation="gelu_pytorch_tanh", sliding_window=512, tie_word_embeddings=True,
        ),
        999_885_952,
    ),
    "DeepSeek-V2-Lite": (
        deepseek(
            27, 2048, 16, 10944, 102400, moe_intermediate_size=1408, n_routed_experts=64,
            num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=None,
            model_type="deepseek_v2",
        ),
        15_706_484_224,
    ),
    "DeepSeek-V2": (
        deepseek(
            60, 5120, 128, 12288, 102400, moe_intermediate_size=1536, n_routed_experts=160,
            num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=1536,
            model_type="deepseek_v2",
        ),
        235_741_434_880,
    ),
    "DeepSeek-V3": (
        deepseek(61, 7168, 128, 18432, 129280, n_routed_experts=256, first_k_dense_replace=3) | V3,
        671_026_419_200,
    ),
    "Kimi-K2": (
        deepseek(61, 7168, 64, 18432, 163840, n_routed_experts=384, first_k_dense_replace=1) | V3,
        1_026_408_232_448,
    ),
    "gpt-oss-20b": (
        llama(
            24, 2880, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, attention_bias=True,
            num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        ),
        20_914_757_184,
    ),
    "gpt-oss-120b": (
        llama(
            36, 2880, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, attention_bias=True,
            num_local_experts=128, num_experts_per_tok=4, sliding_window=128,
        ),
        116_829_156_672,
    ),
    "GLM-4.5-Air": (
        llama(
            46, 4096, 96, 8, 10944, 151552, model_type="glm4_moe", head_dim=128,
            attention_bias=True, use_qk_norm=False, n_routed_experts=128, num_experts_per_tok=8,
            n_shared_experts=1,
            moe_intermediate_size=1408, first_k_dense_replace=1, num_nextn_predict_layers=1,
        ),
        106_852_245_504,
    ),
    "Llama-4-Scout": (
        {
            "model_type": "llama4",
            "text_config": llama(
                48, 5120, 40, 8, 8192, 202048, model_type="llama4_text", head_dim=128,
                intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1,
                interleave_moe_layer_step=1, use_qk_norm=True,
            ),
        },
        107_769_994_240,
    ),
    "Llama-3.3-70B": (llama(80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
    "Qwen3-32B": (
        llama(64, 5120, 64, 8, 25600, 151936, model_type="qwen3", head_dim=128),
        32_762_123_264,
    ),
    "Mistral-Small-24B": (
        llama(40, 5120, 32, 8, 32768, 131072, model_type="mistral", head_dim=128),
        23_572_403_200,
    ),
    "Mixtral-8x22B": (
        llama(
            56, 6144, 48, 8, 16384, 32768, model_type="mixtral", num_local_experts=8,
            num_experts_per_tok=2, sliding_window=None,
        ),
        140_630_071_296,
    ),
    "Phi-4-mini": (
        llama(32, 3072, 24, 8, 8192, 200064, model_type="phi3", tie_word_embeddings=True),
        3_836_021_760,
    ),
    "Phi-3.5-MoE": (
        llama(
            32, 4096, 32, 8, 6400, 32064, model_type="phimoe", num_local_experts=16,
            num_experts_per_tok=2, attention_bias=True, lm_head_bias=True,
        ),
        41_873_153_344,
    ),
    "gemma-2-27b": (
        llama(
            46, 4608, 32, 16, 36864, 256000, model_type="gemma2", head_dim=128,
            hidden_act="gelu_pytorch_tanh", sliding_window=4096, tie_word_embeddings=True,
        ),
        27_227_128_320,
    ),
    "GLM-4-9B-0414": (
        llama(40, 4096, 32, 2, 13696, 151552, model_type="glm4", head_dim=128, attention_bias=True),
        9_400_279_040,
    ),
    # Of models that see, too: the checkpoint without its 871,932,416 (Llama 4) or 416,866,032
    # (Gemma 3) parameters of vision, and those that bring pictures to the model's width. Gemma's
    # files leave out what is as its code has it.
    "Llama-4-Maverick": (
        {
            "model_type": "llama4",
            "text_config": llama(
                48, 5120, 40, 8, 8192, 202048, model_type="llama4_text", head_dim=128,
                intermediate_size_mlp=16384, num_local_experts=128, num_experts_per_tok=1,
                interleave_moe_layer_step=2, use_qk_norm=False, attention_chunk_size=8192,
            ),
        },
        401_583_781_376 - 871_932_416,
    ),
    "gemma-3-4b": (gemma3(2560, 10240, 34), 4_300_079_472 - 416_866_032 - 1152 * 2561),
    "gemma-3-12b": (
        gemma3(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8),
        12_187_325_040 - 416_866_032 - 1152 * 3841,
    ),
    "gemma-3-27b": (
        gemma3(5376, 21504, 62, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
        27_432_406_640 - 416_866_032 - 1152 * 5377,
    ),
}  # fmt: skip


def read(folder: Path, config: dict[str, Any]) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return from_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name: str, tmp_path: Path) -> None:
    config, parameters = PUBLISHED[name]
    model = read(tmp_path, config)
    assert model.parameters() == pytest.approx(parameters, rel=1e-3)
    for pp in (1, 4):
        over_stages = sum(map(sum, stage_parameters(model, Layout(1, pp, 1, 1))))
        tied_twice = model.vocab * model.width * (model.tied and pp > 1)
        assert over_stages == model.parameters() + tied_twice


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("llama-3-8b", "Llama-3.1-8B"),
        ("llama-3-70b", "Llama-3.3-70B"),
        ("llama-3-405b", "Llama-3.1-405B"),
        ("mixtral-8x22b", "Mixtral-8x22B"),
        ("qwen3-8b", "Qwen3-8B"),
        ("qwen3-32b", "Qwen3-32B"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
        ("qwen3-235b-a22b", "Qwen3-235B-A22B"),
        ("deepseek-v2-lite", "DeepSeek-V2-Lite"),
        ("deepseek-v3", "DeepSeek-V3"),
        ("kimi-k2", "Kimi-K2"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_a_preset_is_what_its_config_says(preset: str, published: str, tmp_path: Path) -> None:
    model = read(tmp_path, PUBLISHED[published][0])
    found = find_model(preset)
    assert found.source
    assert replace(model, name=found.name, source=found.source) == found


@pytest.mark.parametrize(
    "change",
    [{"mlp_only_layers": [3]}, {"index_topk": 2048}, {"ssm_state_size": 16}, {"moe_layer_freq": 2}],
)
def test_what_has_no_counterpart_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    config, _ = PUBLISHED["Qwen3-30B-A3B"]
    with pytest.raises(FileError, match=f"{next(iter(change))} is .* has no model of"):
        read(tmp_path, config | change)


def test_first_layers_without_experts(tmp_path: Path) -> None:
    config, _ = PUBLISHED["Qwen3-30B-A3B"]
    all_alike = read(tmp_path, config)
    model = read(tmp_path, config | {"mlp_only_layers": [0, 1]})
    assert (all_alike.dense_first, model.dense_first) == (0, 2)
    moe = model.experts * model.mlp_parameters(model.expert_width) + model.gate_parameters
    assert all_alike.parameters() - model.parameters() == 2 * (
        moe - model.mlp_parameters(model.ffn)
    )
    first = model.of_first
    assert first is not None
    assert (first.layers, first.experts) == (2, 0)
    assert "first layers" not in read(tmp_path, PUBLISHED["DeepSeek-V3"][0]).source


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    assert "windows of 128 tokens" in read(tmp_path, PUBLISHED["gpt-oss-20b"][0]).source
    assert "further tokens" in read(tmp_path, PUBLISHED["DeepSeek-V3"][0]).source
    assert "text model alone" in read(tmp_path, PUBLISHED["Llama-4-Scout"][0]).source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a number from 1 on"),
        (
            {"num_experts_of_layers": 64},
            "num_experts_of_layers is 64, which the search does not read",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has 'linear_att"),
        ({"model_type": "bert"}, "model_type is 'bert'; expected a decoder"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or fal"),
        ({"attention_bias": 1}, "attention_bias is 1, expected true or false"),
        (
            {"num_key_value_heads": [4] * 99},
            r"is \[4, 4, .{1,40}, expected a whole number below 2\^40$",
        ),
        ({"text_config": []}, "text_config is a list, expected a JSON object"),
        ({"n_routed_experts": 8, "first_k_dense_replace": 4}, "of 4 layers none has one of its 8"),
        ({"num_experts": 8, "decoder_sparse_step": 5}, "and one in 5 of the others with them"),
        ({"block_types": ["recurrent", "attention"]}, "block_types is .* has no model of"),
        ({"block_configs": [{}]}, "block_configs is .* has no model of"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config is .* has no model of"),
        ({"attn_type_list": [0, 1]}, "attn_type_list has layers of another attention"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected a number from 1 on"),
        ({"num_key_value_heads": None, "num_kv_heads": 0}, "num_kv_heads is 0, expected a number"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"layer_types": []}, "layer_types has 0 entries for 4 layers, expected one for each"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\], expected a text"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\], expected a text"),
        ({"model_type": 5}, "model_type is 5, expected a text"),
        ({"model_type": "mamba2"}, "'mamba2', which has state spaces in the place of attention"),
        ({"model_type": "mamba2", "state_size": 128}, "'mamba2', which has state spaces"),
        ({"model_type": "t5"}, "'t5', which has an encoder before its decoder"),
        ({"model_type": "jamba"}, "'jamba', which has state spaces beside attention"),
        ({"model_type": "xlstm"}, "'xlstm', which has a recurrence in the place of attention"),
        ({"state_size": 16}, "state_size is 16, which the search has no model of"),
        ({"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg is .* has no model of"),
        (
            {"num_experts": 4, "mlp_only_layers": 3},
            "mlp_only_layers is 3, .* no model of; expected",
        ),
        (
            {"num_experts": 4, "mlp_only_layers": 0},
            "mlp_only_layers is 0, .* no model of; expected",
        ),
        ({"num_experts": 4, "mlp_only_layers": {"0": 1}}, "mlp_only_layers is {'0': 1}, "),
        ({"num_experts": 4, "mlp_layer_types": [{}]}, "mlp_layer_types has other kinds"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776, expected a whole number below"),
        ({"head_dim": 0}, "head_dim is 0, expected a number from 1 on"),
        ({"hidden_act": "silu2"}, "the activation is 'silu2', expected one of silu, swish"),
        (
            {"max_position_embeddings": None},
            "no max_position_embeddings .* the model's length of sequences; say it with --seq",
        ),
    ],
)
def test_what_would_be_another_model_is_an_error(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match=message):
        read(tmp_path, llama(4, 256, 4, 4, 512, 1024) | change)


def test_a_wrong_width_of_heads_makes_no_model(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="parameters, expected 1,000,000,000,000,000 at most"):
        read(tmp_path, llama(32, 4096, 32, 8, 14336, 128256, head_dim=1 << 30))


@pytest.mark.parametrize("act", [None, "relu", "gelu"])
def test_a_family_has_its_gate_whatever_its_activation(act: str | None, tmp_path: Path) -> None:
    """ReluLLaMA and files that leave the activation out have as many parameters as Llama."""
    config = llama(32, 4096, 32, 8, 14336, 128256)
    assert read(tmp_path, config | {"hidden_act": act}).gated
    del config["hidden_act"]
    assert read(tmp_path, config).parameters() == pytest.approx(8_030_261_248, rel=1e-3)


def test_of_an_unknown_family_without_an_activation_the_gate_is_a_named_guess(
    tmp_path: Path,
) -> None:
    """It was counted without one, silently: 159 of 235 billion parameters."""
    config, parameters = PUBLISHED["Qwen3-235B-A22B"]
    unknown = {**config, "model_type": "qwen9", "use_qk_norm": True}
    del unknown["hidden_act"]
    model = read(tmp_path, unknown)
    assert model.gated
    assert model.parameters() == pytest.approx(parameters, rel=1e-3)
    assert "guessed: its MLP has a gate (SwiGLU)" in model.source
    plain = read(tmp_path, unknown | {"hidden_act": "gelu"})
    assert not plain.gated
    assert "guessed" not in plain.source
    assert "guessed" not in read(tmp_path, unknown | {"hidden_act": "silu"}).source


def test_falcons_one_key_is_one_whatever_its_file_counts(tmp_path: Path) -> None:
    config = llama(32, 4544, 71, 71, 18176, 65024, model_type="falcon", multi_query=True)
    config |= {"hidden_act": "gelu", "tie_word_embeddings": True}
    assert read(tmp_path, config).parameters() == pytest.approx(6_921_720_704, rel=1e-3)
    assert read(tmp_path, config | {"new_decoder_architecture": True}).kv_heads == 71


def falcon(layers: int, width: int, heads: int, **more: Any) -> dict[str, Any]:
    """As Falcon's files on the Hub are: without a length of sequences, and much else."""
    return {
        "model_type": "falcon",
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "multi_query": True,
        "new_decoder_architecture": False,
        "vocab_size": 65024,
    } | more


def test_falcons_files_name_no_length_of_sequences(tmp_path: Path) -> None:
    small = read(tmp_path, falcon(32, 4544, 71))
    large = read(tmp_path, falcon(60, 8192, 128, new_decoder_architecture=True, num_kv_heads=8))
    assert (small.seq, large.seq) == (2048, 2048)
    assert small.parameters() == pytest.approx(6_921_720_704, rel=1e-3)
    assert large.parameters() == pytest.approx(41_303_293_952, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_length_that_the_file_leaves_out_may_be_said(name: str, tmp_path: Path) -> None:
    config = llama(4, 256, 4, 4, 512, 1024, model_type=name)
    del config["max_position_embeddings"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = find_model(str(path), seq=512)
    assert model == read(tmp_path, config | {"max_position_embeddings": 512})
    assert (model.seq, model.positions) == (512, 512 * (name == "gpt2"))
    path.write_text(json.dumps(config | {"n_positions": 1024}))
    model = find_model(str(path), seq=512)
    assert (model.seq, model.positions) == (512, 1024 * (name == "gpt2"))


def test_no_model_is_not_the_file_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(tmp_path, llama(4, 256, 4, 4, 512, 1024))
    monkeypatch.chdir(tmp_path)
    assert find_model(".").layers == 4
    with pytest.raises(OptionError, match="model '': expected a preset"):
        find_model("")


def test_a_family_that_shares_its_table_of_words_need_not_say_so(tmp_path: Path) -> None:
    """Command R, whose file leaves it out, has 35B parameters, not 37B."""
    config = llama(40, 8192, 64, 64, 22528, 256000, model_type="cohere")
    del config["tie_word_embeddings"]
    assert read(tmp_path, config).parameters() == pytest.approx(34_980_831_232, rel=1e-3)


def test_mpt_and_bloom_as_their_files_spell_them(tmp_path: Path) -> None:
    """MPT-7B ties its table of words and does not say so; BLOOM's width is `n_embed`."""
    mpt = {
        "model_type": "mpt",
        "d_model": 4096,
        "n_heads": 32,
        "n_layers": 32,
        "expansion_ratio": 4,
    }
    mpt |= {"max_seq_len": 2048, "vocab_size": 50432, "no_bias": True}
    assert read(tmp_path, mpt).parameters() == pytest.approx(6_649_286_656, rel=1e-3)
    bloom = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16}
    assert read(tmp_path, bloom | {"vocab_size": 250880, "seq_length": 2048}).width == 1024


def test_experts_are_gated_in_a_family_whose_file_names_no_activation(tmp_path: Path) -> None:
    config = llama(4, 1024, 16, 8, 1536, 32000, model_type="minimax_m2", num_local_experts=8)
    config |= {"num_experts_per_tok": 2}
    del config["hidden_act"]
    assert read(tmp_path, config).gated
    said = read(tmp_path, config | {"num_mtp_modules": 3}).source
    assert "without its heads that predict further tokens" in said
