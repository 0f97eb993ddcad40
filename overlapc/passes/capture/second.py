"""`taken_again` finds graphs that a model differentiates itself, by a gradient that has a gradient.

AOTAutograd has no second derivatives. A model that calls `torch.autograd.grad(create_graph=True)`
(of an energy for its forces, of a solution for its equation) ends Dynamo's graph there; that graph
has to run as plain PyTorch, or the model's own backward would fail.
"""

from __future__ import annotations

import ast
import functools
import linecache
from typing import Any

from torch import fx

_WORD = "create_graph"


def taken_again(graph: fx.GraphModule) -> str:
    """The line that ends this graph, if it asks for a gradient that has a gradient; or ""."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return ""
    last = reason.user_stack[-1]
    if last.lineno not in _lines(last.filename):
        return ""
    return f'File "{last.filename}", line {last.lineno}, in {last.name}'


@functools.lru_cache(maxsize=64)
def _lines(file: str) -> frozenset[int]:
    """Lines of all calls that are given `create_graph`, unless as False."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return frozenset()
    return frozenset(
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and any(map(_asks, node.keywords))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    )


def _asks(keyword: ast.keyword) -> bool:
    is_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
    return keyword.arg == _WORD and not is_false
