"""What Dynamo is told of `transformers`, by name.

Its models ask whether they are compiled, and then go another way than in eager, although nothing of
what they avoid is met here. So a few functions of its are known:

- whose questions make no difference (`makes_no_difference`);
- that looks whether a batch holds several sequences, which decides how attention masks: a trace
  cannot look. Where the positions are made of sizes alone, `instead` answers as eager does;
- that hooks a model's layers the first time that their results are asked for, under a lock at which
  the graph would end: `instead` has that done before it is traced.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.variables.base import VariableTracker
from torch._subclasses.fake_tensor import unset_fake_temporarily

_HARMLESS = {
    # where a collector of results is kept: in a context or in a global
    ("transformers/utils/output_capturing.py", "set"),
    # whether a class of results is registered once more
    ("transformers/utils/generic.py", "_register_model_output_pytree_node"),
    # torchtitan: whether positions or types are checked, and by which call of the same kind tokens
    # are exchanged
    ("torchtitan/models/common/rope.py", "_maybe_check_max_pos"),
    ("torchtitan/models/deepseek_v3/model.py", "forward"),
    ("torchtitan/models/common/token_dispatcher.py", "_token_count_exchange"),
    ("torchtitan/models/common/token_dispatcher.py", "_dispatch_token_exchange"),
    ("torchtitan/models/common/token_dispatcher.py", "_combine_token_exchange"),
}
_OF_SIZES = {
    *(torch.arange, operator.add, operator.sub, operator.mul, operator.getitem),
    *("unsqueeze", "expand", "view", "reshape", "repeat", "long", "to"),
}


def makes_no_difference(file: str, function: str) -> bool:
    """Is this a function whose question, whether it is compiled, changes no number?"""
    return any(file.endswith(name) and function == own for name, own in _HARMLESS)


def instead(function: FunctionType, args: Any, kwargs: Any) -> Callable[..., None] | None:
    """While Dynamo traces: the function to trace in the place of this one, if it is known."""
    if function.__module__ == "transformers.masking_utils":
        known = _function("transformers.masking_utils", "find_packed_sequence_indices")
        given = _first(args, kwargs, "position_ids")
        if function is known and given is not None and _is_one_sequence(given):
            return _nothing
    if function.__module__ == "transformers.utils.output_capturing":
        hooks = _function("transformers.utils.output_capturing", "maybe_install_capturing_hooks")
        model = getattr(_first(args, kwargs, "model"), "value", None)
        if function is hooks and isinstance(model, nn.Module):
            function(model)
            return _nothing
    return None


def _function(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _first(args: Any, kwargs: Any, name: str) -> Any:
    return args[0] if args else kwargs.get(name)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _is_one_sequence(positions: VariableTracker) -> bool:
    """Is it known that each row of positions is that of one sequence?"""
    node = getattr(getattr(positions, "proxy", None), "node", None)
    with unset_fake_temporarily(), torch.no_grad():
        made = None if node is None else _made_of_sizes(node)
        if not isinstance(made, Tensor) or made.dim() != 2:
            return False
        return bool((made.diff(dim=-1) == 1).all())


def _made_of_sizes(node: fx.Node) -> Any:
    """What a node of Dynamo's graph gives, on a CPU, if it is made of sizes alone; else None."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if node.target not in _OF_SIZES:
        return None
    inputs = {given: _made_of_sizes(given) for given in node.all_input_nodes}
    if any(made is None for made in inputs.values()):
        return None
    named = {name: value for name, value in node.kwargs.items() if name != "device"}
    args, kwargs = fx.map_arg((node.args, named), inputs.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
