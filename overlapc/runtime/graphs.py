"""`Calls` follows the graphs that a call of a model runs, and divides the memory budget among them.

Dynamo compiles a graph when the forward first reaches it, before later graphs are known. So if
there may be several, each first gets a plan that holds little. When the call has ended, the budget
is divided among them, and each graph is compiled once more for its share. A model of one graph gets
the whole budget at once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from overlapc.core.ir import Plan
from overlapc.passes.capture.model_files import is_models
from overlapc.passes.exact.differences import used_several_times
from overlapc.planning.options import Options
from overlapc.planning.report import Report
from overlapc.planning.shares import GraphsOfStep, Share, plan_shares
from overlapc.ranks.exchange import busy
from overlapc.ranks.groups import exchange_for
from overlapc.tools.flags import log
from overlapc.tools.told import warn

Compile = Callable[[Sequence[Any], Plan], Callable[..., Any]]


class CompiledGraph:
    """A compiled graph that runs when called, and can be compiled again for another plan."""

    def __init__(self, gm: fx.GraphModule, calls: Calls) -> None:
        self.calls = calls
        self.alone = calls.is_whole(gm)
        # Plan this graph for the whole budget: no other graph is known, or that does no harm.
        self.takes_all = (
            self.alone
            or calls.running is None
            or calls.options.plan is not None
            or calls.options.memory_budget is None
        )
        self.sums = used_several_times(gm)
        self.form = form_of(gm)
        self.name = ""
        self.share: Share | None = None  # set if the graph was planned
        self.report: Report | None = None
        self.run: Callable[..., Any] = gm.forward
        self.compile: Compile | None = None
        self._wanted: Plan | None = None
        context = TracingContext.try_get()
        self._mode = None if context is None else context.fake_mode
        places = gm.graph.find_nodes(op="placeholder")
        self._inputs = [node.meta.get("example_value") for node in places]

    def planned(self, report: Report, share: Share | None) -> None:
        self.report, self.share = report, share
        self.name = report.name

    def give(self, report: Report) -> None:
        """Take another plan; the next call compiles the graph again with it."""
        assert self.report is not None
        if report.plan != self.report.plan:
            self._wanted = report.plan
        self.report = report

    def __call__(self, *args: Any) -> Any:
        if self._wanted is not None:
            self._compile_again(self._wanted)
        call = self.calls.running
        if call is None or self.share is None:
            return self.run(*args)
        place = call.begin(self, args)
        self.calls.name_sums(args)
        call.sums |= {id(args[i]): (weakref.ref(args[i]), line) for i, line in self.sums.items()}
        made = self.run(*args)
        call.end(place, made)
        return made

    def _compile_again(self, plan: Plan) -> None:
        assert self.compile is not None
        self._wanted = None
        try:
            with busy("tracing"), tracing(TracingContext(self._mode)):
                self.run = self.compile(self._inputs, plan)
        except Exception as error:
            warn(
                f"overlapc: {self.name} keeps the plan of its first step, which fits but may "
                f"recompute more than it must: compiling it again failed ({error!r})"
            )


def form_of(gm: fx.GraphModule) -> tuple[str, ...]:
    """The ops of a graph of Dynamo's that make tensors. Graphs that differ in sizes alone are of
    one form."""
    values = ((node, node.meta.get("example_value")) for node in gm.graph.nodes)
    return tuple(
        f"{node.op} {node.target if isinstance(node.target, str) else node.target.__name__}"
        for node, value in values
        if not isinstance(value, (int, torch.SymInt, torch.Size))
    )


class ModelCall:
    """The graphs that one call of the model has run so far."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.compiled = 0
        self.graphs: list[CompiledGraph] = []
        self.flows: list[tuple[int, int, int]] = []
        self._made: dict[int, tuple[Callable[[], torch.Tensor | None], int]] = {}
        self.sums: dict[int, tuple[Callable[[], torch.Tensor | None], str]] = {}

    def begin(self, graph: CompiledGraph, args: Sequence[Any]) -> int:
        place = len(self.graphs)
        self.graphs.append(graph)
        for arg in args if self._made else ():
            made, source = self._made.get(id(arg), (lambda: None, 0))
            tensor = made()
            if tensor is not None and tensor is arg and tensor.requires_grad:
                self.flows.append((source, place, tensor.nbytes))
        return place

    def end(self, place: int, made: Any) -> None:
        for value in made if isinstance(made, (tuple, list)) else ():
            if isinstance(value, torch.Tensor):
                self._made[id(value)] = weakref.ref(value), place


class Calls:
    """The graphs of all calls of one model; `with calls:` goes around each call."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.running: ModelCall | None = None
        self.reports: list[Report] = []
        self.differences: dict[str, None] = {}  # differences from eager that several graphs make
        self._depth = 0
        self._graphs: list[CompiledGraph] = []  # graphs that share the budget
        self._runs: list[GraphsOfStep] = []
        self._known: set[tuple[CompiledGraph, ...]] = set()

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self.running = ModelCall(sys._getframe(1).f_code)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            call, self.running = self.running, None
            if error is None and call is not None:
                self._finish(call)

    @property
    def shared(self) -> bool:
        """Does the budget stand for more than one graph?"""
        return bool(self._runs)

    def name_sums(self, values: Iterable[Any]) -> None:
        """Report those of the tensors whose gradients a graph of this call has summed."""
        known = {} if self.running is None else self.running.sums
        for value in values if known else ():
            tensor, line = known.get(id(value), (lambda: None, ""))
            if value is not None and tensor() is value:
                self.differences[line] = None

    def is_whole(self, gm: fx.GraphModule) -> bool:
        """Is this graph all that the call runs, as far as is known?"""
        call = self.running
        reason = getattr(gm, "compile_subgraph_reason", None)
        broken = bool(getattr(reason, "graph_break", False))
        if call is None:
            return not broken
        call.compiled += 1
        return not broken and call.compiled == 1 and not call.graphs and not _inside(call.code)

    def _finish(self, call: ModelCall) -> None:
        """When a call has run other graphs than any before, divide the budget among all."""
        key = tuple(call.graphs)
        if not key or key in self._known or self.options.plan is not None:
            return
        if len(key) == 1 and key[0].alone and key[0] not in self._graphs:
            self._known.add(key)
            return
        graphs = list(dict.fromkeys([*self._graphs, *key]))
        place = {graph: i for i, graph in enumerate(graphs)}
        runs = [*self._runs, GraphsOfStep(tuple(place[graph] for graph in key), tuple(call.flows))]
        self._divide(graphs, runs)
        self._graphs, self._runs = graphs, runs
        self._known.add(key)

    def _divide(self, graphs: Sequence[CompiledGraph], runs: Sequence[GraphsOfStep]) -> None:
        shares = [graph.share for graph in graphs if graph.share is not None]
        groups = dict.fromkeys(group for share in shares for group in share.problem.trace.groups)
        found = [graph.report for graph in graphs if graph.report is not None]
        with exchange_for(list(groups), self.options.timeout_s) as exchange:
            reports = plan_shares(found, shares, runs, self.options, exchange)
        log(1, f"{len(graphs)} graphs share the budget")
        for graph, old, report in zip(graphs, found, reports, strict=True):
            self.reports[self.reports.index(old)] = report
            graph.give(report)


def _inside(code: CodeType) -> bool:
    """Is a frame of the model's own code on the stack above the call of the model?

    If so, Dynamo has given up an outer function and compiles the functions that it calls."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        if is_models(frame.f_code.co_filename):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
