"""Outputs, gradients, buffers and random numbers are those of eager, bit by bit, for every kind
of model, budget and solver."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlapc
from overlapc.core.errors import Infeasible
from overlapc.runtime.backend import overlapc_backend
from tests.torch.exact import DYNAMO_WARNINGS, Batch, differences, randn, train
from tests.torch.zoo import KINDS, MLP, ROWS, WIDTH, Kind, Wrapped, rows

pytestmark = DYNAMO_WARNINGS

Config = tuple[Any, str, str]  # budget, solver, profile
MINIMUM = "minimum"

# What `make test` runs of every kind, and what `make test-all` adds.
_BASELINES: tuple[Config, ...] = (
    (None, "torch", "estimate"),
    (None, "full", "estimate"),
    (0.7, "overlap", "estimate"),
    (MINIMUM, "torch", "estimate"),
    (None, "selective", "measure"),
    (None, "overlap", "measure"),
    (None, "none", "estimate"),
    (0.4, "overlap", "estimate"),
)


def _cases() -> Iterator[Any]:
    for index, name in enumerate(KINDS):
        for place, config in enumerate(((MINIMUM, "overlap", "measure"), *_BASELINES)):
            quick = place == (1 + index // 2 % len(_BASELINES) if index % 2 else 0)
            marks = () if quick else (pytest.mark.slow,)
            budget, solver, profile = config
            title = f"{name}-{solver}-{budget or 'eager peak'}-{profile}"
            yield pytest.param(name, config, id=title.replace(" ", "_"), marks=marks)


def make(kind: Kind) -> nn.Module:
    torch.manual_seed(1)
    return kind.make()


@cache
def eager(name: str) -> list[dict[str, Any]]:
    return train(make(KINDS[name]), KINDS[name].batches())


def train_within(kind: Kind, budget: Any, solver: str, profile: str) -> tuple[Any, list[Any]]:
    """Train optimized; where the budget is too small, with the one the error names."""
    budget = 1 if budget == MINIMUM else budget
    for _ in range(1 + kind.graphs):
        options = {"solver": solver, "profile": profile, "dynamic": kind.dynamic}
        model = overlapc.optimize(make(kind), memory_budget=budget, **options)
        try:
            return model, train(model, kind.batches())
        except Infeasible as infeasible:
            budget = infeasible.smallest_bytes
            torch._dynamo.reset()
    raise AssertionError(f"the smallest budget {budget} does not work")


@pytest.mark.parametrize(("name", "config"), [*_cases()])
def test_kind(name: str, config: Config) -> None:
    kind = KINDS[name]
    budget, solver, _ = config
    with kind.world():
        expected = eager(name)
        model, found = train_within(kind, *config)
    assert differences(expected, found) == []
    assert model.fallbacks == []
    assert len(model.graphs) == kind.graphs
    assert not any(report.plan.recomputed for report in model.graphs) or solver != "none"
    if budget == MINIMUM and solver == "overlap":
        assert any(report.plan.recomputed for report in model.graphs)


def optimized(model: nn.Module, **options: Any) -> Any:
    """With something recomputed, and no limit on memory."""
    options = {"profile": "estimate", "solver": "full", "memory_budget": 100.0} | options
    return overlapc.optimize(model, **options)


def mlp(dropout: float = 0.1) -> MLP:
    torch.manual_seed(1)
    return MLP(3, dropout)


def backward_twice(model: nn.Module, retain: bool) -> list[Tensor]:
    torch.manual_seed(3)
    loss = model(randn(ROWS, WIDTH)).square().sum()
    loss.backward(retain_graph=retain)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_backward_twice() -> None:
    expected = backward_twice(mlp(), retain=True)
    model = optimized(mlp())
    found = backward_twice(model, retain=True)
    assert model.plan.recomputed
    assert all(map(torch.equal, expected, found))


def test_backward_twice_without_retaining() -> None:
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward_twice(mlp(), retain=False)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward_twice(optimized(mlp()), retain=False)


def test_gradient_penalty_is_refused() -> None:
    """AOTAutograd has no second derivatives; it must say so rather than give wrong ones."""
    x = randn(ROWS, WIDTH, requires_grad=True)
    out = optimized(mlp())(x).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.square().sum().backward()


class Forces(nn.Module):
    """Learns an energy by its slope, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Linear(4, 4)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        energy = self.energy(x).sum()
        (force,) = torch.autograd.grad(
            energy,
            x,
            create_graph=second,
            retain_graph=True,
        )
        return self.scale(force).square().sum() + energy


def test_a_gradient_of_a_gradient_within_a_model() -> None:
    """The graph whose gradient is taken runs as plain PyTorch, the rest is planned."""
    torch.manual_seed(0)
    model = Forces()
    twin = overlapc.optimize(copy.deepcopy(model), solver="none", profile="estimate")
    x = randn(ROWS, 4, requires_grad=True)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        twin(x, second=True).backward()
    twin(x, second=True).backward()
    for _ in range(2):
        model(x, second=True).backward()
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    why, between = twin.fallbacks
    assert "test_exactness.py" in why
    assert "create_graph" in why
    assert "what is between its graphs" in between
    assert len(twin.graphs) == 1


def test_gradients_of_some_inputs_only() -> None:
    x = randn(ROWS, WIDTH, requires_grad=True)
    found = []
    for model in (mlp(), optimized(mlp())):
        torch.manual_seed(0)
        wanted = [x, model.layers[1][1].weight]
        found.append(torch.autograd.grad(model(x).sin().sum(), wanted))
    assert all(map(torch.equal, *found))


def test_accumulation_over_microbatches() -> None:
    """Forwards first, then backwards: two sets of saved values are alive."""
    found = []
    for model in (mlp(), optimized(mlp())):
        torch.manual_seed(0)
        losses = [model(randn(ROWS, WIDTH, seed=i)).square().sum() for i in range(3)]
        for loss in reversed(losses):
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_no_grad_and_eval() -> None:
    """Without autograd nothing is planned; in eval mode with it, another graph is."""
    ours, plain = optimized(mlp()), mlp()
    batch = rows(True)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = plain(*batch[0].args)
        torch.manual_seed(0)
        assert torch.equal(expected, ours(*batch[0].args))
    assert ours.graphs == []
    for count, mode in enumerate((True, False, True, False)):
        ours.train(mode)
        plain.train(mode)
        assert differences(train(plain, batch), train(ours, batch)) == []
        assert len(ours.graphs) == min(2, count + 1)
    with torch.no_grad():
        assert torch.equal(plain(*batch[0].args), ours(*batch[0].args))
    with torch.inference_mode():
        assert torch.equal(plain(*batch[0].args), ours(*batch[0].args))


def test_state_is_shared_with_the_model() -> None:
    model = mlp(0.0)
    twin = optimized(model)
    assert isinstance(twin, MLP)
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    train(twin, rows())
    other = mlp(0.0)
    other.load_state_dict(twin.state_dict())
    assert differences(train(other, rows()), train(model, rows())) == []
    twin.load_state_dict({name: value * 0.5 for name, value in other.state_dict().items()})
    other.load_state_dict(model.state_dict())
    assert differences(train(other, rows()), train(twin, rows())) == []
    assert len(twin.graphs) == 1  # new values need no new plan


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how: str) -> None:
    twin = optimized(mlp())
    train(twin, rows())
    other = copy.deepcopy(twin) if how == "deepcopy" else pickle.loads(pickle.dumps(twin))
    assert type(other).__name__ == "MLP"
    assert other.graphs == []
    assert not {id(p) for p in other.parameters()} & {id(p) for p in twin.parameters()}
    plain = mlp()
    plain.load_state_dict(twin.state_dict())
    assert differences(train(plain, rows(True)), train(other, rows(True))) == []
    assert len(other.graphs) == 1


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_within_data_parallel() -> None:
    from torch.nn.parallel import DistributedDataParallel

    plain, twin = mlp(), optimized(mlp())
    expected = train(DistributedDataParallel(plain), rows(True))
    assert differences(expected, train(DistributedDataParallel(twin), rows(True))) == []
    assert twin.fallbacks == []
    assert len(twin.graphs) >= 1


def test_hooks() -> None:
    """Hooks on the model, its modules and parameters are called as in eager."""
    found = []
    for model in (mlp(), optimized(mlp())):
        seen: list[str] = []
        model.register_forward_hook(lambda *_, seen=seen: seen.append("forward"))
        bias = model.layers[0][1].bias
        bias.register_hook(lambda grad, seen=seen: seen.append(f"bias {grad.sum():.9g}"))
        bias.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("grad"))
        found.append((train(model, rows(True)), seen))
    assert differences(found[0][0], found[1][0]) == []
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("name", [True, False])
def test_as_a_backend(name: bool) -> None:
    if name and "overlapc" not in torch._dynamo.list_backends():
        pytest.skip("the name is known to torch once overlapc is installed: pip install -e .")
    options = {"profile": "estimate", "solver": "full", "memory_budget": 100.0}
    plain, model = mlp(), mlp()
    backend = "overlapc" if name else overlapc_backend
    compiled = torch.compile(model, backend=backend, options=options)
    expected = train(plain, rows(True))
    torch.manual_seed(7)
    for step, batch in zip(expected, rows(True), strict=True):
        model.zero_grad()
        x = batch.args[0].detach().clone().requires_grad_()
        found = train_once(compiled, model, x)
        assert differences([{k: v for k, v in step.items() if k in found}], [found]) == []


def train_once(compiled: Any, model: nn.Module, x: Tensor) -> dict[str, Any]:
    from tests.torch.exact import bits, loss_of

    loss_of(compiled(x)).backward()
    found = {f"gradient of {n}": bits(p.grad) for n, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
    return found | {"gradient of input 0": bits(x.grad)}


# --------------------------------------------------------------------- what is left unchanged


@torch.library.custom_op("overlapc_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def double_backward(ctx: Any, grad: Tensor) -> Tensor:
    return torch.from_numpy(grad.contiguous().numpy() * 2)  # no compiler sees into numpy


double.register_autograd(double_backward)


def custom(body: nn.Module, x: Tensor) -> Tensor:
    return body(double(body(x)))


def test_unplannable_graph_runs_unchanged_with_one_warning() -> None:
    torch.manual_seed(1)
    plain = Wrapped(custom)
    torch.manual_seed(1)
    model = overlapc.optimize(Wrapped(custom), profile="estimate")
    expected = train(plain, rows(True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(model, rows(True))
    assert differences(expected, found) == []
    assert model.graphs == []
    (reason,) = model.fallbacks
    (warning,) = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    assert "unchanged, as plain PyTorch" in str(warning.message)
    assert "numpy" in str(warning.message)
    assert "zoo.py" in str(warning.message)
    assert reason in model.explain()
    assert "runs as plain PyTorch" in model.explain()


class Untraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * float(x.detach().numpy().mean() > -100) * 2


def around_untraceable(body: nn.Module, x: Tensor) -> Tensor:
    x = body(x).tanh()
    x = torch._dynamo.disable(Untraceable.apply)(x)
    return body(x).sigmoid() * 3


def test_parts_around_what_cannot_be_traced_are_planned() -> None:
    torch.manual_seed(1)
    plain = Wrapped(around_untraceable, 1)
    torch.manual_seed(1)
    model = optimized(Wrapped(around_untraceable, 1))
    with pytest.warns(RuntimeWarning, match="what is between its graphs .Untraceable"):
        found = train(model, rows(True))
    assert differences(train(plain, rows(True)), found) == []
    assert len(model.graphs) == 2
    assert "graph 0" in model.explain()
    assert "graph 1" in model.explain()


def test_data_dependent_branches() -> None:
    def branch(body: nn.Module, x: Tensor) -> Tensor:
        x = body(x)
        return x.sin() if x.sum() > 0 else x.cos()

    found = []
    for wrap in (lambda m: m, optimized):
        torch.manual_seed(1)
        model = wrap(Wrapped(branch))
        found.append(train(model, [*rows(True), Batch((-randn(ROWS, WIDTH).abs(),))]))
    assert differences(*found) == []
    assert len(model.graphs) >= 2


class Teacher(nn.Module):
    """Follows its pupil slowly, in the forward; only the pupil learns."""

    def __init__(self) -> None:
        super().__init__()
        self.pupil, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(
                self.teacher.parameters(), self.pupil.parameters(), strict=True
            ):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            wanted = self.teacher(x)
        return (self.pupil(x) - wanted).square()


def test_a_parameter_that_is_only_changed_gets_no_gradient() -> None:
    torch.manual_seed(1)
    model = Teacher()
    plain = copy.deepcopy(model)
    twin = optimized(model)
    for one in (plain, twin):
        one(randn(ROWS, WIDTH)).mean().backward()
    assert twin.fallbacks == []
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found)
        assert (expected.grad is None) == (found.grad is None)
        assert expected.grad is None or torch.equal(expected.grad, found.grad)


class Solves(nn.Linear):
    """AOTAutograd counts more results of this forward than its graph has."""

    def forward(self, x: Tensor) -> Tensor:
        matrix = torch.eye(WIDTH) * 9 + super().forward(x)
        return torch.linalg.det(matrix) + torch.linalg.solve(matrix, x).sum()


def test_a_graph_with_fewer_gradients_than_inputs_is_planned() -> None:
    torch.manual_seed(1)
    model = optimized(Solves(WIDTH, WIDTH))
    model(randn(WIDTH, WIDTH, requires_grad=True)).backward()
    assert model.fallbacks == []
