"""`capture` turns a model into its joint graph and Trace without Dynamo, and without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import CaptureError
from overlapc.nn.layers import slices_now
from overlapc.passes.capture.collectives import Raw
from overlapc.passes.capture.untraced import said_of
from overlapc.passes.exact.as_eager import are_fake, as_eager
from overlapc.passes.means import Weighing
from overlapc.passes.nodes import primal_nodes
from overlapc.passes.opaque.stand_in import Opaques
from overlapc.passes.trace import Captured, changed_inputs, trace_joint


def capture(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Captured:
    """The joint graph of one training step of `model`, without running it.

    Works on real and fake tensors and on real and fake process groups. `model(*args)` must return
    tensors, at least one of which requires a gradient. Raw collectives of `torch.distributed`, also
    asynchronous ones, become functional ones. A module that cannot be traced becomes one op.
    """
    opaques = Opaques(model)
    return opaques.traced(lambda: _captured(model, args, kwargs, opaques))


def _captured(model: torch.nn.Module, args: Any, kwargs: Any, opaques: Opaques) -> Captured:
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.traceback import preserve_node_meta

    model = without_ties(model)
    given = [*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))]
    with contextlib.ExitStack() as stack, preserve_node_meta(), _named_modules(model):
        if not are_fake(given):  # a plan made on fake tensors runs elsewhere
            stack.enter_context(as_eager())
        if slices_now() > 1:
            stack.enter_context(Weighing(slices_now()))
        raw = Raw()
        stack.callback(model.register_forward_pre_hook(raw.begin).remove)
        try:
            try:
                with contextlib.ExitStack() as first, raw:
                    exported = aot_export_joint_with_descriptors(first, model, args, kwargs)
                    stack.push(first.pop_all())
            except (DataDependentOutputException, DynamicOutputShapeException):
                args, kwargs = _with_unknown_sizes((args, kwargs))
                with raw:
                    exported = aot_export_joint_with_descriptors(stack, model, args, kwargs)
            raw.end()
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} could not be traced as one graph: {said_of(error)}"
            ) from error
        joint = exported.graph_module
        metadata = exported._aot_state.fw_metadata
        static = tuple(getattr(metadata, "static_input_indices", ()))
        count = sum(1 for _ in exported.params_spec) + sum(1 for _ in exported.buffers_spec)
        changed = changed_inputs(joint)
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        pairs = zip(primal_nodes(joint), tensors, strict=False)
        opaques.refuse_changes([tensor for node, tensor in pairs if node.name in changed])
        return trace_joint(
            joint, num_fwd_outputs=_forward_outputs(joint), static_inputs=static or range(count)
        )


@contextlib.contextmanager
def _named_modules(model: torch.nn.Module) -> Iterator[None]:
    """While the model is traced, nodes record the module that they belong to, as Dynamo's nodes
    do."""
    from torch.fx import traceback

    around: list[Any] = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        before = traceback.current_meta.get("nn_module_stack")
        around.append(before)
        name = names[module]
        more = {name: (f"L['self'].{name}", type(module))}
        traceback.current_meta["nn_module_stack"] = {**(before or {}), **more}

    def leave(*_: Any) -> None:
        before = around.pop()
        if before is None:
            traceback.current_meta.pop("nn_module_stack", None)
        else:
            traceback.current_meta["nn_module_stack"] = before

    names = {module: name for name, module in model.named_modules() if name}
    with contextlib.ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _with_unknown_sizes(inputs: Any) -> Any:
    """Make the inputs fake tensors of a mode that has symbols for data-dependent sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    return tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), inputs)


def without_ties(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, or, if it has a parameter or buffer under several names, a module around it
    that has each once: one tensor of autograd's must be one input of the graph."""
    for named in (model.named_parameters, model.named_buffers):
        if len([*named()]) != len([*named(remove_duplicate=False)]):
            return _Untied(model)
    return model


class _Untied(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it is no submodule
        mine: dict[int, str] = {}
        for i, parameter in enumerate(model.parameters()):
            mine[id(parameter)] = f"parameter{i}"
            self.register_parameter(f"parameter{i}", parameter)
        for i, buffer in enumerate(model.buffers()):
            mine[id(buffer)] = f"buffer{i}"
            self.register_buffer(f"buffer{i}", buffer)
        # Each place once, also in a module with several names. The call's tensors are taken out
        # again in the order of names, so a second name would leave the call's tensor there.
        self._places = {
            f"{path}.{name}" if path else name: mine[id(tensor)]
            for path, module in model.named_modules()
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {place: getattr(self, mine) for place, mine in self._places.items()}
        return torch.func.functional_call(self._model[0], given, args, kwargs, tie_weights=False)


def _forward_outputs(joint: fx.GraphModule) -> int:
    """How many of the joint graph's outputs are results: those before the gradients (None for a
    frozen parameter)."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput

    output = joint.graph.find_nodes(op="output")[0]
    descs: Sequence[Any] = output.meta["desc"]
    results = [i for i, d in enumerate(descs) if d is not None and not isinstance(d, GradAOTOutput)]
    return max(results, default=-1) + 1
