"""Models whose parameters a framework gathers in hooks: named in the user's words, and left as they
are. tests/multiprocess/test_fsdp_ranks.py has FSDP2 on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlapc
from overlapc.runtime.foreign import sharded_by
from tests.torch.exact import randn
from tests.torch.zoo import MLP


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sharded(alone: None) -> Any:
    torch.manual_seed(0)
    model = MLP(2)
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def test_a_step_of_a_sharded_model_is_plain_and_says_what_to_do(alone: None) -> None:
    x = randn(4, 16)
    model, other = sharded(alone), sharded(alone)
    step = overlapc.TrainStep(model, mean, profile="estimate")
    with pytest.warns(RuntimeWarning, match=r"FSDP2 shards this model; expected each block as"):
        losses = step([x, x])
    for loss in losses:
        expected = mean(other, x)
        expected.backward()
        assert torch.equal(loss, expected.detach())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs)
    assert step.plan([x, x]) is None


def test_which_framework_shards_a_model(alone: None) -> None:
    def of(name: str, module: str) -> nn.Module:
        kind = type(name, (nn.Module,), {"__module__": module})
        return nn.Sequential(kind())

    assert sharded_by(sharded(alone)) == "FSDP2"
    wrapped = of("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel")
    assert sharded_by(wrapped) == "FSDP1"
    assert sharded_by(of("DeepSpeedEngine", "deepspeed.runtime.engine")) == "DeepSpeed"
    assert sharded_by(MLP()) == ""


def test_a_block_that_is_sharded_afterwards_is_known(alone: None) -> None:
    block = MLP(1)
    twin = overlapc.optimize(block, profile="estimate")
    fully_shard(twin, mesh=init_device_mesh("cpu", (1,)))
    assert sharded_by(block) == "FSDP2"
