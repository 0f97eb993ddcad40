"""Models by name: `PRESETS`, and `find_model` for a preset, a HuggingFace `config.json` or a
model of the user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from overlapc.core.errors import OptionError, did_you_mean
from overlapc.search.models.configs import from_config
from overlapc.search.models.transformer import Model, Transformer

# How names begin and end that people use for a preset, and other names of one.
_FIRST = {
    "meta-llama-3.1-": "llama-3-",
    "meta-llama-3-": "llama-3-",
    "llama-3.1-": "llama-3-",
    "llama-3.3-": "llama-3-",
    "llama3.1-": "llama-3-",
    "llama3.3-": "llama-3-",
    "llama3-": "llama-3-",
    "llama-2-": "llama-",
    "llama2-": "llama-",
    "qwen-3-": "qwen3-",
    "gptoss-": "gpt-oss-",
}
_LAST = ("-hf", "-instruct", "-chat", "-base", "-it")
_OTHERS = {
    "mixtral": "mixtral-8x7b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "deepseek-r1": "deepseek-v3",
    "deepseekv3": "deepseek-v3",
    "gpt3": "gpt-175b",
    "gpt-3": "gpt-175b",
}


def _gpt(name: str, layers: int, width: int, heads: int, source: str) -> Transformer:
    return Transformer(name, layers, width, heads, 4 * width, 51200, 2048, source=source)


def _llama(name: str, layers: int, width: int, heads: int, ffn: int, **more: Any) -> Transformer:
    source = more.pop("source", "Llama 2's config.json")
    more = {"vocab": 32000, "seq": 4096, "gated": True} | more
    return Transformer(name, layers, width, heads, ffn, source=source, **more)


def _qwen3(name: str, layers: int, width: int, heads: int, ffn: int, **more: Any) -> Transformer:
    more = {"vocab": 151936, "seq": 8192, "head_width": 128, "head_norms": True} | more
    return _llama(name, layers, width, heads, ffn, source="Qwen3's config.json", **more)


def _deepseek(name: str, layers: int, heads: int, ffn: int, **more: Any) -> Transformer:
    latent = {"head_width": 128, "kv_rank": 512, "rope_width": 64, "value_width": 128}
    return _llama(name, layers, more.pop("width", 7168), heads, ffn, seq=8192, **latent, **more)


def _gpt_oss(name: str, layers: int, experts: int) -> Transformer:
    return _llama(
        name, layers, 2880, 64, 2880, vocab=201088, seq=8192, kv_heads=8, head_width=64,
        experts=experts, top_k=4, expert_width=2880,
        layer_extra=(64 + 2 * 8) * 64 + 64 + 2880,  # biases of queries, keys, values; sinks; a bias
        expert_extra=experts * (1 + 2 * 2880 + 2880),
        source="gpt-oss's config.json; its windows of 128 tokens are planned as whole sequences",
    )  # fmt: skip


_LYNX = "shape as Lynx (2024) gives or implies it; vocabulary padded as Megatron does"
_MEGATRON = "Narayanan et al. 2021; vocabulary padded as Megatron does"
_LANCET = "shape as Lancet (2024) gives or implies it; 16 ranks of two experts"
_LLAMA_3: dict[str, Any] = {"vocab": 128256, "seq": 8192, "source": "Llama 3's config.json"}

PRESETS = {
    model.name: model
    for model in (
        _gpt("gpt-1.3b", 24, 2048, 16, _LYNX),
        _gpt("gpt-4.7b", 40, 3072, 24, _LYNX),
        _gpt("gpt-7b", 32, 4096, 32, _LYNX),
        _gpt("gpt-13b", 40, 5120, 40, _LYNX),
        _gpt("gpt-20b", 44, 6144, 48, _LYNX),
        _gpt("gpt-23b", 50, 6144, 48, _LYNX),
        _gpt("gpt-175b", 96, 12288, 96, _MEGATRON),
        _llama("llama-7b", 32, 4096, 32, 11008),
        _llama("llama-13b", 40, 5120, 40, 13824),
        _llama("llama-70b", 80, 8192, 64, 28672, kv_heads=8),
        _llama(
            "mixtral-8x7b", 32, 4096, 32, 14336, kv_heads=8, experts=8, top_k=2,
            expert_width=14336, source="Mixtral 8x7B's config.json",
        ),
        _llama("llama-3-8b", 32, 4096, 32, 14336, kv_heads=8, **_LLAMA_3),
        _llama("llama-3-70b", 80, 8192, 64, 28672, kv_heads=8, **_LLAMA_3),
        _llama("llama-3-405b", 126, 16384, 128, 53248, kv_heads=8, **_LLAMA_3),
        _llama(
            "mixtral-8x22b", 56, 6144, 48, 16384, vocab=32768, seq=8192, kv_heads=8, experts=8,
            top_k=2, expert_width=16384, source="Mixtral 8x22B's config.json",
        ),
        _qwen3("qwen3-8b", 36, 4096, 32, 12288, kv_heads=8, head_width=0),
        _qwen3("qwen3-32b", 64, 5120, 64, 25600, kv_heads=8),
        _qwen3(
            "qwen3-30b-a3b", 48, 2048, 32, 6144, kv_heads=4, experts=128, top_k=8, expert_width=768,
        ),
        _qwen3(
            "qwen3-235b-a22b", 94, 4096, 64, 12288, kv_heads=4, experts=128, top_k=8,
            expert_width=1536,
        ),
        _deepseek(
            "deepseek-v2-lite", 27, 16, 10944, width=2048, vocab=102400, experts=64, top_k=6,
            expert_width=1408, dense_first=1, shared_width=2 * 1408,
            source="DeepSeek-V2-Lite's config.json",
        ),
        _deepseek(
            "deepseek-v3", 61, 128, 18432, vocab=129280, q_rank=1536, experts=256, top_k=8,
            expert_width=2048, dense_first=3, shared_width=2048, expert_extra=256,
            source="DeepSeek-V3's config.json; without its heads that predict further tokens",
        ),
        _deepseek(
            "kimi-k2", 61, 64, 18432, vocab=163840, q_rank=1536, experts=384, top_k=8,
            expert_width=2048, dense_first=1, shared_width=2048, expert_extra=384,
            source="Kimi K2's config.json",
        ),
        _gpt_oss("gpt-oss-20b", 24, 32),
        _gpt_oss("gpt-oss-120b", 36, 128),
        Transformer(
            "lancet-s", 12, 768, 12, 3072, 50304, 512, experts=32, top_k=1, expert_width=3072,
            moe_every=2, source=_LANCET,
        ),
        Transformer(
            "lancet-l", 24, 1024, 16, 4096, 50304, 512, experts=32, top_k=1, expert_width=4096,
            moe_every=2, source=_LANCET,
        ),
        _llama(
            "deepseek-like", 28, 2048, 16, 10944, vocab=102400, experts=64, top_k=6,
            expert_width=1408, source="DeepSeekMoE 16B's shape without its shared experts",
        ),
    )
}  # fmt: skip


def find_model(name: str, seq: int = 0) -> Model:
    """Find a preset by name, or the model of a HuggingFace `config.json` or "module:function". It
    has sequences of `seq` tokens, if that is not 0."""
    found = _find(name, seq)
    return replace(found, seq=seq) if seq else found


def _find(name: str, seq: int) -> Model:
    if _plain(name) in PRESETS:
        return PRESETS[_plain(name)]
    path = Path(name)
    if name and path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" and ":" in name:
        from overlapc.search.models.own import OwnModel

        return OwnModel.find(name)
    if path.suffix != ".json":
        raise OptionError(_unknown(name))
    return from_config(path, seq)


def _plain(name: str) -> str:
    """The name of a preset as people write it: `Llama3_8B`, `meta-llama-3.1-8b-instruct`."""
    plain = name.lower().replace("_", "-")
    for first, instead in _FIRST.items():
        if plain.startswith(first):
            plain = instead + plain[len(first) :]
            break
    for last in _LAST:
        plain = plain.removesuffix(last)
    return _OTHERS.get(plain, plain)


def _unknown(name: str) -> str:
    """The error of a name that is none of a model."""
    owner, slash, last = name.rpartition("/")
    meant = did_you_mean(_plain(last), PRESETS)
    if slash and owner and "/" not in owner and not owner.startswith("."):
        return (
            f"model {name!r}: found no such folder, and names of the HuggingFace hub are not "
            "looked up; expected the path of its config.json, which is a file of that repository, "
            f"or a preset (`overlapc presets models` lists them){meant}"
        )
    return (
        f"model {name!r}: expected a preset ({', '.join(PRESETS)}), a config.json, or "
        f"module:function of your own{meant}"
    )
