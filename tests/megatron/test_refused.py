"""What overlapc does not take over is named, and what is not in its way is not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlapc
from overlapc.core.errors import OptionError, RankError
from overlapc.megatron.steps import innermost
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, set_up
from tests.multiprocess.spawn import run_ranks

pytestmark = pytest.mark.multiprocess

# A field of a config, a value that turns it on, and how the refusal begins.
ASKED: list[tuple[str, Any, str]] = [
    ("fp8", "hybrid", "FP8 and FP4 recipes (fp8='hybrid')"),
    ("fp4", "e2m1", "FP8 and FP4 recipes (fp4='e2m1')"),
    ("enable_cuda_graph", True, "CUDA graphs"),
    ("external_cuda_graph", True, "CUDA graphs"),
    ("cuda_graph_impl", "local", "CUDA graphs (cuda_graph_impl='local')"),
    ("use_megatron_fsdp", True, "Megatron-FSDP"),
    ("cpu_offloading", True, "CPU offloading"),
    ("fine_grained_activation_offloading", True, "fine-grained offloading"),
    ("hybrid_context_parallel", True, "hybrid context parallelism"),
    ("moe_flex_dispatcher_backend", "ncclep", "NCCL EP (moe_flex_dispatcher_backend='ncclep')"),
    ("moe_expert_rank_capacity_factor", 1.5, "a budget of tokens for each rank of experts"),
    ("use_transformer_engine_op_fuser", True, "the op fuser of Transformer Engine"),
    ("tp_comm_overlap", True, "userbuffers"),
    ("overlap_moe_expert_parallel_comm", True, "combined 1F1B of expert parallelism"),
    ("defer_embedding_wgrad_compute", True, "deferred weight gradients"),
    ("gtp_weight_remat_size", 2, "weights in shards"),
    ("overlap_dispatch_backward_with_experts_wgrad", True, "weight gradients of experts"),
]
ASKED_FROM_0_19 = (
    "moe_expert_rank_capacity_factor",
    "use_transformer_engine_op_fuser",
    "gtp_weight_remat_size",
    "overlap_dispatch_backward_with_experts_wgrad",
)


def reasons(rank: int, ranks: int, version: str) -> dict[str, Any]:
    cpu.use(version)
    dist.init_process_group("gloo")
    set_up(Layout(ranks=1))
    from megatron.core.distributed import TorchFullyShardedDataParallel

    from overlapc.megatron import merged
    from overlapc.megatron.refused import reason

    sharing = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    model = Trained(Layout(ranks=1, ddp=dict.fromkeys(sharing, True))).models[0]
    assert model.remove_forward_pre_hook_handles, "expected hooks of Megatron's own"
    inner = model.module
    found: dict[str, Any] = {"plain": reason(model), "absent": []}
    for name, value, _ in ASKED:
        owner = model.ddp_config if name == "use_megatron_fsdp" else inner.config
        if not hasattr(owner, name):
            found["absent"].append(name)
            continue
        before = getattr(owner, name)
        setattr(owner, name, value)
        found[name] = reason(model)
        setattr(owner, name, before)

    sharded = TorchFullyShardedDataParallel.__new__(TorchFullyShardedDataParallel)
    torch.nn.Module.__init__(sharded)
    sharded.module = inner
    found["wrapper"] = reason(sharded)
    found["torch's"] = reason(torch.nn.parallel.DistributedDataParallel(inner))

    several = {"p2p_communicator": OfSeveralModels(), "pg_collection": object()}
    found["several models"] = merged.refused(several, inner.config)
    handle = inner.decoder.layers[0].register_forward_hook(foreign)
    found["module hook"] = reason(model)
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(foreign)
    found["hook on all"] = reason(model)
    handle.remove()
    handle = next(inner.parameters()).register_post_accumulate_grad_hook(foreign)
    found["hook behind a sum"] = reason(model)
    handle.remove()
    handle = next(inner.parameters()).register_hook(foreign)
    found["gradient hook"] = reason(model)
    handle.remove()
    return found


def foreign(*_: Any) -> None: ...


class OfSeveralModels:
    """A communicator between stages that is not Megatron's `P2PCommunicator`."""


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_what_is_refused_is_named(version: str) -> None:
    cpu.need(version)
    (found,) = run_ranks(reasons, 1, version)
    assert found["plain"] == ""
    assert set(found["absent"]) <= {"hybrid_context_parallel", "fp4", *ASKED_FROM_0_19}
    for name, _, expected in ASKED:
        if name not in found["absent"]:
            assert found[name].startswith(expected), name
    assert "TorchFullyShardedDataParallel" in found["wrapper"]
    assert found["torch's"].startswith("torch's DistributedDataParallel: it reduces gradients")
    assert found["several models"].endswith("between stages that is a OfSeveralModels")
    assert "foreign in decoder.layers.0.forward_hooks" in found["module hook"]
    assert "foreign in all modules' forward_hooks" in found["hook on all"]
    assert "foreign in" in found["hook behind a sum"]
    assert "foreign in" in found["gradient hook"]


def one_sided(rank: int, ranks: int, version: str) -> dict[str, Any]:
    """Two steps, of ranks of which one alone has a hook that is not Megatron's."""
    cpu.use(version)
    dist.init_process_group("gloo")
    layout = Layout(tp=2)
    set_up(layout)
    import overlapc.megatron as patched

    plain, ours = Trained(layout), Trained(layout)
    ours.random = dict(plain.random)
    expected = [loss for number in range(2) for loss in plain.step(number)["losses"]]
    if rank == 1:
        innermost(ours.models[0])[0].decoder.register_forward_hook(foreign)
    patched.patch(profile="estimate")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = [loss for number in range(2) for loss in ours.step(number)["losses"]]
    return {
        "warned": [str(each.message) for each in warned if "overlapc" in str(each.message)],
        "explained": patched.explain(),
        "same": all(map(torch.equal, expected, found)),
    }


def test_a_refusal_of_one_rank_is_one_warning_on_all() -> None:
    cpu.need("0.16.1")
    for found in run_ranks(one_sided, 2, "0.16.1"):
        (warned,) = found["warned"]
        assert "overlapc leaves this run to plain Megatron: a hook that is not" in warned
        assert warned.endswith("(on rank 1)")
        assert warned.rpartition(": a hook")[2] in found["explained"]
        assert found["same"]


OF_ONE_STAGE: tuple[dict[str, Any], ...] = ({"schedule": "merged"}, {"fill": False}, {"slices": 2})


def of_one_stage(rank: int, ranks: int, version: str) -> list[str]:
    """The errors of a step of two stages, of which the second alone has some option."""
    cpu.use(version)
    dist.init_process_group("gloo")
    layout = Layout(pp=2)
    set_up(layout)
    import overlapc.megatron as patched

    model, found = Trained(layout), []
    for options in OF_ONE_STAGE:
        patched.patch(profile="estimate", **(options if rank else {}))
        with pytest.raises(RankError) as told:
            model.step(0)
        found.append(str(told.value))
        dist.barrier()
    return found


def test_an_option_of_one_stage_is_an_error_on_all_ranks() -> None:
    cpu.need("0.16.1")
    for found in run_ranks(of_one_stage, 2, "0.16.1"):
        assert [each.partition("; expected")[0] for each in found] == [
            "the ranks disagree on schedule: rank 0 holds schedule='1f1b'; "
            "rank 1 holds schedule='merged'",
            "the ranks disagree on fill: rank 0 holds fill=True; rank 1 holds fill=False",
            "the ranks disagree on slices: rank 0 holds slices=1; rank 1 holds slices=2",
        ]


def at_other_doors(rank: int, ranks: int, version: str) -> list[str]:
    cpu.use(version)
    dist.init_process_group("gloo")
    set_up(Layout(ranks=1))
    model = Trained(Layout(ranks=1, ddp=None)).models[0]
    found = []
    for door in (overlapc.optimize, overlapc.TrainStep, pipeline):
        with pytest.raises(OptionError) as told:
            door(torch.nn.Sequential(model))
        found.append(str(told.value))
    return found


def pipeline(model: torch.nn.Module) -> overlapc.Pipeline:
    return overlapc.Pipeline({0: model}, "1f1b", 2, loss=torch.nn.functional.mse_loss)


def test_other_doors_say_where_a_model_of_megatrons_goes() -> None:
    cpu.need("0.16.1")
    (found,) = run_ranks(at_other_doors, 1, "0.16.1")
    for door, told in zip(("optimize", "TrainStep", "Pipeline"), found, strict=True):
        assert told.startswith(f"{door} was given Megatron's GPTModel (0)"), told
        assert "overlapc.megatron.patch()" in told
