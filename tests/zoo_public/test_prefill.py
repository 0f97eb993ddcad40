"""Prefill of public language models in slices, with a cache of keys and values."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched

import torch

from overlapc import optimize
from overlapc.state.objects import inside
from tests.vision_ops import declare

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOW, HEADS, EXPERTS = {"sliding_window": 4}, {"head_dim": 8}, {"num_experts_per_tok": 2}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", SMALL),
    "Mistral": ("MistralConfig", SMALL | WINDOW),
    "Qwen2": ("Qwen2Config", SMALL),
    "Qwen3": ("Qwen3Config", SMALL | HEADS),
    "Gemma": ("GemmaConfig", SMALL | HEADS),
    "Gemma2": ("Gemma2Config", SMALL | HEADS | WINDOW),
    "Gemma3": ("Gemma3TextConfig", SMALL | HEADS | WINDOW),
    "Mixtral": ("MixtralConfig", SMALL | EXPERTS | {"num_local_experts": 4}),
    "Qwen3Moe": (
        "Qwen3MoeConfig",
        SMALL | HEADS | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16},
    ),
    "GPT2": ("GPT2Config", GPT2),
}


def model_of(name: str) -> Any:
    declare()
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[zoo]'")
    config, arguments = MODELS[name]
    kind = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**arguments)).eval()


def tensors(results: Any) -> dict[str, torch.Tensor]:
    return {n: x for n, x in inside("", results).items() if isinstance(x, torch.Tensor) and x.dim()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("slices", [2, 4])
def test_a_cache_is_put_together(name: str, slices: int) -> None:
    torch._dynamo.reset()
    model = model_of(name)
    twin = optimize(model, slices=slices, profile="estimate")
    with torch.no_grad():
        for i in range(2):
            x = (torch.arange(8 * 12).reshape(8, 12) * 7 + i) % 96
            found = twin(input_ids=x, use_cache=True)
            whole = model(input_ids=x, use_cache=True)
            each = [tensors(model(input_ids=part, use_cache=True)) for part in x.chunk(slices)]
            mine, others = tensors(found), tensors(whole)
            assert mine.keys() == others.keys()
            assert len(mine) >= 5  # logits, and keys and values of two layers
            for path, tensor in mine.items():
                assert torch.equal(tensor, torch.cat([part[path] for part in each])), path
                torch.testing.assert_close(tensor, others[path], rtol=1e-4, atol=1e-4)
            caches = found.past_key_values, whole.past_key_values
            following = [model(x[:, :1], past_key_values=cache).logits for cache in caches]
            torch.testing.assert_close(*following, rtol=1e-4, atol=1e-4)
    assert twin.fallbacks == []
    (report,) = twin.graphs
    assert report.slices == slices


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT2"])
def test_generate_runs_its_prefill_in_slices(name: str) -> None:
    torch._dynamo.reset()
    model = model_of(name)
    twin = optimize(model, slices=2, profile="estimate")
    prompts = torch.arange(1, 49).reshape(4, 12)
    given = {
        "attention_mask": torch.ones_like(prompts),
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with pytest.warns(RuntimeWarning, match="an argument is a DynamicCache that holds tensors"):
        found = twin.generate(prompts, **given)
    assert torch.equal(found, model.generate(prompts, **given))
    (report,) = twin.graphs
    assert report.name == "graph 0 in 2 slices, its forward alone"
