"""What Megatron fuses by `torch.compile` is one op each, wherever it is: a function, a method of a
module's class, or a function that a module has been given."""

from __future__ import annotations

import warnings
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
LAYOUTS = {
    "functions": Layout(
        **{**SHORT, "layers": 3},
        config={"bias_dropout_fusion": True, "bias_activation_fusion": True},
    ),
    "experts": Layout(**SHORT, experts=4),
    "a bias of experts": Layout(**SHORT, experts=4, config=BIAS),
    "gates": Layout(**SHORT, config={"attention_output_gate": True}),
    "an activation": Layout(**SHORT, config={"activation_func": "squared_relu"}),
    "a method with a parameter": Layout(**SHORT, ddp=None),
}


QUICK = ("functions", "a bias of experts", "a method with a parameter")
OTHERS = ("experts", "gates", "an activation")


def on_rank(rank: int, ranks: int, version: str, names: list[str]) -> dict[str, Any]:
    cpu.use(version, fused=True)
    from megatron.core import activations

    dist.init_process_group("gloo")
    found = {}
    for name in names:
        layout = LAYOUTS[name]
        if activation := layout.config.get("activation_func"):
            layout.config["activation_func"] = getattr(activations, activation)
        set_up(layout)
        plain, ours = twins(layout)
        if name == "a method with a parameter":
            for trained in (plain, ours):
                _scale(trained)
        found[name] = compared(plain, ours)
    dist.destroy_process_group()
    return found


def _scale(trained: Trained) -> None:
    """Let a fused method scale what each MLP is given, by a parameter and by a number."""
    from megatron.core.jit import jit_fuser
    from megatron.core.transformer.mlp import MLP

    class Scaling(MLP):  # type: ignore[misc]
        @jit_fuser  # type: ignore[untyped-decorator]
        def scaled(self, x: Tensor) -> Tensor:
            return x * self.gain * self.times

        def forward(self, x: Tensor, **more: Any) -> Any:
            return super().forward(self.scaled(x), **more)

    for layer in innermost(trained.models[0]).decoder.layers:
        layer.mlp.__class__ = Scaling
        layer.mlp.gain = nn.Parameter(torch.linspace(0.5, 1.5, 32))
        layer.mlp.times = 1.25


def compared(plain: Trained, ours: Trained) -> dict[str, Any]:
    import overlapc.megatron as patched

    found: dict[str, Any] = {"wrong": [], "recomputed": 0, "opaque": 0, "products": 0}
    for budget in (None, 0.7):
        expected = [plain.step(number) for number in range(2)]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            patched.patch(merge=False, solver="heu", profile="estimate", memory_budget=budget)
            got = [ours.step(number) for number in range(2)]
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
    # The activation, its backward and two additions in each of three layers; others in each of two.
    opaque = {name: one["opaque"] for name, one in found.items()}
    expected = {"functions": 12, "gates": 2, "an activation": 2, "a method with a parameter": 2}
    assert {name: opaque[name] for name in expected if name in names} == {
        name: count for name, count in expected.items() if name in names
    }
