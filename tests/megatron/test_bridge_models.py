"""Megatron-Bridge's models that see or hear: their language model is planned, bitwise.

They need a checkout of Megatron-Bridge (main, August 2026) in the folder that
OVERLAPC_MEGATRON_BRIDGE names, and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.megatron import bridge_models, cpu
from tests.megatron.models import Layout
from tests.megatron.test_te import FUSED, GROUPED, SEQUENCE, check, compared
from tests.multiprocess.spawn import run_ranks

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(
        not bridge_models.are_there(),
        reason="OVERLAPC_MEGATRON_BRIDGE names no checkout of Megatron-Bridge, or no transformers",
    ),
]

LONG: dict[str, Any] = dict(te=True, microbatches=3, merge=False, sequence=32)
LAYOUTS = {
    "qwen, tp": Layout(**LONG, tp=2, model="qwen", config=FUSED),
    "qwen, tp, sequence": Layout(**LONG, tp=2, model="qwen", config=FUSED | SEQUENCE),
    "qwen, tied": Layout(**LONG, tp=2, model="qwen", tied=True, config=FUSED),
    "qwen, packed": Layout(**LONG, tp=2, model="qwen", packed=True, config=FUSED),
    "glm, ep": Layout(**LONG, ep=2, experts=4, layers=1, model="glm", config=FUSED | GROUPED),
    "audio, tp": Layout(**LONG, tp=2, model="audio", config=FUSED),
    "llava, tp": Layout(**LONG, tp=2, model="llava", config=FUSED),
    "omni, tp": Layout(**LONG, tp=2, model="omni M*M-", config=FUSED),
}


def on_rank(rank: int, ranks: int, name: str) -> dict[str, Any]:
    cpu.use("0.19.2", te="2.9")
    bridge_models.stand_in()
    dist.init_process_group("gloo")
    found = compared(LAYOUTS[name])
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_language_model_is_planned(name: str) -> None:
    cpu.need("0.19.2")
    for found in run_ranks(on_rank, 2, name, timeout_s=290):
        check(LAYOUTS[name], found)
        assert "planned is the language model of a " in found["said"]
