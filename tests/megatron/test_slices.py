"""Microbatches in slices against plain Megatron that gets each slice as a microbatch of its own."""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlapc.core.errors import OptionError
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, innermost, loss_of, set_up, twins
from tests.megatron.test_patch import AHEAD, QUICK, SHARDED, differences
from tests.megatron.test_shapes import given_other_shapes
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

TOLERANCE = 1e-4
FOUR = dict(batch=4, microbatches=2)
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
EXPERTS = dict(ep=2, experts=4)
DROPLESS = {"moe_router_load_balancing_type": "none"}
OF_SAMPLES = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 1e-2}
OF_TOKENS = {**DROPLESS, "moe_z_loss_coeff": 1e-2, "calculate_per_token_loss": True}
LAYOUTS = {
    "tp, sequence": Layout(tp=2, layers=1, config={"sequence_parallel": True}, **FOUR),
    "pp": Layout(pp=2, **FOUR),
    "ep": Layout(layers=1, config=DROPLESS, tokens=True, **EXPERTS, **FOUR),
}
MORE = {
    "one": Layout(tp=2, layers=1, batch=4, microbatches=1),
    "tp": Layout(tp=2, tokens=True, batch=4, microbatches=3),
    "one rank": Layout(ranks=1, layers=1, **FOUR),
    "in four": Layout(tp=2, layers=1, batch=8, microbatches=2, options={"slices": 4}),
    "as many samples as tokens": Layout(tp=2, sequence=4, layers=1, **FOUR),
    "as many tokens of a rank": Layout(
        tp=2, sequence=8, layers=1, config={"sequence_parallel": True}, **FOUR
    ),
    "as many samples as width": Layout(pp=2, batch=32, microbatches=2),
    "less memory": Layout(tp=2, options={"memory_budget": 0.7}, **FOUR),
    "bf16": Layout(tp=2, layers=1, config={"bf16": True}, **FOUR),
    "fused, tied": Layout(
        tp=2, tied=True, config={"gradient_accumulation_fusion": True, "bf16": True}, **FOUR
    ),
    "sharded": Layout(ddp=SHARDED, **FOUR),
    "reduced early": Layout(ddp={"overlap_grad_reduce": True}, tied=True, layers=1, **FOUR),
    "without ddp": Layout(tp=2, ddp=None, **FOUR),
    "recompute": Layout(tp=2, config=FULL, **FOUR),
    "scaled": Layout(tp=2, scale=64.0, **FOUR),
    "experts, samples": Layout(layers=1, config=OF_SAMPLES, **EXPERTS, **FOUR),
    "experts, tokens": Layout(layers=1, config=OF_TOKENS, tokens=True, **EXPERTS, **FOUR),
    "experts, scaled": Layout(layers=1, config=OF_SAMPLES, scale=8.0, **EXPERTS, **FOUR),
    "gathered experts": Layout(
        layers=1, config={**DROPLESS, "moe_token_dispatcher_type": "allgather"}, **EXPERTS, **FOUR
    ),
    "shared experts": Layout(
        layers=1, config={**DROPLESS, "moe_shared_expert_intermediate_size": 32}, **EXPERTS, **FOUR
    ),
    "pp, freed": Layout(pp=2, config={"deallocate_pipeline_outputs": True}, **FOUR),
    "pp, not filled": Layout(pp=2, options={"fill": False}, **FOUR),
    "pp, less memory": Layout(pp=2, layers=4, batch=4, options={"memory_budget": 0.7}),
    "merged 1f1b": Layout(pp=2, batch=4, options={"schedule": "merged"}),
    "interleaved": Layout(pp=2, vpp=2, layers=4, batch=4),
    "tp, pp": Layout(ranks=4, tp=2, pp=2, batch=4),
    "tp, pp, sequence": Layout(ranks=4, tp=2, pp=2, batch=4, config={"sequence_parallel": True}),
    "tp, pp, merged": Layout(ranks=4, tp=2, pp=2, batch=4, options={"schedule": "merged"}),
    "pp, sharded": Layout(ranks=4, pp=2, ddp=SHARDED, batch=4),
    "experts, pp": Layout(ranks=4, pp=2, tokens=True, config=DROPLESS, batch=4, **EXPERTS),
    "experts, tp": Layout(
        ranks=4,
        tp=2,
        etp=1,
        tokens=True,
        config={**DROPLESS, "sequence_parallel": True},
        layers=1,
        **EXPERTS,
        **FOUR,
    ),
}
# Slices drop what the whole microbatch drops, not what small microbatches do.
DROPPING = {
    "dropout": Layout(tp=2, layers=1, dropout=0.1, config={"sequence_parallel": True}, **FOUR),
    "dropout, recompute": Layout(
        tp=2, dropout=0.1, config={"sequence_parallel": True, **FULL}, **FOUR
    ),
    "dropout, pp": Layout(pp=2, dropout=0.1, **FOUR),
    "dropout, experts": Layout(layers=1, dropout=0.1, config=DROPLESS, **EXPERTS, **FOUR),
}
ALL = LAYOUTS | MORE | DROPPING


def count_of(layout: Layout) -> int:
    count = layout.options.get("slices", 2)
    return 2 if count == "auto" else count


def step_of(tokens: bool, data: Any, model: Any, *_: Any, **__: Any) -> Any:
    """A forward step whose logged loss is that of each token. Of the mean all tokens count, so
    that a slice's gradient is the same power of two as a microbatch's."""
    given, labels = next(data)
    batch, sequence = given.shape
    places = torch.arange(sequence).unsqueeze(0).expand(batch, -1)
    mask = torch.triu(torch.ones(sequence, sequence, dtype=torch.bool), 1)[None, None]
    out = model(given, places, mask, labels=labels)
    counted = labels % 3 != 0 if tokens else torch.ones_like(labels)

    def loss(out: Tensor, **_: Any) -> Any:
        *found, _ = loss_of(counted, tokens, out)
        return *found, {"loss": out.detach().clone()}

    return out, loss


def given_each(trained: Trained, count: int = 1) -> None:
    """Train with `step_of`, and with each of `count` slices as a microbatch of its own."""
    real = trained._given

    def given(number: int) -> dict[str, Any]:
        found = real(number)
        several = isinstance(found["data_iterator"], list)
        each = [*(found["data_iterator"][0] if several else found["data_iterator"])]
        parts = [
            part for pair in each for part in zip(*(t.chunk(count) for t in pair), strict=True)
        ]
        data = [iter(parts) for _ in trained.models]
        return found | {
            "forward_step_func": functools.partial(step_of, trained.layout.tokens),
            "data_iterator": data if several else data[0],
            "num_microbatches": len(parts),
            "micro_batch_size": trained.layout.batch // count,
        }

    trained._given = given  # type: ignore[method-assign]


def trained_in_slices(layout: Layout) -> tuple[dict[str, Any], list[Any], list[Any], list[Any]]:
    """What ran and was told, and the steps uncut, with slices as microbatches, and in slices."""
    import overlapc.megatron as patched

    set_up(layout)
    count = count_of(layout)
    (uncut, ours), (plain, _) = twins(layout), twins(layout)
    plain.random = {name: state.clone() for name, state in uncut.random.items()}
    for trained in (uncut, ours):
        given_each(trained)
    given_each(plain, count)
    whole = [uncut.step(number) for number in range(2)]
    apart = [plain.step(number) for number in range(2)]
    options = {"slices": count, "solver": "heu", "profile": "estimate", "merge": layout.merge}
    options |= layout.options
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patched.patch(**options)
        try:
            found = [ours.step(number) for number in range(2)]
            assert patched._steps is not None
            chunks = [*patched._steps.chunks.values()]
            ran = {
                "ran": [dict(chunk.ran) for chunk in chunks],
                "slices": [each and each.slices for c in chunks for each in c._planned.values()],
                "told": [str(one.message) for one in told if "overlapc" in str(one.message)],
                "explained": patched.explain(),
            }
        finally:
            patched.unpatch()
    return ran, whole, apart, found


def compared(layout: Layout) -> dict[str, Any]:
    ran, whole, apart, found = trained_in_slices(layout)
    count = count_of(layout)
    wrong = []
    for number, (one, other) in enumerate(zip(apart, found, strict=True)):
        one["losses"] = [
            torch.cat(one["losses"][i : i + count]) for i in range(0, len(one["losses"]), count)
        ]
        alike = ("losses", "gradients", "parameters", "buffers")
        names = alike if not layout.dropout else ()
        wrong += [
            f"step {number}: {d}"
            for d in differences(*({n: x[n] for n in names} for x in (one, other)))
        ]
    (first, _), (ours, _) = whole, found
    return {
        **ran,
        "wrong": wrong,
        "apart": max(far(first[n], ours[n]) for n in ("losses", "gradients", "logged")),
        "random": differences(*({"random states": x["random states"]} for x in (first, ours))),
    }


def far(expected: list[Any], found: list[Any]) -> float:
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None]
    largest = max((float(a.abs().max()) for a, _ in pairs if a.numel()), default=0.0)
    distance = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    return distance / (largest or 1.0)


def on_rank(rank: int, ranks: int, version: str, names: list[str]) -> dict[str, Any]:
    cpu.use(version)
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        found[name] = compared(ALL[name])
        dist.barrier()
    dist.destroy_process_group()
    return found


@functools.cache
def ran(version: str, ranks: int, quick: bool) -> list[dict[str, Any]]:
    cpu.need(version)
    names = [n for n, each in ALL.items() if each.ranks == ranks and (n in LAYOUTS) == quick]
    return run_ranks(on_rank, ranks, version, names, timeout_s=290 if quick else 890)


def check(version: str, name: str) -> None:
    layout = ALL[name]
    count = 2 * layout.microbatches
    for found in ran(version, layout.ranks, name in LAYOUTS):
        one = found[name]
        assert [one["wrong"], one["random"], one["told"]] == [[], [], []]
        assert {*one["slices"]} == {count_of(layout)}
        assert one["apart"] < (0.05 if layout.config.get("bf16") else TOLERANCE)
        assert len(one["ran"]) == (layout.vpp or 1)
        for chunk in one["ran"]:
            assert (chunk["planned"], chunk["plain"], chunk["merged"]) == (count, 0, 0)
            if layout.pp > 1 and not layout.options:
                assert chunk["late"] == count
        assert "tensors cut: " in one["explained"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("version", "name"),
    [
        pytest.param(v, n, marks=[pytest.mark.slow] * (v != QUICK[-1]))
        for v in QUICK
        for n in LAYOUTS
    ],
)
def test_slices_are_megatrons_small_microbatches(version: str, name: str) -> None:
    check(version, name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", QUICK)
@pytest.mark.parametrize("name", [*MORE, *DROPPING])
def test_so_they_are_in_other_layouts(version: str, name: str) -> None:
    check(version, name)


class Centred(torch.nn.Module):
    """What sees the whole microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


CAPACITY = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
REFUSED = {
    "three samples": (Layout(tp=2, layers=1, batch=3), "found --micro-batch-size 3"),
    "capacity": (Layout(layers=1, config=CAPACITY, **EXPERTS), "--moe-expert-capacity-factor"),
    "balanced": (Layout(layers=1, **EXPERTS), "--moe-router-load-balancing-type aux_loss"),
    "samples": (
        Layout(layers=1, config=OF_SAMPLES, tokens=True, **EXPERTS),
        "seq_aux_loss with --calculate-per-token-loss",
    ),
    "ahead": (Layout(tp=2, layers=1, config=AHEAD), "found --mtp-num-layers"),
    "counting": (
        Layout(layers=1, config=BIAS, **EXPERTS),
        "the forward changes decoder.layers.0.mlp.router.local_tokens_per_expert",
    ),
    "centred": (Layout(pp=2, microbatches=3), "stage 1: slices=2: the result is another in slices"),
}


def refusals(rank: int, ranks: int, version: str) -> dict[str, Any]:
    cpu.use(version)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    found = {}
    for name, (layout, _) in REFUSED.items():
        set_up(layout)
        trained = Trained(layout)
        decoder = innermost(trained.models[0]).decoder
        if name == "centred" and rank == 1:
            decoder.final_layernorm = Centred()
        patched.patch(slices=2, solver="heu", profile="estimate")
        try:
            trained.step(0)
            found[name] = "nothing"
        except OptionError as error:
            found[name] = str(error)
        found[f"{name}, left"] = "forward" in vars(innermost(trained.models[0]))
        patched.unpatch()
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "version", [pytest.param(v, marks=[pytest.mark.slow] * (v != QUICK[-1])) for v in QUICK]
)
def test_what_sees_the_whole_microbatch_is_refused_on_every_rank(version: str) -> None:
    cpu.need(version)
    for found in run_ranks(refusals, 2, version, timeout_s=190):
        for name, (_, said) in REFUSED.items():
            assert said in found[name]
            assert not found[f"{name}, left"]


LATER = Layout(layers=1, **FOUR)  # two replicas


def refused_later(rank: int, ranks: int, version: str) -> dict[str, Any]:
    """A replica meets another shape in the second step; the other has nothing to refuse."""
    cpu.use(version)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    set_up(LATER)
    trained = given_other_shapes(Trained(LATER), {(1, 1): (4, 8)})
    patched.patch(slices=2, solver="heu", profile="estimate")
    trained.step(0)
    before = [p.detach().clone() for p in trained.models[0].parameters()]
    begun, said = time.monotonic(), []
    for _ in range(2):  # the next step says so, too
        try:
            trained.step(1)
        except OptionError as error:
            said.append(str(error))
    kept = all(map(torch.equal, before, trained.models[0].parameters()))
    seconds = time.monotonic() - begun
    patched.unpatch()
    dist.barrier()
    dist.destroy_process_group()
    return {"said": said, "kept": kept, "seconds": seconds}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "version", [pytest.param(v, marks=[pytest.mark.slow] * (v != QUICK[-1])) for v in QUICK]
)
def test_what_one_replica_refuses_later_is_an_error_on_every_rank(version: str) -> None:
    cpu.need(version)
    for found in run_ranks(refused_later, 2, version, timeout_s=110):
        assert len(found["said"]) == 2
        for said in found["said"]:
            assert "stage 0: slices=2: found microbatches of shapes" in said
        assert found["kept"]
        assert found["seconds"] < 10


def one_step(rank: int, ranks: int, version: str) -> list[Any]:
    """The process ends right after its first step, without a barrier."""
    cpu.use(version)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    layout = LAYOUTS["pp"]
    set_up(layout)
    trained = Trained(layout)
    patched.patch(slices=2, solver="heu", profile="estimate")
    trained.step(0)
    if rank:
        time.sleep(0.5)  # rank 0 has left
    return [chunk.refused for chunk in patched._steps.chunks.values()]  # type: ignore[union-attr]


@pytest.mark.timeout(120)
def test_a_run_may_end_after_its_first_step() -> None:
    cpu.need(QUICK[-1])
    assert run_ranks(one_step, 2, QUICK[-1], timeout_s=110) == [[None], [None]]


AUTO = {
    "tp": Layout(tp=2, layers=1, batch=4, microbatches=2, options={"slices": "auto"}),
    "refused": Layout(layers=1, **EXPERTS, batch=4, merge=False, options={"slices": "auto"}),
    "nothing to hide": Layout(layers=1, ddp=SHARDED, batch=4, options={"slices": "auto"}),
}


def chosen(rank: int, ranks: int) -> dict[str, Any]:
    cpu.use(QUICK[-1])
    dist.init_process_group("gloo")
    found = {}
    for name, layout in AUTO.items():
        ran, whole, _, ours = trained_in_slices(layout)
        wrong = differences(whole[0], ours[0])
        found[name] = {
            **ran,
            "wrong": wrong,
            "apart": far(whole[0]["gradients"], ours[0]["gradients"]),
        }
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_the_number_of_slices_is_what_is_predicted_to_be_fastest() -> None:
    cpu.need(QUICK[-1])
    first, second = run_ranks(chosen, 2, timeout_s=200)
    for name in AUTO:
        assert first[name]["slices"] == second[name]["slices"]
        assert first[name]["apart"] < TOLERANCE
        assert first[name]["told"] == []
        if name != "tp":
            assert (first[name]["slices"], first[name]["wrong"]) == ([1], [])
    said = first["tp"]["explained"]
    assert all(f"{count} slices: tensors cut: " in said for count in (2, 4))
