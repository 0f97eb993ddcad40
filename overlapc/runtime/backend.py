"""The `torch.compile` backend of overlapc.

AOTAutograd traces the joint graph and handles RNG, mutation, aliasing and autograd; its partition
function is where overlapc plans and rewrites. Code that cannot be captured runs unchanged, with one
warning that names the reason and the place.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis
from torch._inductor import config as inductor_config
from torch.fx._lazy_graph_module import _LazyGraphModule

from overlapc.core.errors import CaptureError, OverlapcError, RankError
from overlapc.core.ir import Plan
from overlapc.passes.capture.aot import as_boxed, let_saved_live
from overlapc.passes.capture.collectives import Raw, trace_ended
from overlapc.passes.capture.joint import inner_places, refuse_subclasses
from overlapc.passes.capture.second import taken_again
from overlapc.passes.capture.watched import other_dtype
from overlapc.passes.emit.direct import direct
from overlapc.passes.emit.rewrite import rewrite
from overlapc.passes.emit.torch_choice import GLANCE, SWEEP, torch_choices
from overlapc.passes.exact.as_eager import are_fake, as_eager
from overlapc.passes.exact.differences import differences, left_out, views_handed_on
from overlapc.passes.exact.switches import InForwardsWay
from overlapc.passes.exact.tangents import as_they_come, given, is_hidden
from overlapc.passes.nodes import line_of, primal_nodes
from overlapc.passes.sharded import as_fsdp2
from overlapc.passes.trace import Captured, trace_joint
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import plan
from overlapc.planning.shares import Share, plan_frugally
from overlapc.planning.unlike import are_alike, carry, collectives, plan_unlike
from overlapc.ranks.board import has_peers
from overlapc.ranks.exchange import Exchange, busy, naming_the_dead
from overlapc.ranks.groups import Attempts, ranks_of
from overlapc.ranks.seeds import warn_of_seeds
from overlapc.runtime.graphs import Calls, CompiledGraph
from overlapc.tools.flags import log
from overlapc.tools.told import Told, warn

# What PyTorch says of sizes that vary, where it takes numbers alone.
_SYMBOLS = ("symbolic sizes", "only concrete integers", "Expected IntList")
_NO_SYMBOLS = "an op takes no sizes that vary (dynamic=False plans each size for itself): "

_HOOKS = ("distributed/fsdp", "deepspeed")  # files of those that gather a sharded model
_SECOND = "the model takes a gradient of it that has a gradient itself (create_graph)"


class Backend:
    """Compiles the graphs of one model; `reports` grows by one for each graph planned."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.steps = Calls(options)
        self.attempts = Attempts("optimize")
        self.reports: list[Report] = self.steps.reports
        self.fallbacks = Told()  # what runs as plain PyTorch, with reasons
        self.calls = 0  # of graphs, planned or not
        self._mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._warned = False
        self._sharded = False
        self.check: Callable[[fx.GraphModule, Sequence[Any]], None] = lambda graph, inputs: None
        self.shapes = Shapes()
        self.differences: list[str] = []  # lines of the model that may differ from eager
        self.views: list[str] = []  # such lines that count if there are several graphs
        self.left_out: list[str] = []  # such lines that count if there is only one graph
        self._cast: list[frozenset[int]] = []  # parameters of each graph under autocast

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.check(gm, example_inputs)
        graph = CompiledGraph(gm, self.steps)
        traced = example_inputs if are_fake(example_inputs) else ()
        partition = PlanningPartition(self, graph, example_inputs)
        self.differences += differences(gm) + _kept_otherwise(example_inputs)
        self.left_out += left_out(gm)
        self.views += views_handed_on(gm) + self._cast_again(example_inputs)
        try:
            refuse_subclasses(example_inputs)
            if place := taken_again(gm):
                raise CaptureError(_SECOND, place)
            with busy("tracing"):
                graph.run = self._counted(self._compile(gm, example_inputs, partition, traced))
            if self.steps.running is None:
                self._warn_of_breaks(graph)
                return graph.run
            graph.compile = lambda inputs, plan: self._counted(
                self._compile(gm, inputs, PlanningPartition(self, graph, (), plan), traced)
            )
            return graph
        except CaptureError as error:
            self.shapes.refuse_alone(graph, error)
            self.attempts.refused(error)
            return self._unchanged(gm, error.reason, error.place)
        except (OverlapcError, RestartAnalysis):  # after RestartAnalysis Dynamo traces again
            raise
        except Exception as error:
            self.shapes.refuse_alone(graph, error)
            hint = _NO_SYMBOLS if any(text in str(error) for text in _SYMBOLS) else ""
            self.attempts.refused(CaptureError(f"{type(error).__name__}: {error}"))
            return self._unchanged(gm, f"{hint}{type(error).__name__}: {error}", "")
        finally:
            partition.primals = None

    def _compile(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        partition: PlanningPartition,
        traced: Sequence[Any],
    ) -> Callable[..., Any]:
        """`traced` are the fake inputs with which the graph was first compiled."""
        with Raw() as raw:
            compiled = self._compiled(gm, example_inputs, partition, traced)
        raw.end()
        return compiled

    def _compiled(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        partition: PlanningPartition,
        traced: Sequence[Any],
    ) -> Callable[..., Any]:
        if self.options.backend == "inductor":
            from overlapc.runtime.inductor import compile_with_inductor

            return compile_with_inductor(gm, example_inputs, partition)
        # As in eager, random numbers are drawn even if nothing reads them.
        random = inductor_config.patch(fallback_random=True)
        way = InForwardsWay()

        def backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            let_saved_live()
            run = way.backward(module, _run_as_ordered(module, inputs))
            return given(run, module, is_hidden(gm), self._differs)

        with as_eager(traced), as_they_come(), random:
            return aot_autograd(
                fw_compiler=lambda module, inputs: way.forward(_run_as_ordered(module, inputs)),
                bw_compiler=backward,
                inference_compiler=_run_as_ordered,
                partition_fn=partition,
            )(gm, example_inputs)

    def _differs(self, line: str) -> None:
        if line not in self.differences:
            self.differences.append(line)

    def _cast_again(self, inputs: Sequence[Any]) -> list[str]:
        """Parameters that eager's autocast casts once for several graphs, but each graph casts
        itself."""
        devices = {t.device.type for t in inputs if isinstance(t, torch.Tensor)}
        if not any(torch.is_autocast_enabled(device) for device in devices & {"cpu", "cuda"}):
            return []
        parameters = frozenset(id(t) for t in inputs if isinstance(t, torch.nn.Parameter))
        # The same parameters mean the same graph, for other shapes.
        shared = [one for one in self._cast if one & parameters and one != parameters]
        self._cast.append(parameters)
        if not shared:
            return []
        return ["a parameter of several graphs under autocast: its gradients are added in float32"]

    def _counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def counted(*args: Any) -> Any:
            self.calls += 1
            with self._mode:
                return run(*args)

        return counted

    @contextlib.contextmanager
    def watched(self, mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Run the forward of every graph under `mode`."""
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def _warn_of_breaks(self, graph: CompiledGraph) -> None:
        """Without `optimize` the begin of a step is unknown."""
        if not graph.alone and self.options.memory_budget is not None and not self._warned:
            self._warned = True
            warn(
                "overlapc: the model is broken into several graphs, and each may take the whole "
                "memory_budget: use overlapc.optimize, which divides it among them"
            )

    def warn_of_longer(self, report: Report) -> None:
        """Warn once of a batch that takes more than the budget, in bytes, of those before it."""
        budget_bytes = report.problem.budget_bytes or 0
        given = self.options.memory_budget
        if given is None or isinstance(given, float) or self._warned:
            return
        if report.peak_bytes > budget_bytes:
            self._warned = True
            warn(
                f"overlapc: this batch takes {report.peak_bytes:,} bytes by the plan of the first "
                f"one, more than memory_budget, {budget_bytes:,}; it is run all the same: begin "
                "with the longest batch, and the plan fits all"
            )

    def _unchanged(self, gm: fx.GraphModule, reason: str, place: str) -> Callable[..., Any]:
        first_line = reason.strip().splitlines()[0] if reason.strip() else "unknown"
        if self.shapes.version is not None:  # FSDP2 runs the whole, or a plan does
            raise CaptureError(first_line, place)
        where = f"graph {len(self.reports) + len(self.fallbacks)} ({place or _begin(gm)})"
        log(1, traceback.format_exc())
        self.run_unchanged(f"{where}: {first_line}")
        return self._counted(_forward_of(gm))

    def run_unchanged(self, what: str) -> None:
        """Warn once about what runs as plain PyTorch, and why."""
        if self._sharded and any(name in what for name in _HOOKS):
            log(1, what)
        else:
            where, _, reason = what.partition(": ")
            self.fallbacks.tell(
                what, f"overlapc runs {where} unchanged, as plain PyTorch: {reason}"
            )

    def between_gathers(self, framework: str) -> None:
        """Warn that hooks of this framework gather the model's parameters. What Dynamo says of
        these hooks is left out from now on."""
        self._sharded = True
        what = f"{framework} shards this model; overlapc plans what is between its gathers only"
        self.fallbacks.tell(what, f"overlapc: {what}")


class CapturedAlone(RankError):
    """A graph that the other ranks run cannot be captured on this one."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"a batch of other shapes cannot be captured on this rank: {reason}; expected what the "
            "ranks' plan can be carried to: pad batches to one length, or leave this model to FSDP2"
        )
        self.reason = reason


class Shapes:
    """Planned graphs of a sharded model, whose batches may differ in shape between ranks. Graphs of
    other shapes take the plan of the one with the same collectives, on each rank by itself."""

    def __init__(self) -> None:
        self.version: Callable[[], int] | None = None  # of what graphs read; None: of no such model
        self.count = 0  # of graphs that have taken a plan
        self._graphs: dict[tuple[int, str], CompiledGraph] = {}
        self._forms: set[tuple[str, ...]] = set()

    def may_differ(self, captured: Captured) -> bool:
        return self.version is not None and len(ranks_of(captured.trace.groups)) > 1

    def planned(self, captured: Captured, graph: CompiledGraph) -> None:
        self._forms.add(graph.form)
        self._graphs[self._key(captured)] = graph

    def carried(self, captured: Captured) -> Report | None:
        """The report of a planned graph, carried to this one, or None."""
        known = self._graphs.get(self._key(captured)) if self.may_differ(captured) else None
        if known is None or known.report is None:
            return None
        report = carry(known.report, captured, TrainingStep(known.name))
        self.count += 1
        return report

    def refuse_alone(self, graph: CompiledGraph, error: Exception) -> None:
        """Raise for a graph that ranks run for other shapes, and that cannot be captured for these:
        this rank must not leave the others."""
        if graph.form in self._forms:
            raise CapturedAlone(str(error)) from error

    def _key(self, captured: Captured) -> tuple[int, str]:
        assert self.version is not None
        return self.version(), collectives(captured)


class PlanningPartition:
    """AOTAutograd's partition function: plan the joint graph, and emit it in the plan's order."""

    def __init__(
        self,
        backend: Backend,
        graph: CompiledGraph,
        example_inputs: Sequence[Any],
        plan: Plan | None = None,
    ) -> None:
        self.backend = backend
        self.graph = graph
        self.plan = plan  # given if a graph is compiled again
        self.primals: list[Any] | None = flatten_inputs(example_inputs)

    def __call__(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **partition_options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = tuple(static_lifetime_input_indices or ())
        as_fsdp2(joint, num_fwd_outputs)
        captured = trace_joint(
            joint,
            num_fwd_outputs,
            inner_places(joint, static),
            by_inductor=self.backend.options.backend == "inductor",
        )

        def emit(plan: Plan) -> tuple[fx.GraphModule, fx.GraphModule]:
            return rewrite(
                captured,
                plan,
                joint_inputs,
                static_lifetime_input_indices=list(static),
                **partition_options,
            )

        if self.plan is not None:
            if self.plan.digest != captured.trace.digest:
                raise CaptureError(
                    "the second trace of the graph differs from the first", self.graph.name
                )
            return emit(self.plan)
        groups, timeout_s = captured.trace.groups, self.backend.options.timeout_s
        if (report := self.backend.shapes.carried(captured)) is not None:
            self.backend.warn_of_longer(report)
            return emit(report.plan)
        with trace_ended(), self.backend.attempts.exchange_for(groups, timeout_s) as exchange:
            primals = matching(self.primals, captured)
            report = self._planned(captured, primals, joint_inputs, exchange)
            warn_of_seeds(captured, primals, exchange)
            modules = emit(report.plan)
        self.backend.reports.append(report)
        return modules

    def _planned(
        self, captured: Captured, primals: list[Any] | None, inputs: Any, exchange: Exchange | None
    ) -> Report:
        options, graph = self.backend.options, self.graph
        sweep = SWEEP if options.solver == "torch" else GLANCE
        found: dict[str, Any] = {
            "primals": primals,
            "exchange": exchange,
            "torch_choices": lambda: torch_choices(captured, inputs, sweep),
        }
        step = TrainingStep(f"graph {len(self.backend.reports)}")
        shapes, share = self.backend.shapes, None
        ragged = exchange is not None and shapes.may_differ(captured)
        if ragged and exchange is not None and not are_alike(captured, exchange):
            report = plan_unlike(captured, options, step, **found)
        elif graph.takes_all:
            report = plan(captured, options, step, **found).report
            problem = replace(report.problem, budget_bytes=None)
            share = Share(problem, options.solver, (report.plan.saved,))
        else:
            share, report = plan_frugally(captured, options, step, **found)
        graph.planned(report, share)
        if ragged:
            shapes.planned(captured, graph)
        return report


def _kept_otherwise(inputs: Sequence[Any]) -> list[str]:
    """Types of gradients that a trace does not know."""
    leaves = (t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf)
    kept = dict.fromkeys((leaf.dtype, other) for leaf in leaves if (other := other_dtype(leaf)))
    return [
        f"a leaf of {own} keeps its gradient as {other} (grad_dtype): eager adds up there what "
        f"several uses give, the graph in {own}"
        for own, other in kept
    ]


def _begin(gm: fx.GraphModule) -> str:
    """The line of the user's code at which a graph of Dynamo's begins."""
    for node in gm.graph.nodes:
        if node.op != "placeholder" and node.stack_trace:
            return f"from {line_of(node)}"
    return "of no known source"


def _run_as_ordered(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """The eager compiler: the graph itself, node by node, taking its arguments boxed."""
    run: Callable[..., Any] = direct(module)
    if has_peers():
        run = naming_the_dead()(run)
    if getattr(module, "_boxed_call", False):
        return as_boxed(lambda arguments: run(arguments))
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(run)


def _forward_of(module: fx.GraphModule) -> Callable[..., Any]:
    """A graph's code, without the hooks of all modules, which a call of the module would run."""
    _LazyGraphModule.force_recompile(module)  # until it is made, `forward` calls the module
    return module.forward


def flatten_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Real inputs as AOTAutograd passes them to graphs: the inner tensors of tensor subclasses."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    found: list[Any] = []
    for value in inputs:
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            found += flatten_inputs([getattr(value, name) for name in names])
        else:
            found.append(value)
    return found


def matching(primals: list[Any] | None, captured: Captured) -> list[Any] | None:
    """The real primals, if they fit the graph; else None, and `measure` makes some up."""
    nodes = primal_nodes(captured.joint)
    if primals is None or len(primals) != len(nodes):
        return None
    for node, value in zip(nodes, primals, strict=True):
        expected = node.meta.get("val")
        if isinstance(expected, torch.Tensor) != isinstance(value, torch.Tensor):
            return None
        if isinstance(value, torch.Tensor) and (
            value.dtype != expected.dtype or value.dim() != expected.dim()
        ):
            return None
    return primals


def overlapc_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """`torch.compile(model, backend="overlapc", options={...})`; options are `optimize`'s."""
    given = options.pop("options", None) or options
    return Backend(Options.parse(given, "torch.compile"))(gm, example_inputs)
