"""`weight_grads` finds the backward nodes that serve weight gradients alone (W), by dependency; all
others lead to earlier layers (I).

A backward node is W if it reaches only the gradient of one parameter module and no gradient of an
input. The rule also works for a stage without input gradients (its inputs are token ids): a node
that reaches the gradients of two modules is part of the chain, so it is I. A parameter used twice
is one parameter: the sum of its two gradients is W.
"""

from __future__ import annotations

from torch import fx

from overlapc.passes.nodes import primal_nodes

_MANY = -1  # reaches an input gradient, or the gradients of several modules


def weight_grads(
    joint: fx.GraphModule, forward: set[fx.Node], num_fwd_outputs: int, static: frozenset[int]
) -> set[fx.Node]:
    """The W nodes of a joint graph. `static` are the positions of parameters among primals."""
    inputs = primal_nodes(joint)
    module = _modules([p for i, p in enumerate(inputs) if i in static], forward)
    results = joint.graph.find_nodes(op="output")[0].args[0]
    reaches: dict[fx.Node, int | None] = {}
    for primal, grad in zip(inputs, results[num_fwd_outputs:], strict=False):
        if isinstance(grad, fx.Node):
            target = module.get(primal, _MANY)
            reaches[grad] = target if reaches.get(grad, target) == target else _MANY
    for result in results[:num_fwd_outputs]:
        if isinstance(result, fx.Node):
            reaches[result] = _MANY
    for node in reversed(joint.graph.nodes):
        here = reaches.get(node)
        if here is None:
            continue
        for given in node.all_input_nodes:
            if given in forward:
                continue
            there = reaches.get(given)
            reaches[given] = here if there is None or there == here else _MANY
    return {n for n, r in reaches.items() if r is not None and r != _MANY and n not in forward}


def _modules(parameters: list[fx.Node], forward: set[fx.Node]) -> dict[fx.Node, int]:
    """Group parameters: those that enter one forward op together (weight and bias) are one
    module."""
    home: dict[fx.Node, int] = {}
    owner: dict[fx.Node, int] = {}
    for index, parameter in enumerate(parameters):
        consumers: list[fx.Node] = []
        front = [parameter]
        while front:
            node = front.pop()
            for user in node.users:
                if user not in forward:
                    continue
                if len(user.all_input_nodes) == 1:
                    front.append(user)  # a view, a cast: still the parameter
                else:
                    consumers.append(user)
        owners = [owner[c] for c in consumers if c in owner]
        # A parameter used in several places (tied) is a module of its own.
        mine = owners[0] if len(consumers) == 1 and owners else index
        home[parameter] = mine
        for consumer in consumers:
            owner.setdefault(consumer, mine)
    return home
