"""Models whose parameters a framework gathers in hooks: those of FSDP2 are planned, others named.
tests/multiprocess/test_sharded.py has several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlapc
from overlapc.core.errors import OptionError
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


def test_a_step_of_a_sharded_model_is_planned(alone: None) -> None:
    x = randn(4, 16)
    model, other = sharded(alone), sharded(alone)
    step = overlapc.TrainStep(model, mean, profile="estimate")
    losses = step([x, x])
    assert step.report is not None
    for loss in losses:
        expected = mean(other, x)
        expected.backward()
        assert torch.equal(loss, expected.detach())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs)


def test_what_fsdp2_adds_to_a_model_works_on_its_twin(alone: None) -> None:
    x, model = randn(4, 16), sharded(alone)
    twin: Any = overlapc.optimize(model, profile="estimate")
    twin.set_requires_gradient_sync(False)
    twin(x).square().mean().backward()
    twin.set_requires_gradient_sync(True)
    twin(x).square().mean().backward()
    twin.unshard()
    twin.reshard()
    assert all(p.grad is not None for p in model.parameters())
    assert twin.fallbacks == []


def test_sharding_what_optimize_returned_is_refused_by_name(alone: None) -> None:
    model: Any = overlapc.optimize(MLP(2), profile="estimate")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(OptionError, match=r"expected it on the model: fully_shard\(model\)"):
        model(randn(4, 16))


@pytest.mark.parametrize("slices", [2, "auto"])
def test_slices_of_a_sharded_model_are_refused_by_name(alone: None, slices: Any) -> None:
    model: Any = overlapc.optimize(sharded(alone), profile="estimate", slices=slices)
    with pytest.raises(OptionError, match="found a model that FSDP2 shards"):
        model(randn(4, 16))


class Prints(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        print("so far", x.sum().item())
        return self.layers[1](x)


def test_a_model_that_is_not_one_graph_is_left_to_fsdp2(alone: None) -> None:
    x, mesh = randn(4, 16), init_device_mesh("cpu", (1,))
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model: Any = Prints(2)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        call = overlapc.optimize(model, profile="estimate") if planned else model
        if planned:
            with pytest.warns(RuntimeWarning, match="runs the whole model unchanged"):
                call(x).square().mean().backward()
            assert call.graphs == []
        else:
            call(x).square().mean().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_when_gradients_are_reduced_is_asked_for_in_words(alone: None) -> None:
    with pytest.raises(OptionError, match="expected 'each' or 'last'"):
        overlapc.TrainStep(sharded(alone), mean, reduce="once")
    with pytest.raises(OptionError, match="give one of both"):
        overlapc.TrainStep(sharded(alone), mean, reduce="last", slices=2)
    with pytest.raises(OptionError, match="a model that FSDP2 shards"):
        overlapc.TrainStep(MLP(2), mean, reduce="last")([randn(4, 16)])


def test_recurrent_layers_are_left_to_fsdp2(alone: None) -> None:
    model: Any = fully_shard(nn.GRU(4, 4), mesh=init_device_mesh("cpu", (1,)))
    step = overlapc.TrainStep(model, lambda m, x: m(x)[0].mean(), profile="estimate")
    with pytest.warns(RuntimeWarning, match=r"FSDP2 shards the model with weights of nn\.RNN"):
        step([randn(3, 2, 4)])
    assert step.report is None


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
