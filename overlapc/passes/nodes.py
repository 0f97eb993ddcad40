"""Functions that classify a node of a joint graph: which kind of input, a collective's start or
wait, random, of which group and module.

`signature_of` writes a node's work as text, the same on every rank.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import is_sym_node
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from overlapc.core.errors import CaptureError
from overlapc.core.ir import Kind
from overlapc.core.merge import BEFORE, TOTAL
from overlapc.passes.storages import tensors_of

_ONCE = "overlapc_once"
_OURS = "__self__.model"  # where a method of ours that calls the model has it


def is_primal(node: fx.Node) -> bool:
    """Is the node an input of the model? AOTAutograd says so by its name."""
    return node.op == "placeholder" and "primals" in str(node.target)


def is_tangent(node: fx.Node) -> bool:
    """Is the node an incoming gradient of a result? AOTAutograd says so by its name."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def primal_nodes(joint: fx.GraphModule) -> list[fx.Node]:
    """The inputs of the model, in order."""
    return [node for node in joint.graph.find_nodes(op="placeholder") if is_primal(node)]


def input_kinds(
    joint: fx.GraphModule, num_fwd_outputs: int, static: Collection[int]
) -> dict[str, Kind]:
    """The kind of each input; `static` are positions of primals that last from step to step."""
    gradients = joint.graph.find_nodes(op="output")[0].args[0][num_fwd_outputs:]
    trained = [isinstance(gradient, fx.Node) for gradient in gradients]
    kinds: dict[str, Kind] = {}
    for node in joint.graph.nodes:
        if node.op == "get_attr":
            kinds[node.name] = "buffer"
        elif node.op == "placeholder":
            kinds[node.name] = "gradient" if is_tangent(node) else "batch"
    for i, node in enumerate(primal_nodes(joint)):
        if i in static:
            kinds[node.name] = "parameter" if i < len(trained) and trained[i] else "buffer"
    return kinds


def is_start(node: fx.Node) -> bool:
    """Is the node the start of a collective?"""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace in ("_c10d_functional", "c10d_functional")
        and not is_wait(node)
    )


def is_wait(node: fx.Node) -> bool:
    """Is the node the wait of a collective?"""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name.split("::")[-1] == "wait_tensor"
    )


def is_random(node: fx.Node) -> bool:
    """Does the node draw from the default generator, itself or in a subgraph that it runs?"""
    return is_seeded(node.target) or any(is_random(inner) for inner in _inner_nodes(node))


def is_seeded(target: Any) -> bool:
    """Does the op draw from a generator? Not attention's backward: it is given the forward's
    seed."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    return all(argument.name != "philox_seed" for argument in target._schema.arguments)


def is_recomputable(node: fx.Node) -> bool:
    """May this op run a second time? Not if it mutates, if it makes numbers rather than tensors, or
    if it draws random numbers in a subgraph, where PyTorch cannot repeat the draw. (Nor if an input
    has been mutated since: see `changed_inputs`.)"""
    if is_sym_node(node) or not tensors_of(node.meta.get("val")) or _ONCE in node.meta:
        return False
    inner = list(_inner_nodes(node))
    # PyTorch keeps the states of random ops for the device that their arguments name.
    if any(is_random(n) for n in inner) or "opaque_forward_random" in str(node.target):
        return False
    if is_before(node) or is_total(node):  # what it reads is another slice's
        return False
    return not any(writes(n) for n in (node, *inner))


def once(node: fx.Node) -> None:
    """Have the op not run a second time."""
    node.meta[_ONCE] = True


def is_before(node: fx.Node) -> bool:
    """Does it ask for what earlier slices counted?"""
    return str(node.target).startswith(BEFORE)


def is_total(node: fx.Node) -> bool:
    """Does it ask for a sum over all slices?"""
    return str(node.target).startswith(TOTAL)


def is_folded_getitem(node: fx.Node) -> bool:
    """Is the node a getitem that names one output of a multi-output op? (A kernel that is written
    in Triton has a dict of outputs.)"""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[0].meta.get("val"), (tuple, list, dict))
    )


def group_of(node: fx.Node) -> str:
    """Return the process group of a collective: its last string argument."""
    names = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
    if not names:
        raise CaptureError(f"collective {node.target} names no process group", node.name)
    return str(names[-1])


def module_of(node: fx.Node) -> str:
    """Return the innermost module that the op belongs to, or whose gradient it makes; "" for the
    model itself or if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = re.sub(r"(?:\._modules)?\['([^']*)'\]", r".\1", str(path))  # L['self']._modules['head']
    path = path.partition(".")[2].partition(".")[2]
    path = re.sub(r"^__closure__\[\d+\]\.cell_contents\.?", "", path)  # a stage's module
    return "" if path == _OURS else path.removeprefix(f"{_OURS}.")


def line_of(node: fx.Node) -> str:
    """Return the line of the user's code that a node comes from."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    return frames[-1] if frames else "of no known source"


def writes(node: fx.Node) -> bool:
    """Does the op write into what it is given?"""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the subgraphs that a higher-order op, such as `cond`, runs."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        for given in node.all_input_nodes:
            if given.op == "get_attr":
                inner = getattr(node.graph.owning_module, str(given.target), None)
                if isinstance(inner, fx.GraphModule):
                    yield from inner.graph.nodes


def signature_of(node: fx.Node, symbols: dict[str, str]) -> str:
    """Write a node's target, and the dtypes and shapes of its inputs and outputs, as text. Numbers
    among the arguments are left out: they may differ from rank to rank (a slice by rank) although
    the work is the same."""
    given = " ".join(
        _describe(n.meta.get("val"), symbols) for n in node.all_input_nodes if "val" in n.meta
    )
    is_op = isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    # The text of a plain function holds its address, which differs from process to process.
    target = str(node.target) if is_op else fx.node._get_qualified_name(node.target)
    return f"{target}{_kernel_of(node)} {given} > {_describe(node.meta.get('val'), symbols)}"


def _kernel_of(node: fx.Node) -> str:
    """The kernel, written in Triton, that a node launches: another one takes another time."""
    if "kernel_idx" not in node.kwargs:
        return ""
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    while hasattr(kernel, "fn"):  # within its decorators
        kernel = kernel.fn
    name = getattr(kernel, "__qualname__", type(kernel).__qualname__)
    return f" {kernel.__module__}.{name}"


def _describe(val: Any, symbols: dict[str, str]) -> str:
    if isinstance(val, torch.Tensor):
        dtype = str(val.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(_dimension(s, symbols) for s in val.shape)}]"
    if isinstance(val, (tuple, list)):
        return f"({' '.join(_describe(v, symbols) for v in val)})"
    if isinstance(val, dict):
        return f"({' '.join(f'{name}: {_describe(v, symbols)}' for name, v in val.items())})"
    if isinstance(val, (torch.SymInt, int)):
        return "int"
    return type(val).__name__


def _dimension(size: Any, symbols: dict[str, str]) -> str:
    """Rename symbols in order of appearance, so that every rank writes them the same way."""
    if isinstance(size, int):
        return str(size)
    expr = size.node.expr
    for symbol in sorted(expr.free_symbols, key=lambda s: s.name):
        symbols.setdefault(symbol.name, f"d{len(symbols)}")
    renamed = expr.xreplace({s: type(s)(symbols[s.name]) for s in expr.free_symbols})
    return str(renamed).replace(" ", "")
