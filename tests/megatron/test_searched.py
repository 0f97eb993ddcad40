"""A search.json that is not of this run: every mismatch in one error, with the flag to pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from overlapc.core.errors import OptionError
from overlapc.search.chosen import Chosen
from overlapc.search.layouts import Layout
from overlapc.solvers.pipeline.schedules import make_schedule
from tests.megatron import cpu, models
from tests.multiprocess.spawn import run_ranks

CHOSEN = Chosen(
    tp=2,
    pp=2,
    dp=1,
    microbatch=2,
    microbatches=1,
    schedule=make_schedule("1f1b", 2, 1),
    layers=(3, 5),
    memory_budgets=(10**9, 10**9),
    solver="heu",
    sequence_parallel=True,
    layout=Layout(2, 2, 1, 2, sequence=True),
    shapes={"layers": 8, "width": 64, "heads": 4, "ffn": 256, "kv_heads": 0, "seq": 16},
)
GIVEN = {"seq_length": 16, "micro_batch_size": 2, "num_microbatches": 1}


def errors(rank: int, ranks: int, version: str) -> dict[str, Any]:
    cpu.use(version)
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from overlapc.megatron.searched import check, layers_of

    def config(**more: Any) -> Any:
        parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
        shapes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
        dtypes = {"bf16": True, "pipeline_dtype": "bf16"}
        return TransformerConfig(
            **{**shapes, **parallel, **dtypes, "sequence_parallel": True, **more}
        )

    def error(
        chosen: Chosen, config: Any, given: dict[str, int], replicas: int, sums: Any = None
    ) -> str:
        try:
            check(chosen, config, sums, given, replicas)
        except OptionError as found:
            return str(found)
        return ""

    uneven = config(num_layers_in_first_pipeline_stage=3)
    laid_out = config(pipeline_model_parallel_layout="Et*3|t*5L")
    two = {"context_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}
    zero_bubble = replace(CHOSEN, layout=replace(CHOSEN.layout, schedule="zero-bubble"))
    experts = {"experts": 8, "top_k": 2, "expert_width": 32, "shared_width": 64}
    layout = replace(CHOSEN.layout, dp=4, shares_experts=False)
    of_experts = replace(
        CHOSEN,
        dp=4,
        layout=layout,
        shapes={**CHOSEN.shapes, **experts},
        expert_ranks=4,
        divides_optimizer=True,
    )
    moe = {
        "num_layers_in_first_pipeline_stage": 3,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 32,
        "add_bias_linear": False,
        "tensor_model_parallel_size": 2,
    }
    divided = {
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": 64,
    }
    dense = {"layers": 8, "width": 64, "heads": 4, "kv_heads": 0, "ffn": 256, "experts": 0}
    dense |= {"head_width": 0, "gated": True, "kv_rank": 0, "shared_width": 0}
    unlike = {**moe, "kv_channels": 32, "num_query_groups": 2, "mtp_num_layers": 1}
    chunked = replace(
        CHOSEN, layers=(2, 2, 2, 2), layout=replace(CHOSEN.layout, schedule="interleaved")
    )
    summed = DistributedDataParallelConfig(use_distributed_optimizer=True)
    gathered = {**moe, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}
    plain = DistributedDataParallelConfig()
    other = config(
        num_layers=6,
        hidden_size=32,
        sequence_parallel=False,
        tensor_model_parallel_size=1,
    )
    return {
        "same": error(CHOSEN, uneven, GIVEN, 1) + error(CHOSEN, laid_out, GIVEN, 1),
        "layers": [layers_of(one) for one in (config(), uneven, laid_out)]
        + [
            layers_of(
                config(
                    num_layers=6,
                    account_for_embedding_in_pipeline_split=True,
                    account_for_loss_in_pipeline_split=True,
                )
            )
        ],
        "interleaved": layers_of(config(virtual_pipeline_model_parallel_size=2)),
        "other": error(CHOSEN, other, {**GIVEN, "num_microbatches": 4, "micro_batch_size": 1}, 2),
        "experts": error(of_experts, config(**moe, **divided), GIVEN, 4, summed)
        + error(of_experts, config(**moe, **divided), GIVEN, 4, None),
        "no experts": error(of_experts, config(**gathered), GIVEN, 4, plain),
        "dense": error(replace(CHOSEN, shapes=dense), config(**unlike), GIVEN, 1),
        "first dense": error(
            replace(of_experts, shapes={**of_experts.shapes, "dense_first": 3}),
            config(**moe, **divided),
            GIVEN,
            4,
        ),
        "even": error(chunked, config(num_layers=4), GIVEN, 1),
        "zero-bubble": error(zero_bubble, uneven, GIVEN, 1),
        "context": {
            searched: [
                error(replace(CHOSEN, layout=layout), config(**two, cp_comm_type=kind), GIVEN, 1)
                for kind in ("all_gather", "p2p", None, ["p2p"] * 4 + ["all_gather"] * 4)
            ]
            for searched in ("all_gather", "p2p")
            for layout in [replace(CHOSEN.layout, cp=2, cp_comm_type=searched)]
        },
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_every_mismatch_is_in_one_error(version: str) -> None:
    cpu.need(version)
    (found,) = run_ranks(errors, 1, version)
    assert found["same"] == ""
    gathers, *others = found["context"]["all_gather"]
    assert gathers == ""
    for said, kinds in zip(others, ("p2p", "p2p", "all_gather p2p"), strict=True):
        assert f"context parallelism: found {kinds}, expected all_gather" in said
        assert "pass --cp-comm-type all_gather" in said
    gathers, *rings, mixed = found["context"]["p2p"]
    assert rings == ["", ""]  # Megatron's default is the ring
    for said, kinds in ((gathers, "all_gather"), (mixed, "all_gather p2p")):
        assert f"context parallelism: found {kinds}, expected p2p" in said
        assert "pass --cp-comm-type p2p" in said
    assert found["layers"] == [(4, 4), (3, 5), (3, 5), (3, 3)]
    assert found["interleaved"] == (2, 2, 2, 2)
    assert found["other"].splitlines()[1:-1] == [
        "  tensor-parallel ranks: found 1, expected 2: pass --tensor-model-parallel-size 2",
        "  sequence parallelism: found False, expected True: pass --sequence-parallel",
        "  layers of each stage: found (3, 3), expected (3, 5): pass --num-layers 8 "
        "--pipeline-model-parallel-layout 'Et*3|t*5L'",
        "  data-parallel ranks: found 2, expected 1: start 4 processes",
        "  sequences of a microbatch: found 1, expected 2: pass --micro-batch-size 2",
        "  microbatches of a step: found 4, expected 1: pass --global-batch-size 2",
        "  hidden_size: found 32, expected 64: pass --hidden-size 64",
        "  ffn_hidden_size: found 128, expected 256: pass --ffn-hidden-size 256",
    ]
    assert found["experts"] == ""
    assert found["no experts"].splitlines()[1:-1] == [
        "  expert-parallel ranks: found 2, expected 4: pass --expert-model-parallel-size 4",
        "  tensor-parallel ranks of an expert: found 2, expected 1: "
        "pass --expert-tensor-parallel-size 1",
        "  dispatcher of tokens: found allgather, expected alltoall: "
        "pass --moe-token-dispatcher-type alltoall",
        "  distributed optimizer: found False, expected True: pass --use-distributed-optimizer",
        "  moe_shared_expert_intermediate_size: found 0, expected 64: "
        "pass --moe-shared-expert-intermediate-size 64",
    ]
    assert found["dense"].splitlines()[1:-1] == [
        "  num_query_groups: found 2, expected 4: "
        "pass --group-query-attention --num-query-groups 4",
        "  kv_channels: found 32, expected 16: pass --kv-channels 16",
        "  num_moe_experts: found 8, expected 0: leave out --num-experts",
        "  gated MLP: found False, expected True: pass --swiglu",
        "  multi-token prediction: found True, expected False: leave out --mtp-num-layers: "
        "no search counts it, pass a memory_budget instead",
    ]
    assert found["first dense"].splitlines()[1:-1] == [
        "  layers with experts: found 8, expected 5: pass --moe-layer-freq '([0]*3+[1]*5)'"
    ]
    assert "  stages of a rank: found 1, expected 2: pass --num-virtual" in found["even"]
    assert "expected (2, 2, 2, 2): pass --num-layers 8\n" in found["even"]
    assert "Megatron does not have zero-bubble" in found["zero-bubble"]


def stepped(rank: int, ranks: int, version: str, chosen: Chosen) -> str:
    """What a step of two stages says under what a search chose: its budget, or the error."""
    cpu.use(version)
    dist.init_process_group("gloo")
    layout = models.Layout(pp=2, layers=4, microbatches=2)
    models.set_up(layout)
    import overlapc.megatron as patched
    import overlapc.search.chosen

    overlapc.search.chosen.load_search = lambda path: chosen
    patched.patch(search="search.json", profile="estimate")
    try:
        models.Trained(layout).step(0)
    except OptionError as error:
        return str(error)
    finally:
        dist.barrier()  # rank 0 has the store that the other may still read
    (chunk,) = patched._steps.chunks.values()
    (planned,) = chunk._planned.values()
    report = planned.program.report
    return f"{chunk._options.solver} {planned.slices} {report.problem.budget_bytes}"


@pytest.mark.slow
def test_a_search_gives_each_stage_its_budget_and_slices() -> None:
    cpu.need("0.16.1")
    chosen = replace(
        CHOSEN,
        tp=1,
        microbatches=2,
        layers=(2, 2),
        memory_budgets=(10**9 + 5, 2 * 10**9 + 7),
        gradient_bytes=(5, 7),  # which DDP adds up
        layout=Layout(1, 2, 1, 2),
        sequence_parallel=False,
        shapes={"layers": 4, "width": 32, "heads": 4, "seq": 16},
    )
    assert run_ranks(stepped, 2, "0.16.1", chosen) == ["heu 1 1000000000", "heu 1 2000000000"]
    sliced = replace(chosen, slices=2)
    assert run_ranks(stepped, 2, "0.16.1", sliced) == ["heu 2 1000000000", "heu 2 2000000000"]
    wrong = replace(chosen, microbatch=1, layers=(1, 3))
    first, second = run_ranks(stepped, 2, "0.16.1", wrong)
    assert first == second
    assert "sequences of a microbatch: found 2, expected 1: pass --micro-batch-size 1" in first
    assert "layers of each stage: found (2, 2), expected (1, 3)" in first
