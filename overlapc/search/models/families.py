"""What the code of model families does that their `config.json` does not say, by `model_type`."""

from __future__ import annotations

from typing import Any

# activations that are a gate's, in every family
GATED = ("silu", "swish", "swiglu", "geglu")
NOT_GATED = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "quick_gelu"),
    *("gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear"),
    *("mish", "prelu", "relu", "relu2", "relu6", "sigmoid", "sqrtsoftplus", "tanh", "xielu"),
    *("squared_relu", "identity"),
)
# families that are gated, whatever their activation is called, or if their file does not name it
GATED_TYPES = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "chatglm", "llama", "llama4_text"),
    *("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "phimoe", "olmo"),
    *("olmo2", "olmoe", "stablelm", "cohere", "cohere2", "glm", "glm4", "glm4_moe", "granite"),
    *("granitemoe", "smollm3", "deepseek_v2", "deepseek_v3", "internlm2", "seed_oss", "exaone4"),
    *("ernie4_5", "ernie4_5_moe", "bitnet", "vaultgemma", "modernbert-decoder", "aria_text"),
    *("axk1", "cohere2_moe", "cwm", "diffllama", "emu3", "exaone_moe", "flex_olmo", "flint"),
    *("glm4_moe_lite", "granite_swa", "granitemoe_swa", "granitemoeshared", "helium", "hy_v3"),
    *("hyperclovax", "internlm3", "iquestcoder", "kolibri1", "llama4", "mellum", "minicpm3"),
    *("minimax_m2", "ministral3", "olmo3", "solar_open", "youtu"),
)
TIED_TYPES = (
    *("gpt2", "gemma", "gemma2", "gemma3", "gemma3_text", "bloom", "opt", "cohere", "cohere2"),
    *("falcon", "gpt_bigcode", "gpt_neo", "starcoder2", "smollm3", "ernie4_5", "ernie4_5_moe"),
    *("biogpt", "cohere2_moe", "gpt-sw3", "gpt_neox_japanese", "granite_swa", "lfm2", "minicpm3"),
    *("mpt", "openai-gpt", "vaultgemma", "youtu"),
)
# families whose tokens see those behind them: no decoders
ENCODERS = (
    *("bert", "bert-generation", "roberta", "roberta-prelayernorm", "xlm-roberta", "camembert"),
    *("xlm-roberta-xl", "distilbert", "electra", "deberta-v2", "modernbert", "megatron-bert"),
    *("ernie", "rembert", "roc_bert", "roformer", "big_bird", "data2vec-text", "xmod", "albert"),
)
# families whose layers have parts that no field names
REFUSED = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "state spaces in the place of attention"),
    **dict.fromkeys(
        ("jamba", "zamba", "zamba2", "bamba", "nemotron_h", "falcon_h1", "granitemoehybrid"),
        "state spaces beside attention",
    ),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "longt5", "switch_transformers", "bart", "mbart", "pegasus", "led"),
        "an encoder before its decoder",
    ),
    **dict.fromkeys(
        ("marian", "m2m_100", "whisper", "speech_to_text", "nllb-moe", "t5gemma", "blenderbot"),
        "an encoder before its decoder",
    ),
    **dict.fromkeys(
        ("clip", "siglip", "vit", "clip_vision_model"), "pictures in the place of words"
    ),
    **dict.fromkeys(("rwkv", "xlstm"), "a recurrence in the place of attention"),
    "jetmoe": "experts in its attention",
    "ctrl": "a feed-forward part of its own",
    "afmoe": "a gate of its attention",
    "doge": "a mask and residuals that it learns",
    "moshi": "a decoder of its own for each step",
}
# kinds of a layer's attention that are planned, as `layer_types` names them
ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
POST_NORMS = ("gemma2", "gemma3", "gemma3_text", "glm4")
QKV_BIASES = ("qwen2", "qwen2_moe", "chatglm")
# families that learn a table of positions, and how many rows it has beside the sequence's
POSITIONS = {
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo", "openai-gpt"), 0),
    **dict.fromkeys(("opt", "biogpt"), 2),
}
# families whose routers have a bias of each expert
ROUTER_BIASES = ("glm4_moe", "ernie4_5_moe", "hy_v3")
# Defaults of the families' code, for fields that a file leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "falcon": {"max_position_embeddings": 2048},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "llama4_text": {"num_local_experts": 16, "num_experts_per_tok": 1},
}
# families whose number of parameters was compared with that of their code
COMPARED = (
    *("apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "bloom", "codegen"),
    *("cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "diffllama"),
    *("emu3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo"),
    *("flint", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
    *("gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoeshared", "helium", "hy_v3", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "kolibri1", "lfm2", "llama", "llama4", "llama4_text", "mellum"),
    *("minicpm3", "minimax_m2", "ministral3", "mistral", "mixtral", "mpt", "nanochat", "olmo"),
    *("olmo2", "olmo3", "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open"),
    *("stablelm", "starcoder2", "vaultgemma", "youtu"),
)
