"""`direct` makes of a graph a function that calls its ops without the Python function around each.

`torch.ops.aten.mm.default(a, b)` looks four names up and then calls `_op`, which is the op. For
small tensors these take a tenth of a step, and a GPU whose host launches slowly waits for them.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.fx.graph_module import _forward_from_src

_CALL = re.compile(r"^(    \w+(?: : [^=]+)? = )(torch\.ops\.\w+\.\w+\.\w+)\(", re.MULTILINE)


def direct(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module's forward, as its graph is now."""
    code = module.graph.python_code("self")
    targets = {n.target for n in module.graph.nodes if type(n.target) is OpOverload}
    ops = {f"torch.ops.{op!s}": op for op in targets}
    numbers = {name: number for number, name in enumerate(ops)}
    names = {name: f"_overlapc_op{number}" for name, number in numbers.items()}
    known = code.globals | {names[name]: op._op for name, op in ops.items()}

    def called(line: re.Match[str]) -> str:
        begin, name = line.groups()
        return f"{begin}{names.get(name, name)}("

    return types.MethodType(_forward_from_src(_CALL.sub(called, code.src), known), module)
