"""A model that changes itself while it runs is left to Megatron, and a trace leaves nothing behind;
what changes between steps is traced again."""

from __future__ import annotations

import collections
import decimal
import functools
import itertools
import random
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.passes.opaque.stand_in import _after
from tests.megatron import cpu
from tests.megatron.models import STEPS, Layout, Trained, bert_step, set_up, twins
from tests.megatron.test_patch import compared, differences
from tests.multiprocess.spawn import run_ranks
from tests.torch.test_opaque import Numpy

pytestmark = pytest.mark.multiprocess


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.module = module
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.module.backwards += 1
        return gradient * ctx.module.backwards, None


def replaced(module: Any, out: torch.Tensor) -> torch.Tensor:
    module.seen = module.seen + 1
    return out * module.seen


def appended(module: Any, out: torch.Tensor) -> torch.Tensor:
    module.log.append(1)
    return out * len(module.log)


def counted(module: Any, out: torch.Tensor) -> torch.Tensor:
    type(module).calls += 1
    return out * type(module).calls


def counted_backwards(module: Any, out: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Counting.apply(out, module)
    return result


def drawn(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out * random.random()


def thrown(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out * module.dice.random()


def seeded(module: Any, out: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return out * torch.rand_like(out)


def scaled(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out * type(module).calls


class Own(torch.autograd.Function):
    """A script's own auxiliary loss, scaled as Megatron's are."""

    main_loss_backward_scale = torch.ones(())

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones_like(ctx.like) * Own.main_loss_backward_scale


def beside(module: Any, out: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Own.apply(out, out.square().mean())
    return result


def _other_scale(model: Any, number: int) -> None:
    Own.main_loss_backward_scale = torch.tensor(number + 1.0)


def plain(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out


def configured(module: Any, out: torch.Tensor) -> torch.Tensor:
    """What a config holds that is no field of it, and a function that it holds."""
    result: torch.Tensor = module.config.activation_func(out * module.config.factor)
    return result


def _other_config(model: Any, number: int) -> None:
    model.config.factor = number + 1
    model.config.activation_func = (torch.relu, torch.tanh, torch.sin)[number]


def _other_forward(model: Any, number: int) -> None:
    if number:
        model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs) * number


def contained(module: Any, out: torch.Tensor) -> torch.Tensor:
    """What attributes hold that are no plain values: numpy's, and containers of objects."""
    first, other = module.parts["factors"]
    result: torch.Tensor = out * first * other.item() * module.parts["settings"].inner.factor
    return result * module.parts["scale"]


def _other_parts(model: Any, number: int) -> None:
    inner = types.SimpleNamespace()  # which no key describes
    model.parts = {
        "factors": [torch.tensor(number + 1.0), np.float32(number + 2)],
        "settings": Settings(Settings(None, number + 1.5), 0.0),
        "scale": np.arange(3.0)[number] + 1,
        "other": inner,
    }


@dataclass
class Settings:
    inner: Any
    factor: float


def buffered(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out * module.seen * module.shared


def masked(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out if module.mask is None else out * module.mask


def listed(module: Any, out: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = out + module.listed[0].square().mean()
    return result


def numbered(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out * (1 + module.current_microbatch)


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, size)


TABLES: dict[int, torch.Tensor] = {}


def tabled(module: Any, out: torch.Tensor) -> torch.Tensor:
    """Caches of the script that are filled in the first forward."""
    size = out.shape[-1]
    return out * table(size) * TABLES.setdefault(size, torch.linspace(1.0, 2.0, size))


KEPT: dict[str, torch.Tensor] = {}


def kept_draw(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out * KEPT.setdefault("draw", torch.rand(()))


def kept_value(module: Any, out: torch.Tensor) -> torch.Tensor:
    return out * KEPT.setdefault("value", out.detach().mean())


def assigned(module: Any, out: torch.Tensor) -> torch.Tensor:
    module.seen.data = module.seen.data + 1
    return out * module.seen


class Averaging(torch.nn.Module):
    """No trace enters it, and it changes its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.log: list[int] = []

    def forward(self, x: torch.Tensor, in_place: bool) -> torch.Tensor:
        if in_place:
            self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        else:
            self.log.append(1)
        y: torch.Tensor = Numpy.apply(x) * (self.mean + len(self.log))
        return y


def averaged(module: Any, out: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.averaging(out, True)
    return result


def logged(module: Any, out: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.averaging(out, False)
    return result


class Numbered(torch.autograd.Function):
    """A script's own auxiliary loss, scaled by a plain number."""

    main_loss_backward_scale: Any = 1.0

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * Numbered.main_loss_backward_scale


def plainly_scaled(module: Any, out: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Numbered.apply(out)
    return result


def _other_number(model: Any, number: int) -> None:
    Numbered.main_loss_backward_scale = 1.0 + number % 2


def _other_dtype(model: Any, number: int) -> None:
    if number == 2:
        model.double()


def around(drop: nn.Module) -> Callable[..., Any]:
    return lambda out: drop(out)


def held(module: Any, out: torch.Tensor) -> torch.Tensor:
    out = module.drops[0](out)
    for each in module.pair:
        out = each(out)
    result: torch.Tensor = module.function(module.named["leaky"](out))
    return result


def _other_held(model: Any, number: int) -> None:
    model.drops[0].p = (0.1, 0.3, 0.3)[number]
    model.pair[0].train(number != 1)
    model.named["leaky"].negative_slope = 0.1 + number
    model.function.__closure__[0].cell_contents.p = (0.3, 0.3, 0.6)[number]


def valued(module: Any, out: torch.Tensor) -> torch.Tensor:
    values = module.values
    out = out * abs(values["complex"]) * float(values["decimal"]) * values["deque"][-1]
    out = out * values["bytes"][0] * values["array"][0] * values["called"].factor
    result: torch.Tensor = out * values["partial"]() * module.closure()
    return result


@dataclass
class Called:
    factor: float

    def __call__(self) -> float:
        return self.factor


def _other_values(model: Any, number: int) -> None:
    """Each in place."""
    if not hasattr(model, "values"):
        count = 1.0

        def closure(more: float = 0.0) -> float:
            nonlocal count
            count += more
            return count

        model.closure = closure
        model.values = {
            "deque": collections.deque([1.0]),
            "bytes": bytearray([1]),
            "array": np.array([1.0], dtype=object),
            "called": Called(1.0),
            "partial": functools.partial(lambda by: by, by=1.0),
        }
    values = model.values
    values["complex"], values["decimal"] = complex(number, 1), decimal.Decimal(number + 1)
    values["deque"].append(number + 1.0)
    values["bytes"][0] = values["array"][0] = number + 1
    values["called"].factor = values["partial"].keywords["by"] = number + 1.0
    model.closure(number)


def within(module: Any, out: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = out * module.parts["scale"] * module.config.factor
    return result


# What a forward does, and how the warning names it; "" if the chunk is planned.
CHANGES: dict[str, tuple[Callable[..., Any], str]] = {
    "buffer": (replaced, "forward changes the attribute seen"),
    "list": (appended, "forward changes the attribute log"),
    "class": (counted, "forward changes the attribute Changing.calls"),
    "backward": (counted_backwards, "the backward changes the attribute backwards"),
    "python": (drawn, "forward draws from Python's or NumPy's random"),
    "generator": (thrown, "forward draws from Python's or NumPy's random"),
    "seed": (seeded, "forward calls torch's set_rng_state"),
    "between": (scaled, ""),
    "config": (configured, ""),
    "forward": (plain, ""),
    "scale": (beside, ""),
    "contained": (contained, ""),
    "masked": (masked, ""),
    "buffered": (buffered, ""),
    "dtype": (plain, ""),
    "listed": (listed, "that is not found among those of its modules"),
    "numbered": (numbered, "forward reads current_microbatch"),
    "caches": (tabled, ""),
    "drawn cache": (
        kept_draw,
        "forward caches a value of its inputs, parameters or random numbers",
    ),
    "cache of values": (kept_value, "forward caches a value of its inputs, parameters or random"),
    "data": (assigned, "forward sets `.data` of a tensor of shape ()"),
    "opaque buffer": (averaged, "it changes a parameter or buffer, and might run twice"),
    "opaque list": (logged, "it changes its attribute 'log', and might run twice"),
    "plain scale": (plainly_scaled, ""),
    "held": (held, ""),
    "values": (valued, ""),
    "within": (within, ""),
}
BETWEEN: dict[str, Callable[[Any, int], None]] = {
    "config": _other_config,
    "forward": _other_forward,
    "scale": _other_scale,
    "contained": _other_parts,
    "dtype": _other_dtype,
    "plain scale": _other_number,
    "held": _other_held,
    "values": _other_values,
}


def with_masks(trained: Trained, make: Callable[[int], Any]) -> None:
    """Before each microbatch the script sets an attribute of the model."""
    real, given = trained._given, itertools.count()
    plainly = real(0)["forward_step_func"]

    def step(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        model.mask = make(next(given))
        return plainly(data, model, *args, **kwargs)

    trained._given = lambda n: {**real(n), "forward_step_func": step}  # type: ignore[method-assign]


def changing(trained: Trained, then: Callable[..., Any]) -> type:
    """Give a model a class of its own, whose forward does something more."""
    from megatron.core.models.gpt import GPTModel

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return then(self, GPTModel.forward(self, *args, **kwargs))

    model = trained.models[0]
    kind = types.new_class("Changing", (GPTModel,))
    kind.forward, kind.calls = forward, 0  # type: ignore[attr-defined]
    model.__class__ = kind
    model.register_buffer("seen", torch.zeros(()))
    model.averaging = Averaging()
    model.log, model.backwards = [], 0
    model.dice = random.Random(3)
    model.drops, model.pair = [nn.Dropout(0.1)], (nn.Dropout(0.2), nn.LeakyReLU(0.5))
    model.named, model.function = {"leaky": nn.LeakyReLU(0.1)}, around(nn.Dropout(0.3))
    model.mask, model.listed, model.current_microbatch = None, [model.output_layer.weight], 0
    return kind


def trains(trained: Trained, kind: Any, name: str) -> list[dict[str, Any]]:
    random.seed(1)
    found = []
    if name == "buffered":
        model = trained.models[0]
        model.shared = model.other = torch.tensor(2.0)

        def set_both(number: int) -> None:
            model.seen = torch.tensor(1.0 + number % 2)
            if number == 5:
                model.shared = torch.tensor(3.0)

        with_masks(trained, set_both)
    if name == "within":
        model, model.parts = trained.models[0], {"scale": 1.0}

        def set_parts(number: int) -> None:
            model.parts["scale"], model.config.factor = 1.0 + number % 2, 1.0 + number % 3

        with_masks(trained, set_parts)
    if name == "masked":
        with_masks(trained, lambda number: torch.tensor(1.0 + number) if number % 3 else None)
    for number in range(3):
        kind.calls += 2 if name == "between" else 0
        BETWEEN.get(name, lambda *_: None)(trained.models[0], number)
        found.append(trained.step(number))
    return found


def on_rank(
    rank: int, ranks: int, version: str, names: list[str]
) -> dict[str, tuple[list[str], list[str]]]:
    cpu.use(version)
    dist.init_process_group("gloo")
    layout = Layout(ranks=1, layers=1, dropout=0.1, ddp=None)
    set_up(layout)
    import overlapc.megatron as patched

    found = {}
    for name in names:
        then, _ = CHANGES[name]
        theirs, ours = twins(layout)
        expected = trains(theirs, changing(theirs, then), name)
        table.cache_clear()
        TABLES.clear()
        KEPT.clear()
        patched.patch(profile="estimate", solver="heu", merge=False)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            got = trains(ours, changing(ours, then), name)
        patched.unpatch()
        wrong = [each for pair in zip(expected, got, strict=True) for each in differences(*pair)]
        found[name] = wrong, [str(one.message) for one in told if "overlapc" in str(one.message)]
    return found


PARTS = 5  # of the changes: all take two minutes


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, PARTS))]
)
def test_what_changes_is_seen(part: int) -> None:
    cpu.need("0.16.1")
    (found,) = run_ranks(on_rank, 1, "0.16.1", [*CHANGES][part::PARTS], timeout_s=280)
    for name, (wrong, told) in found.items():
        _, warning = CHANGES[name]
        assert wrong == [], name
        assert len(told) == bool(warning), (name, told)
        assert all(warning in each for each in told), (name, told)


def on_two_ranks(rank: int, ranks: int, version: str) -> tuple[list[str], list[dict[str, int]]]:
    """The first microbatch finds that forward changes an attribute, to one that later ones find."""
    cpu.use(version)
    dist.init_process_group("gloo")
    layout = Layout(tp=2, layers=1, ddp=None)
    set_up(layout)
    import overlapc.megatron as patched

    def once(module: Any, out: torch.Tensor) -> torch.Tensor:
        if module.factor.dtype == torch.float32:
            module.factor = module.factor.double()
        return (out * module.factor).float()

    theirs, ours = twins(layout)
    for trained in (theirs, ours):
        changing(trained, once)
        trained.models[0].factor = torch.ones(1)
    expected = [theirs.step(number) for number in range(2)]
    patched.patch(profile="estimate", solver="heu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = [ours.step(number) for number in range(2)]
    assert patched._steps is not None
    ran = [dict(chunk.ran) for chunk in patched._steps.chunks.values()]
    patched.unpatch()
    wrong = [each for pair in zip(expected, got, strict=True) for each in differences(*pair)]
    return wrong, ran


@pytest.mark.timeout(300)
def test_a_plain_microbatch_among_merged_ones() -> None:
    cpu.need("0.16.1")
    for wrong, (ran,) in run_ranks(on_two_ranks, 2, "0.16.1", timeout_s=280):
        assert wrong == []
        assert ran["plain"] == 1
        assert ran["merged"] > 0


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


def drawing_on_two_ranks(rank: int, ranks: int, version: str) -> list[str]:
    """The backward draws from the generator from which the script draws the next microbatch."""
    cpu.use(version)
    dist.init_process_group("gloo")
    layout = Layout(tp=2, layers=1, ddp=None)
    set_up(layout)
    import overlapc.megatron as patched

    theirs, ours = twins(layout)
    for trained in (theirs, ours):
        changing(trained, lambda _module, out: Noisy.apply(out))
        with_masks(trained, lambda _: torch.rand(1))
        changed = trained.models[0]
        kind = type(changed)
        kind.forward = functools.partialmethod(_masked_by, kind.forward)
    expected = [theirs.step(number) for number in range(2)]
    patched.patch(profile="estimate", solver="heu")
    got = [ours.step(number) for number in range(2)]
    patched.unpatch()
    return [each for pair in zip(expected, got, strict=True) for each in differences(*pair)]


def _masked_by(module: Any, forward: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return masked(module, forward(module, *args, **kwargs))


@pytest.mark.timeout(300)
def test_a_backward_that_draws_does_not_wait() -> None:
    cpu.need("0.16.1")
    assert run_ranks(drawing_on_two_ranks, 2, "0.16.1", timeout_s=280) == [[], []]


def test_an_error_within_an_opaque_module_keeps_the_first_reason() -> None:
    assert str(_after(["mlp (MoELayer): sizes differ"], CaptureError("no mode"))) == (
        "no trace enters mlp (MoELayer): sizes differ; nor does it run as one op: no mode"
    )


def bert(rank: int, ranks: int, version: str) -> dict[str, Any]:
    """BERT returns a pair: in two stages, merged, and with None for a head that it does not have.
    It is refused in slices, and if the loss leaves one of the pair out."""
    cpu.use(version)
    dist.init_process_group("gloo")
    found = {"pp": compared(Layout(pp=2, model="bert"))}
    merged = Layout(tp=2, layers=1, model="bert")
    found["merged"] = compared(merged)
    import overlapc.megatron as patched

    said = []
    for options in ({"slices": 2}, {}):
        trained = Trained(merged)
        if not options:
            STEPS["bert"] = words_alone
        patched.patch(solver="none", profile="estimate", **options)
        with pytest.raises(OverlapcError) as told:
            trained.step(0)
        said.append(str(told.value))
        patched.unpatch()
    from megatron.core.models.bert.bert_model import BertModel

    BertModel.__init__ = functools.partialmethod(BertModel.__init__, add_binary_head=False)
    found["None"] = compared(Layout(tp=2, layers=1, model="bert", merge=False))
    dist.barrier()
    return found | {"said": said}


def words_alone(*given: Any, **more: Any) -> Any:
    out, _ = bert_step(*given, **more)

    def loss(out: Any) -> Any:
        total = out[0].float().mean()
        return total, {"loss": total.detach()}

    return out, loss


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_a_chunk_that_returns_a_pair_is_planned(version: str) -> None:
    cpu.need(version)
    for rank in run_ranks(bert, 2, version, timeout_s=280):
        for name in ("pp", "merged", "None"):
            found = rank[name]
            assert (found["wrong"], found["why"], found["left"]) == ([], [], []), name
            assert found["ran"][0]["planned"] == 12, name
        assert rank["merged"]["ran"][0]["merged"] == 9
        sliced, left_out = rank["said"]
        assert "slices=2: forward returns 2 tensors, expected one" in sliced
        assert "the loss leaves out a tensor that the model's forward returns" in left_out


def summed(rank: int, ranks: int) -> bool:
    """Gloo itself sums only even parts: compare with an all-reduce."""
    cpu.use("0.16.1")
    dist.init_process_group("gloo")
    from overlapc.megatron.tracing import _sum_of_two

    whole, rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)), [3, 5]
    found = _sum_of_two(whole, rows, dist.group.WORLD)
    dist.all_reduce(whole)
    return torch.equal(found, whole.split(rows)[rank])


def test_uneven_parts_are_summed_as_even_ones() -> None:
    cpu.need("0.16.1")
    assert run_ranks(summed, 2) == [True, True]
