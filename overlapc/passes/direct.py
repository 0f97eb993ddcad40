"""`direct` makes of a graph a function that calls its ops without the Python function around each.

`torch.ops.aten.mm.default(a, b)` looks four names up and then calls `_op`, which is the op. For
small tensors these take a tenth of a step, and a GPU whose host launches slowly waits for them.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.graph_module import _forward_from_src

_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def direct(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module's forward as its graph is now."""
    code = module.graph.python_code("self")
    known = dict(code.globals)

    def name(call: re.Match[str]) -> str:
        namespace, packet, overload = call.groups()
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        if type(op) is not OpOverload:
            return call[0]
        short = f"_op_{namespace}_{packet}_{overload}"
        known[short] = op._op
        return f"{short}("

    return types.MethodType(_forward_from_src(_CALL.sub(name, code.src), known), module)
