"""A plan of `overlapc.predict` is one for `overlapc.optimize`: both see the same graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

import overlapc
from examples.gpt.model import GPT, GPTConfig
from examples.moe.model import MoEConfig, MoEGPT
from overlapc.api import capture
from overlapc.core.errors import OptionError
from overlapc.passes.capture.front import capture as capture_directly
from overlapc.planning import road
from tests.torch.exact import Batch, loss_of, randn
from tests.torch.zoo import KINDS, MLP, tokens

ONE_GRAPH = [kind for kind, it in KINDS.items() if it.graphs == 1 and not it.dynamic]
QUICK = {"plain", "tied", "batch norm", "gpt on a fabric", "frozen", "input changed in place"}


def taken_back(make: Callable[[], nn.Module], batch: Batch, path: Path) -> nn.Module:
    """A model under the plan that was made for another of its kind."""
    torch.manual_seed(0)
    report = overlapc.predict(
        make(), *batch.args, solver="full", memory_budget="40GB", **batch.kwargs
    )
    overlapc.save_plan(path, report.plan)
    twin = overlapc.optimize(make(), plan=path, profile="estimate")
    loss_of(twin(*batch.args, **batch.kwargs)).backward()
    assert twin.plan.saved == report.plan.saved
    return twin


@pytest.mark.parametrize(
    "name",
    [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in ONE_GRAPH],
)
def test_a_plan_made_beforehand_is_used(name, tmp_path):
    with KINDS[name].world():
        batch = KINDS[name].batches()[0]
        assert taken_back(KINDS[name].make, batch, tmp_path / "plan.txt").fallbacks == []


def test_torch_compile_takes_the_plan_of_a_file(tmp_path, monkeypatch):
    path, x = tmp_path / "plan.txt", randn(4, 16)
    taken_back(MLP, Batch((x,)), path)
    monkeypatch.setattr(road, "solve", None)  # nobody is asked for another
    options = {"plan": str(path), "profile": "estimate"}
    torch.compile(MLP(), backend="overlapc", options=options)(x).sum().backward()
    with pytest.raises(BackendCompilerFailed, match=r"InvalidPlan: .*was made for trace"):
        torch.compile(MLP(3), backend="overlapc", options=options)(x)


def test_so_it_is_for_experts(tmp_path):
    config = MoEConfig(layers=1, width=16, heads=2, experts=4, expert_width=16, max_seq=8)
    batch = Batch((tokens(2, 8, seed=0), tokens(2, 8, seed=1)))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        taken_back(lambda: MoEGPT(config, dist.group.WORLD), batch, tmp_path / "plan.txt")
    finally:
        dist.destroy_process_group()


def test_fake_and_real_tensors_are_one_graph():
    real = capture(MLP(), randn(4, 16)).trace
    with FakeTensorMode():
        fake = capture(MLP(), torch.zeros(4, 16)).trace
    meta = capture(MLP().to("meta"), torch.zeros(4, 16, device="meta")).trace
    assert real.digest == fake.digest == meta.digest


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_the_meta_device_is_planned_as_one_with_data(tied):
    """There PyTorch has attention op by op, and losses without a backward."""
    config = GPTConfig(layers=2, width=32, max_seq=16, tie_embeddings=tied)
    given = tokens(2, 16, seed=0), tokens(2, 16, seed=1)
    real = capture(GPT(config), *given).trace
    with torch.device("meta"):
        model = GPT(config)
    before = {name: id(p) for name, p in model.named_parameters()}
    meta = capture(model, *(t.to("meta") for t in given)).trace
    assert real.digest == meta.digest
    assert {name: id(p) for name, p in model.named_parameters()} == before


class Odd(nn.Module):
    """Has tensors in places that are neither parameters nor buffers."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, device=device)
        self.inner.weight.scale = 2.0
        self.turns = torch.arange(8.0, device=device)
        self.held = [self.inner.weight, {"shift": torch.ones(8, device=device)}]

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.turns * self.inner.weight.scale + self.held[1]["shift"]
        z: Tensor = y @ self.held[0] + torch.arange(8.0)
        return z.tanh()


def test_so_it_is_with_tensors_that_modules_hold_otherwise():
    real = capture(Odd("cpu"), randn(4, 8)).trace
    model = Odd("meta")
    before = dict(vars(model))
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("error")
        meta = capture(model, torch.empty(4, 8)).trace
    assert real.digest == meta.digest
    assert all(vars(model)[name] is value for name, value in before.items())


class StaysOnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) + torch.ones(8, device="meta")
        return y


def test_a_model_that_needs_its_meta_tensors_is_captured_there_and_that_is_said():
    with pytest.warns(RuntimeWarning, match="on the meta device, where PyTorch has other ops"):
        captured = capture(StaysOnMeta(), torch.empty(4, 8, device="meta"))
    assert captured.trace.ops


def test_an_estimate_says_that_a_host_may_be_too_slow_for_it():
    config = GPTConfig(layers=1, width=64, max_seq=16)
    given = tokens(1, 16, seed=0), tokens(1, 16, seed=1)
    report = overlapc.predict(GPT(config), *given, hardware="h100-sxm")
    assert "a GPU's host that needs longer to launch one" in report.explain()
    wide = nn.Linear(8192, 8192, device="meta")
    report = overlapc.predict(wide, torch.empty(8192, 8192, device="meta"), hardware="h100-sxm")
    assert "a GPU's host that needs longer" not in report.explain()


def test_what_is_not_one_graph_for_dynamo_is_said():
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = MLP()

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            y: Tensor = self.body(x)
            return y

    with pytest.warns(
        RuntimeWarning, match="captured without Dynamo.*overlapc.optimize cannot use"
    ):
        captured = capture(Breaks(), randn(4, 16))
    assert captured.trace.ops


class Kinds(nn.Module):
    """Has an input of every kind."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.trained(x)) * self.scale
        return y


def test_each_input_has_its_kind():
    x = randn(4, 8)
    twin = overlapc.optimize(Kinds(), profile="estimate")
    twin(x).sum().backward()
    for trace in (capture(Kinds(), x).trace, twin.graphs[0].problem.trace):
        assert list(trace.kinds) == list(trace.inputs)
        counts = {kind: len(trace.of_kind(kind)) for kind in trace.kinds.values()}
        assert counts == {"parameter": 2, "buffer": 3, "batch": 1, "gradient": 1}
        (gradient,) = trace.of_kind("gradient")
        assert gradient == trace.inputs[-1]


class Shared(nn.Module):
    """One module under two names, and its weight in another module, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x))).square().mean()


def test_a_module_of_two_names_is_left_as_it_was() -> None:
    model = Shared()
    before = [(id(p), p.detach().clone()) for p in model.parameters()]
    captured = capture(model, torch.randn(2, 4))
    assert len(captured.trace.of_kind("parameter")) == len(before) == 3
    direct = capture_directly(model, torch.randn(2, 4))
    assert len(direct.trace.of_kind("parameter")) == 3
    for parameter, (number, value) in zip(model.parameters(), before, strict=True):
        assert type(parameter) is nn.Parameter
        assert id(parameter) == number
        assert torch.equal(parameter, value)


def test_a_plan_that_takes_more_than_the_budget_is_said(tmp_path):
    model = MLP()
    report = overlapc.predict(model, torch.randn(4, 16), solver="none")
    overlapc.save_plan(tmp_path / "plan.txt", report.plan)
    twin = overlapc.optimize(MLP(), plan=tmp_path / "plan.txt", profile="estimate", memory_budget=5)
    with pytest.warns(RuntimeWarning, match="bytes, more than memory_budget, 5; it is run"):
        twin(torch.randn(4, 16)).sum().backward()


def lazy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Dropout(0.2), nn.Linear(8, 1))


def test_the_call_that_makes_parameters_is_eagers() -> None:
    x, kept = torch.randn(4, 6), []
    for door in ("eager", "optimize", "TrainStep"):
        model = lazy()
        twin = overlapc.optimize(model, verify=True) if door == "optimize" else model
        step = overlapc.TrainStep(model, lambda model, x: model(x).sum())
        for i in range(3):
            told = door != "eager" and i == 0
            with pytest.warns(RuntimeWarning, match="first call makes") if told else nullcontext():
                step([(x,)]) if door == "TrainStep" else twin(x).sum().backward()
        planned = {"optimize": twin, "TrainStep": step}.get(door)
        assert planned is None or "graph" in planned.explain() or "microbatch" in planned.explain()
        kept.append([*(p.grad for p in model.parameters()), model[1].running_var, torch.rand(1)])
    for others in kept[1:]:
        assert all(map(torch.equal, kept[0], others))


def test_a_model_whose_parameters_are_not_made_is_not_captured() -> None:
    with pytest.raises(OptionError, match="first call makes"):
        overlapc.predict(lazy(), torch.randn(4, 6))


def test_what_a_twin_hides_of_its_model_is_said() -> None:
    model = MLP()
    model.plan = "a plan of its own"
    with pytest.warns(RuntimeWarning, match="the model's plan cannot be read on its twin"):
        overlapc.optimize(model)


def test_a_cell_that_is_run_again_optimizes_the_same_model() -> None:
    model, x = MLP(), randn(4, 16)
    twin = overlapc.optimize(model, profile="estimate", memory_budget="1GB")
    twin(x).sum().backward()
    assert overlapc.optimize(twin, profile="estimate", memory_budget="1GB") is twin
    other = overlapc.optimize(twin, profile="estimate", memory_budget="2GB")
    other(x).sum().backward()
    assert other is not twin
    assert type(other).__mro__.count(type(model)) == 1
    assert list(other.parameters()) == list(model.parameters())
    assert [len(other.graphs), len(twin.graphs)] == [1, 1]
    with pytest.raises(OptionError, match="option 'memory'"):
        overlapc.optimize(twin, memory="1GB")


class Stepping(nn.Module):
    """As Lightning has its models: the trainer calls `training_step`."""

    def __init__(self, calls_itself: bool) -> None:
        super().__init__()
        self.network, self.calls_itself = MLP(), calls_itself

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return (self(x) if self.calls_itself else self.network(x)).square().mean()


def test_a_training_step_that_goes_round_the_model_is_said_once() -> None:
    twin, x = overlapc.optimize(Stepping(False), profile="estimate"), randn(4, 16)
    with pytest.warns(RuntimeWarning, match=r"plans nothing of training_step.*`self\(\.\.\.\)`"):
        twin.training_step(x, 0).backward()
    twin.training_step(x, 1).backward()
    assert twin.graphs == []


def test_a_training_step_that_calls_the_model_is_planned() -> None:
    twin, x = overlapc.optimize(Stepping(True), profile="estimate"), randn(4, 16)
    twin.training_step(x, 0).backward()
    assert len(twin.graphs) == 1


def test_a_plan_takes_no_options_of_other_front_doors():
    with pytest.raises(OptionError, match="has memory_budget, solver and hardware"):
        overlapc.predict(nn.Linear(4, 4), torch.randn(2, 4), slices=2)
    with pytest.raises(
        OptionError, match=r"expected one of memory_budget.*schedule, results, reduce"
    ):
        overlapc.TrainStep(nn.Linear(4, 4), bogus=2)
