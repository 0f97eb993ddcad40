"""`optimize` makes a model train by a plan; `predict` plans a model without running it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchDynamoException,
    TorchRuntimeError,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves

from overlapc.core.door import Door
from overlapc.core.errors import CaptureError, OptionError, OverlapcError, RankError
from overlapc.core.files import StrPath
from overlapc.core.ir import Plan
from overlapc.passes.capture import front as direct
from overlapc.passes.capture import joint
from overlapc.passes.capture.meta_stand_ins import has_meta, instead_of_meta
from overlapc.passes.capture.untraced import Raised, refuse_switched_off
from overlapc.passes.capture.untraced import untraced as refusal_of
from overlapc.passes.emit.rewrite import rewrite
from overlapc.passes.exact.as_eager import CAPTURE
from overlapc.passes.trace import Captured
from overlapc.planning import road
from overlapc.planning.options import DEFAULTS, Budget, Options
from overlapc.planning.report import Report
from overlapc.ranks.board import has_peers
from overlapc.ranks.exchange import busy, in_call
from overlapc.runtime.backend import Backend, CapturedAlone
from overlapc.runtime.checking import Checked, check
from overlapc.runtime.foreign import (
    FIRST_CALL,
    TWIN,
    refuse_foreign,
    refuse_sharded_twin,
    refuse_slices,
    refuse_unmade,
    sharded_by,
    unmade,
    untraced,
)
from overlapc.runtime.inexact import Inexact
from overlapc.runtime.regions import Region
from overlapc.runtime.skipped import GivenUp, why_untraced
from overlapc.runtime.slicing.auto import AutoCalls
from overlapc.runtime.slicing.sliced import SlicedCalls
from overlapc.sharded.lowered import Lowered
from overlapc.tools.told import warn

__all__ = ["capture", "optimize", "predict", "rewrite"]

Model = TypeVar("Model", bound=nn.Module)
# One model may have many graphs, and there may be many models of one class.
_SETTINGS = {
    **CAPTURE,
    **joint.GUARDS,
    "recompile_limit": joint.RECOMPILES,
    "accumulated_recompile_limit": 64 * joint.RECOMPILES,
}
# For a model that branches on a size that depends on data.
_END_AT_DATA = {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False}
# Newer releases keep the graphs of each `torch.compile` call apart.
_APART = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_OF_ITS_OWN: dict[str, Any] = {"isolate_recompiles": True} if _APART else {}
_LEAVES = (
    "this batch cannot be captured on this rank ({}), and the other ranks may run their plan; "
    "expected every batch to be of the graph of the first: pad batches to one length, or leave "
    "this model to FSDP2"
)
_CAST_AGAIN = (
    "several calls in one region of autocast: eager casts a parameter once for all of them and "
    "adds its gradients in the lower precision, here each call casts it"
)


def optimize(model: Model, **options: Any) -> Model:
    """Return a twin of `model` whose training step overlaps recompute and weight gradients with
    communication, with bitwise the same gradients.

    The twin is of the same type as `model` and shares all its state (parameters, buffers, hooks,
    mode); use either. It plans at its first forward under autograd, once for each graph. Options
    are those of `overlapc.Options`. Given a twin, return it, or with other options another twin of
    the same model.

    The twin is a `Door`: it has `graphs` (a report for each: plan, timeline, problem), `step_ms`,
    `peak_bytes`, `fallbacks`, `differences` and `explain()`; and `plan` and `timeline` of the only
    graph.
    """
    parsed = Options.parse(options)
    if isinstance(model, Optimized):
        engine = _engine(model)
        if engine.options == parsed:
            return model
        return _twin(engine.model, parsed)
    _check_model(model)
    return _twin(model, parsed)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"optimize expects an nn.Module, found {type(model).__name__}")
    refuse_foreign("optimize", model)
    hidden = [name for name in _SHOWN if hasattr(model, name)]
    if hidden:
        warn(
            f"overlapc: the model's {', '.join(hidden)} cannot be read on its twin, which has "
            "attributes of these names: read them on the model itself"
        )


def capture(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    """Return the joint graph of one training step of `model`, the graph that `optimize` plans,
    without running the model. Tensors and process groups may be real or fake; tensors on the meta
    device are traced as a CPU's.

    `model(*args)` must return tensors, at least one of which requires a gradient.
    """
    refuse_unmade("capture", model)
    if not has_meta(model, (args, kwargs)):
        return _captured(model, args, kwargs)
    try:
        with instead_of_meta(model, (args, kwargs)) as (made, named):
            return _captured(model, made, named)
    except CaptureError as error:
        captured = _captured(model, args, kwargs)
        warn(
            "overlapc captured the model on the meta device, where PyTorch has other ops for "
            "attention and losses than on a CPU or a GPU: times and memory are of those. With "
            f"tensors of a CPU in their place it could not be captured: {error}"
        )
        return captured


def _captured(model: nn.Module, args: Any, kwargs: Any) -> Captured:
    try:
        return joint.capture(model, *args, **kwargs).captured
    except CaptureError as error:
        captured = direct.capture(model, *args, **kwargs)
        warn(
            f"overlapc captured without Dynamo, which cannot make one graph: {error}; "
            "overlapc.optimize cannot use a plan of this graph"
        )
        return captured


def predict(
    model: nn.Module,
    *args: Any,
    memory_budget: Budget = None,
    solver: str = "overlap",
    hardware: StrPath = "a100-sxm-80",
    **kwargs: Any,
) -> Report:
    """Plan a model without running it, on real or fake tensors and process groups, with costs
    estimated for `hardware`. With what `capture` returns for the same model, `rewrite(captured,
    report.plan)` gives the graphs."""
    own = inspect.signature(model.forward).parameters
    for name in kwargs:
        if name in DEFAULTS and name not in own:
            raise OptionError(
                f"option {name!r}: overlapc.predict has memory_budget, solver and hardware; pass "
                "what the model's forward takes behind them, or use overlapc.optimize"
            )
    options = Options(
        memory_budget=memory_budget, solver=solver, profile="estimate", hardware=hardware
    )
    return road.plan(capture(model, *args, **kwargs), options).report


class Optimized(Door):
    """Methods that `optimize` adds to the class of a model. Instances share the model's
    `__dict__`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = _engine(self)
        if not engine.called:
            refuse_sharded_twin(self, engine.model)
        engine.called = True
        if not torch.is_grad_enabled() and engine.sliced is None:
            return engine.model(*args, **kwargs)
        return engine.call(args, kwargs)

    @property
    def graphs(self) -> list[Report]:
        """One report for each graph planned so far."""
        engine = _engine(self)
        return [r for calls in engine.cuts for r in calls.reports.values()] + engine.backend.reports

    @property
    def fallbacks(self) -> list[str]:
        """Graphs and functions that run as plain PyTorch, and batches that run uncut, with the
        reason."""
        engine = _engine(self)
        cuts = [f"a batch: {why}" for calls in engine.cuts for why in calls.fallbacks]
        return cuts + engine.backend.fallbacks

    @property
    def differences(self) -> list[str]:
        """Lines of the model whose trace may give other results than eager, with the reason."""
        backend = _engine(self).backend
        graphs = len(backend.reports) + len(backend.fallbacks)
        more = backend.views if graphs > 1 else backend.left_out
        cuts = [line for calls in _engine(self).cuts for line in calls.differences]
        return [*dict.fromkeys([*cuts, *backend.differences, *backend.steps.differences, *more])]

    @property
    def plan(self) -> Plan:
        return self._only().plan

    @property
    def timeline(self) -> Any:
        return self._only().timeline

    def explain(self) -> str:
        """Say for every collective how long it takes, what hides it, and why the rest is not
        hidden."""
        parts = [report.explain() for report in self.graphs]
        engine = _engine(self)
        parts += [str(said) for calls in engine.cuts for said in calls.said.values()]
        if count := engine.backend.shapes.count:
            parts.append(f"{count} more traces, of other shapes, run by these plans")
        parts += [f"{reason} (runs as plain PyTorch)" for reason in engine.backend.fallbacks]
        parts += [f"{reason} (runs uncut)" for calls in engine.cuts for reason in calls.fallbacks]
        parts += [f"may be not as eager: {line}" for line in self.differences]
        if isinstance(engine.sliced, AutoCalls):
            parts.append(engine.sliced.explain())
        if engine.checked is not None:
            parts.append(str(engine.checked))
        if engine.backend.steps.shared:
            parts.insert(0, "graphs share one budget: a peak counts what the others hold meanwhile")
        return (
            "\n\n".join(parts)
            or "nothing planned yet: call the model itself, not its forward, in training"
        )

    def _only(self) -> Report:
        reports = self.graphs
        if len(reports) != 1:
            raise OverlapcError(
                f"this model has {len(reports)} planned graphs, not one; "
                + ("run a training forward first" if not reports else "see .graphs")
            )
        return reports[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        engine = _engine(self)
        return _twin(copy.deepcopy(engine.model, memo), engine.options)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        engine = _engine(self)
        return _twin, (engine.model, engine.options)


class _Engine:
    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model = model
        self.options = options
        self.to_check = options.verify
        self.checked: Checked | None = None
        self.made = False  # whether all parameters are known to be there
        self.called = False  # the twin, in training or not
        self.begun = False
        self.silent = False  # whether the last call ran no graph at all
        self.settings: dict[str, Any] = {}  # Dynamo's settings for this model alone
        self.fails = False  # whether Dynamo itself fails to trace the model
        self.static = False  # trace each size for itself
        self.region = Region()
        self.inexact = Inexact()
        self.backend = Backend(options)
        self.lowered = Lowered(model, by_engine=True)
        self.backend.check = self.lowered.check
        self.forward = self._compiled()
        self.sliced: SlicedCalls | AutoCalls | None = None
        if options.slices == "auto":
            self.sliced = AutoCalls(model, options, self.uncut)
        elif options.slices > 1:
            self.sliced = SlicedCalls(model, options, options.slices, self.uncut)

    def _compiled(self) -> Callable[..., Any]:
        """The compiled model. Hooks of a lowered one are of the same graph in a function alone; of
        others the call is a module's, with the hooks of all modules."""
        model = self.model
        if self.lowered:
            self.backend.shapes.version = lambda: self.lowered.version

        def whole(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        compiled: Any = torch.compile(
            whole if self.lowered else model,
            backend=self.backend,
            dynamic=False if self.static else self.options.dynamic,
            fullgraph=bool(self.lowered),
            **_OF_ITS_OWN,
        )
        return compiled if self.lowered else compiled.forward

    @property
    def cuts(self) -> list[SlicedCalls]:
        """What runs calls in slices."""
        if isinstance(self.sliced, AutoCalls):
            return self.sliced.used
        return [] if self.sliced is None else [self.sliced]

    @untraced
    def call(self, args: Any, kwargs: Any) -> Any:
        if not self.made and (what := unmade(self.model)):
            warn(f"overlapc runs this call {FIRST_CALL}: {what}")
            return self.model(*args, **kwargs)
        if self.sliced is not None and not self.made:
            refuse_slices(self.model, self.options.slices)
        self.made = True
        return self.uncut(args, kwargs) if self.sliced is None else self.sliced(args, kwargs)

    def uncut(self, args: Any, kwargs: Any) -> Any:
        """Run a call whole: planned, or as plain PyTorch if no gradient is wanted."""
        if not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        try:
            with dynamo_config.patch(_SETTINGS | self.settings):
                if self.begun:
                    with in_call():
                        return self.run(args, kwargs)
                self.begun = True
                if not self.lowered:
                    self.lowered.look()
                    self.forward = self._compiled() if self.lowered else self.forward
                if not self.lowered and (by := sharded_by(self.model)):
                    self.backend.between_gathers(by)
                with busy("tracing"):  # the other ranks wait
                    return self.run(args, kwargs)
        except BackendCompilerFailed as failed:
            if isinstance(failed.inner_exception, OverlapcError):
                raise failed.inner_exception from None
            raise

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the compiled model, and name what Dynamo gives up of it."""
        if self.to_check:
            self.to_check = False
            self.checked = check(self.model, self._run, self.backend.watched, args, kwargs)
            if self.checked.different:
                warn(f"overlapc {self.checked}")
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            return self.model(*args, **kwargs)
        try:
            refuse_switched_off()
        except CaptureError as error:  # before Dynamo, which would skip the model for good
            self.backend.run_unchanged(f"the whole model: {error}")
            return self.model(*args, **kwargs)
        return self._in_its_place(args, kwargs) if self.lowered else self._traced(args, kwargs)

    def _in_its_place(self, args: Any, kwargs: Any) -> Any:
        """Run a model that FSDP2 shards: as one graph, or as FSDP2 runs it, from the call on that
        cannot be one."""
        if self.lowered.is_open:
            return self.model(*args, **kwargs)
        try:
            self.lowered.refuse_twice()
            results = self._as_one_graph(args, kwargs)
        except CaptureError as error:
            refused = error
        else:
            self.lowered.ran()
            return results
        results = self.model(*args, **kwargs)  # raises if the model itself fails
        self.fails = True
        self.backend.run_unchanged(f"the whole model: {refused}")
        return results

    def _as_one_graph(self, args: Any, kwargs: Any) -> Any:
        before = self.backend.calls
        if self.region.entered_again() and _CAST_AGAIN not in self.backend.differences:
            self.backend.differences.append(_CAST_AGAIN)
        limit = dynamo_config.patch(fail_on_recompile_limit_hit=True)
        tracing = joint.tracing(self.backend.differences)
        try:
            with self.lowered.aside(), limit, self.backend.steps, tracing:
                results = self.forward(*args, **kwargs)
        except BackendCompilerFailed as failed:
            inner = failed.inner_exception
            if isinstance(inner, CapturedAlone) and not self.static:
                self._leave_symbols(inner.reason)
                return self._as_one_graph(args, kwargs)
            if isinstance(inner, CaptureError):
                raise inner from None
            raise
        except FailOnRecompileLimitHit as error:
            raise RankError(_LEAVES.format("it has become another graph too often")) from error
        except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
            if self.lowered.gather_first(error):
                return self._as_one_graph(args, kwargs)
            refused = refusal_of(error)
            if self.backend.reports and has_peers() and not isinstance(refused, Raised):
                raise RankError(_LEAVES.format(refused)) from error
            self.backend.attempts.refused(refused)
            raise refused from error
        if self.backend.calls == before:
            self.backend.run_unchanged("the whole model: it ran no graph that has a gradient")
        if self.checked is None:  # else it is known
            self.inexact.say(self.backend.differences)
        return results

    def _leave_symbols(self, reason: str) -> None:
        """Trace each size for itself from now on."""
        warn(
            f"overlapc traces each shape of a batch for itself, {joint.RECOMPILES} at most: with "
            f"sizes that vary it cannot: {reason}"
        )
        self.static = True
        self.forward = self._compiled()

    def _traced(self, args: Any, kwargs: Any) -> Any:
        before = self.backend.calls
        if self.region.entered_again() and _CAST_AGAIN not in self.backend.differences:
            self.backend.differences.append(_CAST_AGAIN)
        try:
            tracing = joint.tracing(self.backend.differences)
            with GivenUp() as given_up, self.backend.steps, tracing:
                results = self.forward(*args, **kwargs)
                self.backend.steps.name_sums(tree_leaves(results))
            if self.checked is None:  # else it is known
                self.inexact.say(self.backend.differences)
        except (InternalTorchDynamoError, TorchRuntimeError, GuardOnDataDependentSymNode) as error:
            reason = why_untraced(error)
            if reason and not self.settings:
                self.settings = _END_AT_DATA
                with dynamo_config.patch(_END_AT_DATA):
                    return self._traced(args, kwargs)
            if not reason:
                raise
            results = self.model(*args, **kwargs)  # raises if the model itself fails
            self.fails = True
            self.backend.run_unchanged(f"the whole model: {reason}")
            return results
        ran = self.backend.calls > before
        if not self.backend.reports and not self.backend.fallbacks:  # graphs without gradients
            ran = ran and not any(getattr(t, "requires_grad", False) for t in tree_leaves(results))
        if not ran and self.silent:  # the warning has been given before
            return results
        self.silent = not ran

        def again() -> Any:
            return joint.capture(self.model, *args, **kwargs)

        plain = given_up.found(ran, again) or [given_up.between(results, (args, kwargs), again)]
        for what in filter(None, plain):
            self.backend.run_unchanged(what)
        return results


_SHOWN = [name for name in vars(Door) | vars(Optimized) if not name.startswith("_")]
_STEP = "training_step"  # what Lightning calls in the place of a model
_UNSEEN = (
    f"overlapc plans nothing of {_STEP}: it calls this model's layers, but not the model; expected "
    f"`self(...)` in {_STEP}, or in the place of the whole its network optimized: "
    "`self.network = overlapc.optimize(self.network)`"
)


_SHARDED = "_get_fsdp_state"  # of a module that FSDP2 shards, which it knows by its identity


def _state_of_fsdp2(self: Any) -> Any:
    return getattr(_engine(self).model, _SHARDED)()


def _watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `training_step` that says so, once, if nothing of it can be planned."""

    @functools.wraps(step)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        engine = _engine(self)
        if not engine.called:
            engine.called = True
            warn(_UNSEEN)
        return result

    return training_step


# The engine lives beside the twin, not in the __dict__ it shares with its model.


def _engine(twin: Any) -> _Engine:
    engine: _Engine = getattr(twin, TWIN)
    return engine


def _twin(model: Any, options: Options) -> Any:
    base = type(model)
    own: dict[str, Any] = {"__slots__": (TWIN,), "__module__": base.__module__}
    if callable(step := getattr(base, _STEP, None)):
        own[_STEP] = _watched(step)
    if hasattr(base, _SHARDED):
        own[_SHARDED] = _state_of_fsdp2
    kind = type(base.__name__, (Optimized, base), own)
    twin: Any = object.__new__(kind)
    object.__setattr__(twin, "__dict__", model.__dict__)
    object.__setattr__(twin, TWIN, _Engine(model, options))
    return twin
