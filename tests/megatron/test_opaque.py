"""What no trace enters is one op of a planned chunk, and tensors that modules have are inputs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, innermost, set_up, twins
from tests.megatron.test_patch import differences
from tests.multiprocess.spawn import run_ranks
from tests.torch.test_opaque import Numpy

pytestmark = pytest.mark.multiprocess

LAYOUTS = {
    "tp": Layout(tp=2, dropout=0.1, merge=False, microbatches=3),
    "tp, less memory": Layout(
        tp=2,
        dropout=0.1,
        merge=False,
        microbatches=3,
        options={"memory_budget": 0.85, "solver": "overlap"},
    ),
    "tp, merged": Layout(tp=2, layers=1, microbatches=3),
    "pp": Layout(pp=2, layers=4, microbatches=3),
}


def on_rank(rank: int, ranks: int, version: str, names: list[str]) -> dict[str, Any]:
    cpu.use(version)
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.mlp import MLP

    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    real = DotProductAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Numpy.apply(real(self, *args, **kwargs)) * self.gain

    DotProductAttention.forward = forward  # type: ignore[method-assign]
    mlp = MLP.forward
    # While a layer of 0.19 runs its MLP, it has an attribute that it has not before and after.
    MLP.forward = lambda self, x, **more: mlp(self, Numpy.apply(x), **more)  # type: ignore[method-assign]
    found = {}
    for name in names:
        set_up(LAYOUTS[name])
        plain, ours = twins(LAYOUTS[name])
        expected = run(plain)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            options = {"solver": "heu", "profile": "estimate", **LAYOUTS[name].options}
            patched.patch(merge=LAYOUTS[name].merge, **options)
            got = run(ours)
        assert patched._steps is not None
        found[name] = {
            "wrong": [
                f"step {number}: {difference}"
                for number, (one, other) in enumerate(zip(expected, got, strict=True))
                for difference in differences(one, other)
            ],
            "ran": [dict(chunk.ran) for chunk in patched._steps.chunks.values()],
            "told": [str(each.message) for each in told if "overlapc" in str(each.message)],
        }
        patched.unpatch()
        dist.barrier()
    dist.destroy_process_group()
    return found


def run(trained: Trained) -> list[dict[str, Any]]:
    """Steps between which tensors that modules have as plain attributes change, or are replaced:
    of modules that a trace enters, and of those that it does not."""
    inner = innermost(trained.models[0])
    kernels = [layer.self_attention.core_attention for layer in inner.decoder.layers]
    for kernel in kernels:
        kernel.gain = torch.tensor(2.0)
    found = [trained.step(0)]
    kernels[0].gain.fill_(0.5)
    inner.rotary_pos_emb.inv_freq.mul_(0.5)
    inner.rotary_pos_emb.forward.cache_clear()
    found.append(trained.step(1))
    kernels[0].gain = torch.tensor(3.0)
    inner.rotary_pos_emb.inv_freq = inner.rotary_pos_emb.inv_freq * 3
    inner.rotary_pos_emb.forward.cache_clear()
    found.append(trained.step(2))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["0.16.1", pytest.param("0.19.2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(tuple(LAYOUTS)[:1], id="quick"),
        pytest.param(tuple(LAYOUTS)[1:], id="others", marks=pytest.mark.slow),
    ],
)
def test_a_chunk_is_planned_around_what_no_trace_enters(
    version: str, names: tuple[str, ...]
) -> None:
    cpu.need(version)
    for found in run_ranks(on_rank, 2, version, list(names), timeout_s=250):
        for name in names:
            one = found[name]
            assert one["wrong"] == [], name
            other = [told for told in one["told"] if "runs as one op, by its own" not in told]
            assert other == [], name
            for ran in one["ran"]:
                assert (ran["planned"], ran["plain"]) == (9, 0), name
