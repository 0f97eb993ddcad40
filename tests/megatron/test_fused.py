"""What Megatron fuses by `torch.compile` is one op each, wherever it is: a function, a method of a
module's class, or a function that a module has been given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, innermost, set_up, twins
from tests.megatron.test_patch import differences
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

SHORT: dict[str, Any] = dict(ranks=1, layers=2, microbatches=2, dropout=0.1)
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
GATED = {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
LAYOUTS = {
    "functions": Layout(
        **{**SHORT, "layers": 3},
        config={"bias_dropout_fusion": True, "bias_activation_fusion": True},
    ),
    "experts": Layout(**SHORT, experts=4),
    "a bias of experts": Layout(**SHORT, experts=4, config=BIAS),
    "gated experts": Layout(**SHORT, experts=4, config={**GATED, "bias_activation_fusion": True}),
    "gates": Layout(**SHORT, config={"attention_output_gate": True}),
    "an activation": Layout(**SHORT, config={"activation_func": "squared_relu"}),
}
QUICK = ("functions", "a bias of experts")
OTHERS = ("experts", "gates", "an activation", "gated experts")


def on_rank(rank: int, ranks: int, version: str, names: list[str]) -> dict[str, Any]:
    cpu.use(version, fused=True)
    from megatron.core import activations

    dist.init_process_group("gloo")
    found = {}
    for name in names:
        layout = LAYOUTS[name]
        if activation := layout.config.get("activation_func"):
            where = activations if hasattr(activations, activation) else nn.functional
            layout.config["activation_func"] = getattr(where, activation)
        set_up(layout)
        found[name] = compared(*twins(layout))
    dist.destroy_process_group()
    return found


def compared(
    plain: Trained, ours: Trained, prepare: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Train both, and what was planned of the second. `prepare` is called before each step of the
    first or second."""
    import overlapc.megatron as patched

    def stepped(one: int, trained: Trained) -> list[Any]:
        found = []
        for number in range(2):
            if prepare is not None:
                prepare(one, number)
            found.append(trained.step(number))
        return found

    found: dict[str, Any] = {"wrong": [], "recomputed": 0, "opaque": 0, "products": 0}
    for budget in (None, 0.7):
        expected = stepped(0, plain)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            patched.patch(merge=False, solver="heu", profile="estimate", memory_budget=budget)
            got = stepped(1, ours)
        assert patched._steps is not None
        (chunk,) = patched._steps.chunks.values()
        for agreed in filter(None, chunk._planning.agreed.values()):
            ops = agreed.report.problem.trace.ops
            found["opaque"] = sum(op.name.startswith("opaque_forward") for op in ops)
            found["products"] = sum(op.signature.startswith("aten.mm") for op in ops)
            found["recomputed"] += len(agreed.report.plan.recomputed)
        found["plain"], found["why"] = chunk.ran["plain"], chunk.why_plain
        found["told"] = [str(each.message) for each in told if "overlapc" in str(each.message)]
        for pair in zip(expected, got, strict=True):
            found["wrong"] += differences(*pair)
        patched.unpatch()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["0.16.1", pytest.param("0.19.2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
    ],
)
def test_what_megatron_compiles_is_one_op_each(version: str, names: tuple[str, ...]) -> None:
    """Its layers are planned op by op all the same."""
    cpu.need(version)
    (found,) = run_ranks(on_rank, 1, version, list(names), timeout_s=250)
    for name in names:
        one = found[name]
        assert (one["wrong"], one["why"], one["told"], one["plain"]) == ([], [], [], 0), name
        assert one["recomputed"], name
        assert one["products"] >= 3 * 4 * 2, name
    # The activation, its backward and two additions in each of three layers; one op in each of two;
    # of gated experts the activation and its backward, in two layers.
    counts = {"functions": 12, "gates": 2, "an activation": 2, "gated experts": 2 * 2 * 4}
    for name in counts.keys() & found.keys():
        assert found[name]["opaque"] == counts[name], name


Steps = Callable[[Any, int], None]
SIMPLER = ("reads a parameter", "static")  # of `found_modules`: for `make test-all`


def found_modules() -> dict[str, tuple[type, Steps | None]]:
    """MLPs of a user's, by what is special about their fused functions, and what a script does to
    each before a step."""
    from megatron.core.jit import jit_fuser
    from megatron.core.transformer.mlp import MLP

    class Own(MLP):  # type: ignore[misc]
        def forward(self, x: Tensor, **more: Any) -> Any:
            return super().forward(self.scaled(x), **more)

    class Reading(Own):
        @jit_fuser  # type: ignore[untyped-decorator]
        def scaled(self, x: Tensor) -> Tensor:
            return x * self.gain

    class Counting(Own):
        """Its buffer is written in the trace, and read by the method."""

        def forward(self, x: Tensor, **more: Any) -> Any:
            self.count += 1
            return super().forward(x, **more)

        @jit_fuser  # type: ignore[untyped-decorator]
        def scaled(self, x: Tensor) -> Tensor:
            return x * (1 + self.count / 10)

    class Nested(Reading):
        @jit_fuser  # type: ignore[untyped-decorator]
        def scaled(self, x: Tensor) -> Tensor:
            return super().scaled(x).tanh()

    class Static(Own):
        @staticmethod
        @jit_fuser  # type: ignore[untyped-decorator]
        def scaled(x: Tensor) -> Tensor:
            return x.tanh()

    class Changed(Own):
        """From the second step on it draws random numbers."""

        drops = False

        @jit_fuser  # type: ignore[untyped-decorator]
        def scaled(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.1) if self.drops else x.tanh()

    def drop(mlp: Any, number: int) -> None:
        mlp.drops = number > 0

    return {
        "reads a parameter": (Reading, None),
        "reads a written buffer": (Counting, None),
        "calls another": (Nested, None),
        "static": (Static, None),
        "changes between steps": (Changed, drop),
    }


def own_modules() -> dict[str, tuple[type, Steps | None]]:
    return {name: made for name, made in found_modules().items() if name not in SIMPLER}


def simpler_modules() -> dict[str, tuple[type, Steps | None]]:
    return {name: made for name, made in found_modules().items() if name in SIMPLER}


def not_found() -> dict[str, tuple[type, Steps | None]]:
    """The same of what is fused where nobody looks, or cannot be one op."""
    from megatron.core.jit import jit_fuser
    from megatron.core.transformer.mlp import MLP

    class Helper:
        @jit_fuser  # type: ignore[untyped-decorator]
        def scaled(self, x: Tensor) -> Tensor:
            return x.tanh()

    class Helped(MLP):  # type: ignore[misc]
        helper = Helper()

        def forward(self, x: Tensor, **more: Any) -> Any:
            return super().forward(self.helper.scaled(x), **more)

    class Holding(MLP):  # type: ignore[misc]
        """Its function reads a parameter that its closure has."""

        def forward(self, x: Tensor, **more: Any) -> Any:
            return super().forward(self.scaled(x), **more)

    def hold(mlp: Any, number: int) -> None:
        if number == 0:
            mlp.scaled = jit_fuser(lambda x: x * mlp.gain)

    @dataclass(frozen=True)
    class Frozen:
        scaled: Any

    class Configured(MLP):  # type: ignore[misc]
        """Its configuration, which has the function, cannot be changed."""

        def forward(self, x: Tensor, **more: Any) -> Any:
            return super().forward(self.inner(x), **more)

    class Around(Configured):
        """Its inner module is compiled in place."""

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.config.scaled(x)
            return out

    def configure(mlp: Any, number: int) -> None:
        if number == 0:
            mlp.inner = Inner()
            mlp.inner.config = Frozen(jit_fuser(torch.tanh))

    class Tanh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh()

    def compile_in_place(mlp: Any, number: int) -> None:
        if number == 0:
            mlp.inner = Tanh()
            mlp.inner.compile(backend=cpu.kernels)

    class Writing(MLP):  # type: ignore[misc]
        @jit_fuser  # type: ignore[untyped-decorator]
        def scaled(self, x: Tensor, mask: Tensor) -> Tensor:
            mask.mul_(2)
            return x * mask

        def forward(self, x: Tensor, **more: Any) -> Any:
            mask = torch.ones_like(x, requires_grad=False)
            return super().forward(self.scaled(x, mask) + mask, **more)

    return {
        "in a helper": (Helped, None),
        "closure over a parameter": (Holding, hold),
        "changes an argument": (Writing, None),
        "in a frozen configuration": (Configured, configure),
        "by a module's method": (Around, compile_in_place),
    }


def with_own(rank: int, ranks: int, version: str, make: str) -> dict[str, Any]:
    cpu.use(version, fused=True)
    dist.init_process_group("gloo")
    layout = Layout(**SHORT, ddp=None)
    set_up(layout)
    found = {}
    for name, (kind, change) in globals()[make]().items():
        trained = twins(layout)
        mlps = [[layer.mlp for layer in innermost(t.models[0]).decoder.layers] for t in trained]
        for mlp in chain(*mlps):
            mlp.__class__ = kind
            mlp.gain = nn.Parameter(torch.linspace(0.5, 1.5, layout.width))
            mlp.register_buffer("count", torch.zeros(()))

        def prepare(one: int, number: int, mlps: Any = mlps, change: Any = change) -> None:
            for mlp in mlps[one] if change else ():
                change(mlp, number)

        found[name] = compared(*trained, prepare)
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["0.16.1", pytest.param("0.19.2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("make", "warns"),
    [
        pytest.param(own_modules, False, id="found", marks=pytest.mark.slow),
        pytest.param(simpler_modules, False, id="simpler", marks=pytest.mark.slow),
        pytest.param(not_found, True, id="elsewhere", marks=pytest.mark.slow),
    ],
)
def test_what_a_user_fuses_runs_fused(version: str, make: Any, warns: bool) -> None:
    """It is one op, or with a warning its module is: nothing runs unfused, then or later."""
    cpu.need(version)
    (found,) = run_ranks(with_own, 1, version, make.__name__, timeout_s=250)
    for name, one in found.items():
        assert (one["wrong"], one["why"], one["plain"], one["opaque"]) == ([], [], 0, 2), name
        assert bool(one["told"]) == warns, name
        assert all("runs as one op" in told for told in one["told"]), name
