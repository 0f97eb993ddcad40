"""Names that people use for models, hardware and frameworks; and the hints where one is unknown."""

from __future__ import annotations

import pytest

from overlapc.cli import USAGE, main
from overlapc.profiler.hardware import load_hardware
from overlapc.search.frameworks.known import find_framework
from overlapc.search.presets import PRESETS, find_model


@pytest.mark.parametrize(
    ("called", "preset"),
    [
        ("llama-3-8b", "llama-3-8b"),
        ("Llama-3.1-8B", "llama-3-8b"),
        ("llama3-70b", "llama-3-70b"),
        ("Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("llama3_8b", "llama-3-8b"),
        ("llama-2-7b-hf", "llama-7b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("Qwen3-235B", "qwen3-235b-a22b"),
        ("deepseek-v3", "deepseek-v3"),
        ("deepseek-r1", "deepseek-v3"),
        ("DeepSeek-V3-Base", "deepseek-v3"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("gpt_oss_120b", "gpt-oss-120b"),
        ("Kimi-K2-Instruct", "kimi-k2"),
        ("mixtral", "mixtral-8x7b"),
    ],
)
def test_a_model_has_the_names_that_people_use(called: str, preset: str) -> None:
    assert find_model(called) is PRESETS[preset]


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100-SXM5", "h100-sxm"),
        ("h200", "h200-sxm"),
        ("a100", "a100-sxm-80"),
        ("A100-40GB", "a100-sxm-40"),
        ("nvidia-h100-80gb", "h100-sxm"),
        ("B200", "b200"),
        ("v100", "v100-sxm2-32"),
    ],
)
def test_so_has_hardware(called: str, name: str) -> None:
    assert load_hardware(called) is load_hardware(name)


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("torchtitan", "fsdp"),
        ("fsdp2+hybrid", "fsdp+hybrid"),
        ("Megatron-LM", "megatron"),
        ("megatron-core+fp16", "megatron+fp16"),
        ("nemo", "megatron-overlap"),
    ],
)
def test_so_has_a_framework(called: str, name: str) -> None:
    assert find_framework(called) == find_framework(name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("search lama-3-8b --gpus 8", "did you mean 'llama-3-8b'?"),
        ("search qwen3-30b-a3 --gpus 8", "did you mean 'qwen3-30b-a3b'?"),
        ("search deepseekv4 --gpus 8", "did you mean 'deepseek-v"),
        ("search meta-llama/Llama-3.1-8B --gpus 8", "path of its config.json"),
        ("search meta-llama/Llama-3.1-8B --gpus 8", "did you mean 'llama-3-8b'?"),
        ("search openai/gpt-oss-20b --gpus 8", "did you mean 'gpt-oss-20b'?"),
        ("search somebody/something --gpus 8", "names of the HuggingFace hub are not looked up"),
        ("search gpt-7b --gpus 8 --hardware h100-sxn", "did you mean 'h100-sxm'?"),
        ("search gpt-7b --gpus 8 --hardware a100-sxm-8", "did you mean 'a100-sxm-80'?"),
        ("search gpt-7b --gpus 8 --framework torchtian", "did you mean 'torchtitan'?"),
        ("search gpt-7b --gpus 8 --framework megatrn", "did you mean 'megatron'?"),
        ("search gpt-7b --gpus 8 --framework megatron+bf16-gradient", "mean 'bf16-gradients'?"),
        ("search gpt-7b --gpus 8 --solver megatron-ful", "did you mean 'megatron-full'?"),
        ("search gpt-7b --gpus 8 --compare none,hue", "did you mean 'heu'?"),
        ("search gpt-7b --gpus 8 --memory 10", "found 10 bytes; expected a unit"),
        ("search gpt-7b --gpus 8 --memory 10", '--memory "10GB"'),
        ("search gpt-7b --gpus 8 --framework megatron --schedule zero-bubble", "1f1b or interl"),
    ],
)
def test_what_is_unknown_gets_a_hint(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == USAGE
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_hub_name_that_nothing_is_like_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "somebody/something", "--gpus", "8"]) == USAGE
    assert "did you mean" not in capsys.readouterr().err


def test_wrong_use_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """And not by the whole usage, of 15 lines."""
    for words in ("search gpt-7b --gpus 0", "search gpt-7b", "search gpt-7b --gpus 8 --top x"):
        assert main(words.split()) == USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("overlapc search: ")
        assert line.endswith("(`overlapc search --help` lists the options)")
