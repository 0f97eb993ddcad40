"""Ranks that draw other random numbers for what they hold in common are warned, and no others."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import overlapc
from tests.multiprocess.spawn import run_ranks
from tests.multiprocess.test_exactness_ranks import MODELS, gpt, same_batches
from tests.torch.exact import loss_of

pytestmark = pytest.mark.multiprocess


def warned(name: str, seed: int) -> list[str]:
    """What is said of random states when a model is planned that is seeded so."""
    make, batches = MODELS.get(name, (lambda: gpt(0.0), same_batches))
    torch.manual_seed(1)
    model = overlapc.optimize(make(), solver="none", profile="estimate")
    torch.manual_seed(seed)
    (batch, *_) = batches()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of(model(*batch.args, **batch.kwargs)).backward()
    torch._dynamo.reset()
    return [str(w.message) for w in caught if "random states differ" in str(w.message)]


def on_rank(rank: int, ranks: int) -> dict[str, list[str]]:
    dist.init_process_group("gloo")
    found = {
        "alike": warned("gpt", 7),
        "own": warned("gpt", 7 + rank),
        "no dropout": warned("gpt without dropout", 7 + rank),
        "own parts": warned("sequence_parallel", 7 + rank),
        "own batches": warned("moe", 7 + rank),
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_own_seeds_are_told_where_activations_are_common() -> None:
    first, second = run_ranks(on_rank, 2, timeout_s=200)
    (message,) = first.pop("own")
    assert all(part in message for part in ("ranks 0, 1", "model.py", "torch.manual_seed"))
    assert not any(first.values()), first
    assert not any(second.values()), "one rank of a group speaks for all"
