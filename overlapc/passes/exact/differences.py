"""`differences` names the lines of a model whose graph may give other results than eager.

`as_eager` removes the differences that AOTAutograd's tracing makes. The remaining ones come from
the model or from Dynamo and can only be named:

- a line that asks whether it is compiled, since it may take another branch then (`asked`);
- views of one tensor that leave a graph, if there are several graphs: autograd then adds up that
  tensor's gradients in another order (`views_handed_on`);
- a tensor that a graph uses several times and that a later graph uses again, or the model returns:
  autograd adds up its gradients in another order, too (`used_several_times`);
- buffers that a checkpointed part of the model changes: eager changes them once more in the
  backward;
- parameters of a reentrant checkpoint that are used elsewhere, too: eager adds their gradients to
  `.grad` one by one;
- random numbers in checkpoints that do not preserve the generator: eager draws others again;
- results that a loss may leave out: inputs of these results alone get zeros, where eager leaves
  None (`left_out`);
- numpy, which Dynamo traces as torch;
- hooks on results, which are traced into the backward, behind hooks that are set outside;
- custom Functions that call `set_materialize_grads`, which Dynamo ignores (`asked`, too);
- functions of TorchScript, which eager runs by an executor of its own (`asked`, too);
- functions whose gradient or cast has another formula when PyTorch traces (`_FORMULAS`);
- cross entropy with weights and smoothed labels.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.variables import torch as torch_functions
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable

from overlapc.passes.capture.huggingface import makes_no_difference
from overlapc.passes.capture.model_files import is_models
from overlapc.passes.nodes import line_of
from overlapc.tools.reach import made_of
from overlapc.tools.shared_changes import Shared, replaced

_TABLE = "tracing_state_functions"  # Dynamo's answers to "is this compiled?"
_WHERE_SET = ("forward", "setup_context")  # methods of a custom Function
_thread = threading.local()  # lines: those found by this thread's `asked`


# --------------------------------------------------------------------------- asked


@contextlib.contextmanager
def asked(lines: list[str]) -> Iterator[None]:
    """Collect the lines outside of PyTorch that ask whether they are compiled, while Dynamo
    traces."""
    outer = getattr(_thread, "lines", None)
    _thread.lines = lines
    try:
        with _changed:
            yield
    finally:
        _thread.lines = outer


@contextlib.contextmanager
def _noting() -> Iterator[None]:
    answers = getattr(torch_functions, _TABLE, None)
    apply = AutogradFunctionVariable.call_apply
    call = WrapperUserFunctionVariable.call_function

    def noted(function: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if _wants_no_zeros(function.fn_cls):
            _note(
                _place(frame), f"{function.fn_cls.__name__} is given zeros, where eager gives None"
            )
        return apply(function, frame, *args, **kwargs)

    def compiled(function: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function.wrapper_obj, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
            name = getattr(function.wrapper_obj, "name", type(function.wrapper_obj).__name__)
            _note(_place(frame), f"{name} is TorchScript's, which fuses ops and derives them anew")
        return call(function, frame, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        if answers is not None:
            stack.enter_context(replaced(torch_functions, _TABLE, lambda: _Answers(answers())))
        stack.enter_context(replaced(AutogradFunctionVariable, "call_apply", noted))
        stack.enter_context(replaced(WrapperUserFunctionVariable, "call_function", compiled))
        yield


def _wants_no_zeros(function: type) -> bool:
    """Does the function call `set_materialize_grads`, which Dynamo ignores?"""
    codes = [getattr(getattr(function, n, None), "__code__", None) for n in _WHERE_SET]
    return any(code is not None and "set_materialize_grads" in code.co_names for code in codes)


_changed = Shared(_noting)


class _Answers(dict[Any, Any]):
    def __getitem__(self, question: Any) -> Any:
        answer = super().__getitem__(question)
        if answer:
            place = _place(sys._getframe(1).f_locals.get("tx"), asking=True)
            _note(place, "asks whether it is compiled, and may take another branch then")
        return answer


def _note(place: str, what: str) -> None:
    lines = getattr(_thread, "lines", None)
    if lines is not None and place and f"{place}: {what}" not in lines:
        lines.append(f"{place}: {what}")


def _place(frame: Any, asking: bool = False) -> str:
    """The line of the model that Dynamo traces now, skipping functions named `is_...` that only
    pass the question on; "" for one whose question makes no difference."""
    while frame is not None and frame.f_code.co_name.startswith(("is_", "_is_")):
        frame = getattr(frame, "parent", None)
    if frame is None or not is_models(frame.f_code.co_filename):
        return ""
    code = frame.f_code
    if asking and makes_no_difference(code.co_filename, code.co_name):
        return ""
    return f'File "{code.co_filename}", line {frame.lineno}, in {code.co_name}'


# --------------------------------------------------------------------------- of one graph

_NO_ZEROS = "eager's backward is quicker, by another formula, where no factor is zero"
_FORMULAS = {
    "prod": _NO_ZEROS,
    "cumprod": _NO_ZEROS,
    "bilinear": "under autocast, another formula when it is traced",
}


# Words in the names of functions that draw random numbers.
_RANDOM = ("dropout", "rand", "bernoulli", "uniform", "exponential", "gumbel", "rrelu")


def differences(graph: fx.GraphModule) -> list[str]:
    """Name what this graph does differently from eager, whatever graphs surround it. Bodies of
    checkpoints and of custom Functions are graphs within it."""
    lines = []
    inside = (module for module in graph.modules() if isinstance(module, fx.GraphModule))
    for node in (node for module in inside for node in module.graph.nodes):
        name = _name(node)
        if _is_numpys(node) and not _is_alike(node):
            lines.append(f"{line_of(node)}: {name}: numpy is traced as torch, whose kernels it has")
        if _smooths_weighted(node):
            lines.append(
                f"{line_of(node)}: cross_entropy with weights and smoothed labels: eager sums the "
                "weights of targets that are not to be ignored, a trace those of all"
            )
        if name in _FORMULAS and _learns(node):
            lines.append(f"{line_of(node)}: {name}: {_FORMULAS[name]}")
        if name.rstrip("_") == "masked_fill" and _learns(_value_of(node)):
            lines.append(f"{line_of(node)}: {name}: eager sums what fills it in another order")
        if name == "register_hook" and any(user.op == "output" for user in node.users):
            lines.append(
                f"{line_of(node)}: register_hook on a result: what retain_grad keeps of its "
                "gradient, and what later hooks are given, is without this hook"
            )
        if "checkpoint" in str(node.target) and node.op == "call_function":
            for inner in _inside_of(node):
                if _changes_an_input(inner):
                    lines.append(
                        f"{line_of(inner)}: eager's checkpoint changes a buffer "
                        f"({inner.name}) once more in the backward"
                    )
                if node.kwargs.get("preserve_rng_state") is False and _draws(inner):
                    lines.append(
                        f"{line_of(inner)}: eager's checkpoint draws other random numbers in the "
                        f"backward ({inner.name}), for it has preserve_rng_state=False"
                    )
    return lines + _shared_by_reentrant(graph)


def _value_of(node: fx.Node) -> Any:
    return node.kwargs.get("value", node.args[2] if len(node.args) > 2 else None)


def _is_numpys(node: fx.Node) -> bool:
    return type(node.target).__name__.startswith("numpy_")


def _is_alike(node: fx.Node) -> bool:
    """Is the node made of numbers alone, so that these operators treat it as a number?"""
    return not node.all_input_nodes and all(
        user.target in (operator.add, operator.mul, operator.sub, operator.truediv)
        and user.args[1] is node
        for user in node.users
    )


def _shared_by_reentrant(graph: fx.GraphModule) -> list[str]:
    lines = []
    for given in graph.graph.find_nodes(op="placeholder"):
        inside = [user for user in given.users if user.kwargs.get("use_reentrant")]
        if inside and len(given.users) > 1 and _learns(given):
            lines.append(
                f"{line_of(inside[-1])}: eager's reentrant checkpoints add to the gradient of "
                f"{given.name} one by one"
            )
    return lines


def left_out(graph: fx.GraphModule) -> list[str]:
    """Name results that a loss may leave out, and how many inputs feed them but not all results."""
    results = [n for n in dict.fromkeys(_results(graph)) if isinstance(n, fx.Node) and _learns(n)]
    feeds: dict[fx.Node, set[fx.Node]] = {}
    for result in results:
        for node in made_of([result]):
            feeds.setdefault(node, set()).add(result)
    partly = [
        node
        for node, fed in feeds.items()
        if node.op == "placeholder" and _learns(node) and len(fed) < len(results)
    ]
    if not partly:
        return []
    named = min(partly, key=lambda node: len(feeds[node]))
    (result, *_) = feeds[named]
    return [
        f"{line_of(result)}: a loss that leaves this result out gives zeros, not None, for the "
        f"gradient of {named.name}" + (f" and {len(partly) - 1} more" if partly[1:] else "")
    ]


def views_handed_on(graph: fx.GraphModule) -> list[str]:
    """Name results that share memory with another result or an input, where all of these get
    gradients."""
    results = _results(graph)
    owners = {_storage(n): n for n in graph.graph.find_nodes(op="placeholder") if _learns(n)}
    lines = []
    for node in (n for n in results if isinstance(n, fx.Node) and _learns(n)):
        other = owners.setdefault(_storage(node), node)
        if other is not node and node.op != "placeholder":
            lines.append(
                f"{line_of(node)}: a view leaves the graph, so autograd adds up the gradients of "
                f"{other.name} in another order"
            )
    return lines


def used_several_times(graph: fx.GraphModule) -> dict[int, str]:
    """Inputs, by position, whose gradient this graph sums from several uses, each with the text to
    report if there are more uses outside: eager adds gradients one by one from the last use on."""
    lines = {}
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        users = [user for user in node.users if _learns(user)]
        if _learns(node) and len(users) > 1:
            lines[i] = (
                f"{line_of(users[-1])}: {node.name} is used several times here, and in a later "
                "graph or as a result, so autograd adds up its gradients in another order"
            )
    return lines


def _results(graph: fx.GraphModule) -> Sequence[Any]:
    results: Sequence[Any] = graph.graph.find_nodes(op="output")[0].args[0]
    return results


def _inside_of(node: fx.Node) -> Iterator[fx.Node]:
    for given in node.all_input_nodes:
        inner = getattr(node.graph.owning_module, str(given.target), None)
        if given.op == "get_attr" and isinstance(inner, fx.GraphModule):
            yield from inner.graph.nodes


def _smooths_weighted(node: fx.Node) -> bool:
    if node.target is not F.cross_entropy:
        return False
    given = signature(F.cross_entropy).bind(*node.args, **node.kwargs).arguments
    return given.get("weight") is not None and bool(given.get("label_smoothing"))


def _changes_an_input(node: fx.Node) -> bool:
    inputs = [n for n in node.all_input_nodes if n.op == "placeholder"]
    name = _name(node)
    if name in ("batch_norm", "instance_norm"):  # (x, mean, variance, weight, bias, training, ...)
        return node.args[1] in inputs and node.args[5] is True
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place and bool(node.args) and node.args[0] in inputs


def _draws(node: fx.Node) -> bool:
    name = _name(node).strip("_")
    if name == "scaled_dot_product_attention":
        return bool(node.kwargs.get("dropout_p") or any(node.args[4:5]))
    return name in ("normal", "poisson", "multinomial") or any(word in name for word in _RANDOM)


def _name(node: fx.Node) -> str:
    """The name of the function or method of torch's that a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def _learns(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.requires_grad


def _storage(node: fx.Node) -> Any:
    try:
        return node.meta["example_value"].untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a tensor subclass without one
        return node
