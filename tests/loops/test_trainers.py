"""HuggingFace's Trainer, planned by one line, ends bitwise as it does without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.loops.trainers import accelerated, pairs, resumed
from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(1200)]

SETTINGS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "bf16": {"bf16": True},
    "merged": {"merge": True},
    "merged in bf16 with checkpoints": {
        "merge": True,
        "bf16": True,
        "gradient_checkpointing": True,
        "eval_strategy": "steps",
    },
    "checkpoints of Accelerate's": {"wraps": True},
    "batches padded by themselves": {"ragged": True, "steps": 6},
    "adapters": {"adapters": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "one batch": {"gradient_accumulation_steps": 1, "steps": 6},
}


def check(cases: list[tuple[str, dict[str, Any]]], folder: Path, sharded: bool = True) -> None:
    for package in ("transformers", "accelerate", "peft"):
        pytest.importorskip(package, reason="install the extra: pip install -e '.[zoo]'")
    for found in run_ranks(pairs, 2, str(folder), cases, sharded, timeout_s=1100):
        for name, expected, ended in found:
            assert expected.differs(ended) == "", name
            assert ended.planned, name
            assert ended.fallbacks == [], name
            assert [said for said in ended.warned if "numbers may differ" not in said] == [], name


# Accelerate 1.15 puts T5's tied weights into two groups, which FSDP2 of torch 2.13 refuses.
@pytest.mark.parametrize("name", ["llama", "qwen3 with experts", "bert", "vit"])
def test_models_that_fsdp2_shards(name: str, tmp_path: Path) -> None:
    check([(name, {"steps": 20})], tmp_path)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_trainer(setting: str, tmp_path: Path) -> None:
    check([("llama", SETTINGS[setting])], tmp_path)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_replicas(name: str, tmp_path: Path) -> None:
    check([(name, {"steps": 6})], tmp_path, sharded=False)


def test_a_checkpoint_is_resumed_with_and_without(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="install the extra: pip install -e '.[zoo]'")
    for found in run_ranks(resumed, 2, str(tmp_path), timeout_s=600):
        for how, expected, ended in found:
            assert expected.differs(ended) == "", how


def test_a_loop_with_accelerate() -> None:
    pytest.importorskip("accelerate", reason="install the extra: pip install -e '.[zoo]'")
    for expected, found, planned, unchanged in run_ranks(accelerated, 2, timeout_s=600):
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        assert (planned, unchanged) == (2, [])


def test_what_is_not_sharded_is_not_merged(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="install the extra: pip install -e '.[zoo]'")
    cases = [("llama", {"merge": True})]
    for [(_, expected, ended)] in run_ranks(pairs, 1, str(tmp_path), cases, False, timeout_s=600):
        assert expected.differs(ended) == ""
        assert ended.planned
        assert "merges no microbatches: the Trainer does not shard" in ended.warned[0]


def test_why_nothing_is_planned_of_a_compiled_model() -> None:
    pytest.importorskip("transformers", reason="install the extra: pip install -e '.[zoo]'")
    from overlapc.integrations.transformers import Overlap

    plans = Overlap()
    with pytest.raises(AttributeError, match="nothing is planned yet"):
        assert plans.fallbacks
    with pytest.warns(RuntimeWarning, match="torch_compile"):
        plans.on_train_begin(SimpleNamespace(torch_compile=True), None, None, model=None)
    assert "leave torch_compile out" in plans.explain()
    assert plans.fallbacks == [plans.explain()]


class _Interrupts:
    """A Trainer whose accumulation is interrupted between microbatches, as far as `Merged` sees."""

    def get_batch_samples(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    def training_step(self, _model: Any, inputs: Any, _items: Any = None) -> torch.Tensor:
        return torch.tensor(float(len(inputs)))


def test_losses_of_an_interrupted_accumulation_are_dropped() -> None:
    pytest.importorskip("transformers", reason="install the extra: pip install -e '.[zoo]'")
    from overlapc.integrations.transformers import MergedAccumulation, Overlap

    trainer: Any = _Interrupts()
    merged = MergedAccumulation(trainer, Overlap())
    merged._losses = iter([torch.tensor(-1.0)])
    batches, _ = trainer.get_batch_samples()
    assert trainer.training_step(None, batches[0]) == len("first")
