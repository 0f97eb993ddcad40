"""`PATCHES`: all that overlapc replaces in PyTorch and in Megatron, where, and why. (What
`torch.compile` has fused in a model or in Megatron's modules is one op each in a trace, whatever
its name: `megatron/fused.py`.)

Nothing is replaced for longer than a trace or a call takes, but for Megatron's schedules while it
is patched. With a new release of either this is the list to go through; `missing` says what a
release no longer has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module

_DYNAMO = "torch._dynamo"
_MCORE = "megatron.core"


@dataclass(frozen=True)
class Patch:
    """A name that is replaced: `Python module:path of attributes`."""

    target: str
    where: str  # our file
    why: str


def _of(where: str, why: str, *targets: str) -> Iterator[Patch]:
    return (Patch(target, where, why) for target in targets)


PATCHES: tuple[Patch, ...] = (
    # Dynamo
    *_of(
        "runtime/skipped.py",
        "a function that Dynamo fails to trace is skipped, once the model's own code has begun",
        f"{_DYNAMO}.convert_frame:ConvertFrameAssert.__call__",
    ),
    *_of(
        "passes/capture/guarding.py",
        "guards on methods that a class has been given, and stand-ins for functions by name",
        f"{_DYNAMO}.symbolic_convert:InliningInstructionTranslator.build_inline_tracer",
    ),
    *_of(
        "passes/capture/guarding.py",
        "guards on hooks of all modules, and on kernels that users register",
        f"{_DYNAMO}.variables.nn_module:UnspecializedNNModuleVariable.call_function",
        f"{_DYNAMO}.output_graph:OutputGraph.__init__",
    ),
    *_of(
        "passes/capture/guarding.py",
        "guards on keys and attributes that were not there",
        f"{_DYNAMO}.variables.dicts:ConstDictVariable.getitem_const_raise_exception_if_absent",
        f"{_DYNAMO}.variables.user_defined:UserDefinedObjectVariable.var_getattr",
    ),
    *_of(
        "passes/capture/guarding.py",
        "a generator of the model's draws as it does in eager: Dynamo would trace a number",
        f"{_DYNAMO}.variables.misc:RandomVariable.call_method",
    ),
    *_of(
        "passes/capture/in_dynamo.py",
        "collectives of torch.distributed are ops of the graph, or are refused by name",
        f"{_DYNAMO}.variables.functions:CollectiveFunctionRewriteVariable.can_rewrite",
        f"{_DYNAMO}.variables.functions:CollectiveFunctionRewriteVariable.create",
        f"{_DYNAMO}.variables.functions:CollectiveFunctionRewriteVariable.call_function",
    ),
    *_of(
        "passes/exact/differences.py",
        "names the model's line where eager and a trace differ by what Dynamo does",
        f"{_DYNAMO}.variables.torch:tracing_state_functions",
        f"{_DYNAMO}.variables.misc:AutogradFunctionVariable.call_apply",
        f"{_DYNAMO}.variables.functions:WrapperUserFunctionVariable.call_function",
    ),
    *_of(
        "passes/exact/as_eager.py",
        "functions that Dynamo would take apart, and sum otherwise, are traced as they are",
        f"{_DYNAMO}.variables.torch:TorchInGraphFunctionVariable._get_handlers",
    ),
    # FSDP2
    *_of(
        "sharded/lowered.py",
        "a planned call gathers and reduces in its graph, in the place of FSDP2's hooks",
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._pre_forward",
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._post_forward",
    ),
    # AOTAutograd, fake tensors and operators
    *_of(
        "passes/capture/collectives.py",
        "collectives are ops of the graph by whatever name a model has imported them",
        "torch.distributed.distributed_c10d:has_torch_function",
        "torch.distributed.distributed_c10d:handle_torch_function",
    ),
    *_of(
        "passes/exact/layouts.py",
        "fake results have the strides of real ones, which decide the order of later sums",
        "torch._subclasses.fake_tensor:FakeTensorMode.dispatch",
    ),
    *_of(
        "passes/exact/tangents.py",
        "gradients come uncopied, with the strides that they have",
        "torch._functorch._aot_autograd.schemas:MemoryFormatMeta.from_tensor",
    ),
    *_of(
        "passes/exact/as_eager.py",
        "casts of autocast are remembered until its region ends, as in eager",
        "torch:clear_autocast_cache",
        "torch:set_autocast_enabled",
        "torch._functorch._aot_autograd.collect_metadata_analysis:disable_autocast_cache",
        "torch.fx.experimental.proxy_tensor:disable_autocast_cache",
        "torch.ops:aten.to.dtype",
    ),
    *_of(
        "passes/exact/as_eager.py",
        "kernels of Python's that would take eager's place in a trace, and sum otherwise",
        "torch.ops:aten.dropout.default",
        "torch.ops:aten.linalg_svdvals.default",
        "torch.ops:aten.linalg_eigvalsh.default",
        "torch.ops:aten.linalg_eigvals.default",
    ),
    # FX and modules
    *_of(
        "passes/opaque/calls.py",
        "a module that runs as one op may be compiled by torch.compile itself",
        "torch.fx._symbolic_trace:_is_fx_tracing_flag",
    ),
    *_of(
        "megatron/fused.py",
        "what torch.compile made is not entered by a trace, which would leave it unfused for good",
        "torch.fx._symbolic_trace:_is_fx_tracing_flag",
    ),
    *_of(
        "megatron/planned.py",
        "a graph leaves out each op's line of the model, which takes long to find",
        "torch.fx.config:do_not_emit_stack_traces",
    ),
    *_of(
        "state/described.py",
        "changes of modules within a step are noticed, and the chunk is traced again",
        "torch.nn:Module.__setattr__",
        "torch.nn:Module.__delattr__",
        "torch.nn:Module.register_buffer",
        "torch.nn:Module.register_parameter",
        "torch.nn:Module.add_module",
    ),
    *_of(
        "megatron/changes.py",
        "hooks on saved tensors and seeds are refused in a trace, since a graph has neither",
        "torch.autograd.graph:saved_tensors_hooks.__enter__",
        "torch:manual_seed",
        "torch.cuda:manual_seed",
    ),
    *_of(
        "megatron/tracing.py",
        "writes to .data are refused in a trace",
        "torch._subclasses.functional_tensor:FunctionalTensor.data",
    ),
    # Megatron, while a chunk is traced
    *_of(
        "megatron/tracing.py",
        "layers share no scratch memory, and a graph no views that Megatron hides",
        f"{_MCORE}.utils:GlobalMemoryBuffer.get_tensor",
        f"{_MCORE}.utils:make_viewless_tensor",
    ),
    *_of(
        "megatron/tracing.py",
        "a random op notes its stream, from which it draws when the graph runs",
        f"{_MCORE}.tensor_parallel.random:CudaRNGStatesTracker.fork",
    ),
    *_of(
        "megatron/tracing.py",
        "a weight gradient is a product of the graph, added to main_grad when it runs",
        f"{_MCORE}.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward",
    ),
    *_of(
        "megatron/tracing.py",
        "uneven parts are reduced by numbers that all ranks' graphs read",
        f"{_MCORE}.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
    ),
    *_of(
        "megatron/tracing.py",
        "losses that a model logs are results of the graph, and logged when it runs",
        f"{_MCORE}.transformer.moe.moe_logging:MoEMetricsTracker.record",
        f"{_MCORE}.transformer.moe.moe_utils:save_to_aux_losses_tracker",
    ),
    *_of(
        "megatron/tracing.py",
        "sizes that depend on data are read as numbers of the graph",
        f"{_MCORE}.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
    ),
    *_of(
        "megatron/experts.py",
        "experts are one op with the kernels that exchange their tokens",
        f"{_MCORE}.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.dispatch_preprocess",
        f"{_MCORE}.transformer.moe.token_dispatcher:_DeepepManager",
        f"{_MCORE}.transformer.moe.token_dispatcher:_HybridEPManager",
    ),
    *_of(
        "megatron/packed.py",
        "rotary embedding of packed sequences is one op, which finds their lengths when it runs",
        f"{_MCORE}.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
    ),
    *_of(
        "megatron/recompute.py",
        "Megatron's own recompute is the plan's choice",
        f"{_MCORE}.tensor_parallel.random:checkpoint",
        f"{_MCORE}.tensor_parallel.random:CheckpointWithoutOutput",
        f"{_MCORE}.extensions.transformer_engine:te_checkpoint",
    ),
    # Megatron, as long as it is patched: their code is replaced, not their names
    *_of(
        "megatron/seams.py",
        "steps run planned; a rank leaves its word before process groups are made",
        f"{_MCORE}.pipeline_parallel.schedules:forward_backward_no_pipelining",
        f"{_MCORE}.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        f"{_MCORE}.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        f"{_MCORE}.parallel_state:initialize_model_parallel",
    ),
    *_of(
        "megatron/waits.py",
        "recompute and weight gradients run while a stage waits for another",
        f"{_MCORE}.pipeline_parallel.p2p_communication:_batched_p2p_ops",
        f"{_MCORE}.pipeline_parallel.p2p_communication:_p2p_ops",
    ),
)


def missing(package: str, patches: Iterable[Patch] = PATCHES) -> list[str]:
    """The targets in "torch" or "megatron" that the installed release does not have."""
    mine = dict.fromkeys(
        p.target for p in patches if p.target.startswith((f"{package}.", f"{package}:"))
    )
    return [target for target in mine if not _is_there(target)]


def _is_there(target: str) -> bool:
    name, _, path = target.partition(":")
    try:
        found = import_module(name)
    except ImportError:
        return False
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True
