"""A graph called directly gives what the graph gives, and calls no op through Python."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode

from overlapc.passes.emit.direct import direct
from overlapc.passes.emit.parts import Part


def shifted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    mean, index = (x @ y).max(dim=-1)
    return torch.softmax(x + 2.0, -1).to(torch.float64), mean.view(-1, 1) - index[:, None]


def test_direct(monkeypatch) -> None:
    given = torch.randn(4, 4), torch.randn(4, 4)
    module: fx.GraphModule = make_fx(shifted)(*given)
    expected = module(*given)
    ops = [n.target for n in module.graph.nodes if n.op == "call_function"]
    count = len([op for op in ops if isinstance(op, OpOverload)])
    called = direct(module)

    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op)
            return op(*args, **kwargs or {})

    with Seen():
        called(*given)
    assert len(seen) == count  # modes see them all the same

    def refuse(self, *args, **kwargs):
        raise AssertionError(f"{self} was called through Python")

    monkeypatch.setattr(OpOverload, "__call__", refuse)
    assert all(map(torch.equal, expected, called(*given)))


def test_a_part_runs_the_graph_that_it_has_now() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)),))
    graph.set_codegen(_BoxedCodeGen())
    part = Part(fx.GraphModule({}, graph), ("x",), ("y",), {})

    def run() -> float:
        state = {"x": torch.ones(())}
        part.run({}, state)
        return float(state["y"])

    assert (run(), run()) == (-1, -1)
    (node,) = part.module.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    node.target = torch.ops.aten.exp.default
    part.module.recompile()
    assert run() == torch.ones(()).exp()


def test_ops_of_like_names_and_their_text_stay_apart() -> None:
    library = torch.library.Library("direct_a", "FRAGMENT")
    other = torch.library.Library("direct_a_b", "FRAGMENT")
    library.define("b_c(Tensor x, str said) -> Tensor")
    other.define("c(Tensor x, str said) -> Tensor")
    library.impl("b_c", lambda x, said: x + len(said), "CompositeExplicitAutograd")
    other.impl("c", lambda x, said: x * len(said), "CompositeExplicitAutograd")
    graph = fx.Graph()
    x = graph.placeholder("x")
    text = "    y = torch.ops.aten.neg.default("
    y = graph.call_function(torch.ops.direct_a.b_c.default, (x, text))
    z = graph.call_function(torch.ops.direct_a_b.c.default, (y, text))
    graph.output(z)
    one, count = torch.ones(()), len(text)
    assert float(direct(fx.GraphModule({}, graph))(one)) == (1 + count) * count
