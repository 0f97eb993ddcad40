"""`stubs` are placeholders of a forward and a backward that other code runs.

AOTAutograd builds its runtime around a graph (mutated inputs, aliases, tensor subclasses) from that
graph's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

from torch import fx

from overlapc.core.errors import OverlapcError
from overlapc.passes.nodes import primal_nodes
from overlapc.passes.trace import Captured


@dataclass(frozen=True)
class Weakly:
    """Calls a method of an object that it does not keep alive: PyTorch keeps the backend of each
    call that it could not compile."""

    method: WeakMethod[Callable[..., Any]]

    def __call__(self, *args: Any) -> Any:
        method = self.method()
        assert method is not None
        return method(*args)


def stubs(captured: Captured) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a forward that saves nothing and a backward without gradients, with the inputs and
    outputs of the captured graph. Neither ever runs."""
    joint, count = captured.joint, captured.num_fwd_outputs
    results = joint.graph.find_nodes(op="output")[0]
    placeholders = joint.graph.find_nodes(op="placeholder")
    forward, backward = fx.Graph(), fx.Graph()
    copies = {node: forward.node_copy(node) for node in primal_nodes(joint)}
    ends = []
    for result in results.args[0][:count]:
        if isinstance(result, fx.Node) and result not in copies:
            copies[result] = forward.call_function(never)
            copies[result].meta = dict(result.meta)
        ends.append(copies.get(result, result) if isinstance(result, fx.Node) else result)
    forward.output(tuple(ends)).meta = dict(results.meta)
    for node in placeholders:
        if node not in copies:
            backward.node_copy(node)
    backward.output((None,) * (len(results.args[0]) - count))
    return fx.GraphModule(joint, forward), fx.GraphModule(joint, backward)


def never(*_: Any) -> Any:
    """Never called: the caller runs the backward itself, without autograd."""

    def backward(_given: list[Any]) -> Any:
        raise OverlapcError(
            "a result of a TrainStep or Pipeline was differentiated; expected no use but its value"
        )

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward
