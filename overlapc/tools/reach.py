"""`reached` follows a graph, whatever it is of; `made_of` and `autograd_nodes` those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

Node = TypeVar("Node", bound=Hashable)


def reached(
    starts: Iterable[Node | None],
    following: Callable[[Node], Iterable[Node | None]],
    but: Iterable[Node | None] = (),
) -> Iterator[Node]:
    """The starts and all that they lead to, each once, before what it leads to, `but` for these.
    None is nothing."""
    left = [*starts][::-1]
    seen = {*but, None}
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [*following(node)][::-1]


def made_of(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes of an FX graph, and those that they need."""
    return reached(nodes, lambda node: node.all_input_nodes)


def autograd_nodes(tensors: Iterable[Any], before: Iterable[Any] = ()) -> Iterator[Any]:
    """Autograd's nodes that have made the tensors, back to those that have made the ones
    `before`."""

    def following(node: Any) -> list[Any]:
        return [other for other, _ in node.next_functions]

    makers = (tensor.grad_fn for tensor in tensors)
    return reached(makers, following, but=[tensor.grad_fn for tensor in before])
