"""overlapc in torchtitan's trainers. Of the graph trainer the whole step (forward, loss and
backward, one graph) is planned in the place of its passes for recompute, buckets and order; of the
plain one the model's calls are, as `optimize` plans them.

    import overlapc.torchtitan

    def llama3_8b_planned():
        return overlapc.torchtitan.planned(graph_trainer_llama3_8b(), memory_budget="70GB")

In the graph trainer their clean-up runs before the plan; regional Inductor and CUDA graphs run
behind it and keep its order. Without `memory_budget` a step may take what their passes'
order takes. What cannot be planned runs by their own passes, with one warning.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torchtitan.experiments.graph_trainer import passes as theirs
from torchtitan.experiments.graph_trainer import registry
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
from torchtitan.models.common.attention import FlexAttention
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from overlapc.core.errors import CaptureError, Infeasible, OptionError
from overlapc.integrations.in_place import InPlace, in_place
from overlapc.passes.whole import peak_in_order
from overlapc.planning.options import Options
from overlapc.planning.report import Report
from overlapc.ranks.groups import Attempts
from overlapc.runtime.whole import plan_step, unforeseen_refuses
from overlapc.tools.told import warn

NAME = "overlapc"  # of the pass pipeline; options may follow
_TAGS = "tag_with_memory_policy_pass"  # the last of their passes before a plan
_OFFLOAD = "sac_and_offload"

reports: list[Report] = []  # of planned steps, in the order in which they were traced
models: list[InPlace] = []  # of plain trainers
_trainers: list[weakref.ref[Any]] = []


def planned(config: Any, **options: Any) -> Any:
    """Have a trainer of this config planned, with `optimize`'s options. Returns the config."""
    if isinstance(config, GraphTrainer.Config):
        parsed = Options.parse(options, "torchtitan")
        if parsed.solver == "torch":
            raise OptionError(
                'solver="torch": PyTorch\'s partitioner cuts no whole step; expected "overlap", '
                '"heu", "opt" or a baseline'
            )
        config.compile.pass_pipeline = _registered(parsed)
        return config
    if not isinstance(config, Trainer.Config):
        raise OptionError(
            f"config: found {type(config).__qualname__}, expected GraphTrainer.Config or "
            "Trainer.Config of torchtitan"
        )
    Options.parse(options)
    given = config.model_spec.parallelize_fn
    config.model_spec = replace(config.model_spec, parallelize_fn=_and_plan(given, options))
    return config


def explain() -> str:
    """Say of each planned step what hides its collectives and what does not."""
    found = [each.explain() for each in reports] + [each.explain() for each in models]
    return "\n\n".join(found) or "overlapc has planned no step"


def _and_plan(parallelize: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """As torchtitan parallelizes a model, with its calls planned."""

    @functools.wraps(parallelize)
    def parallelized(model: Any, **given: Any) -> Any:
        made, dims = parallelize(model, **given), given["parallel_dims"]
        reasons = {
            "pipeline parallelism": dims.pp_enabled,
            "context parallelism": dims.cp_enabled,
            "the kernels of its flex attention, which torchtitan compiles, would be lost; the "
            "graph trainer keeps them": any(isinstance(m, FlexAttention) for m in made.modules()),
        }
        if reason := next((reason for reason, found in reasons.items() if found), ""):
            warn(f"overlapc: torchtitan's plain trainer runs as it is: {reason}")
        else:
            models.append(in_place(made, **options))
        return made

    return parallelized


def _registered(options: Options) -> str:
    """The name of a pass pipeline with these options."""
    name = f"{NAME} {options}".strip()
    attempts = Attempts("torchtitan")

    def pipeline(
        traced: Any, config: Any, *, parallel_dims: Any = None
    ) -> list[Callable[..., Any]]:
        default = theirs.construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
        if reason := _unplanned(config):
            warn(f"overlapc: torchtitan's own passes run this step: {reason}")
            return default
        before, instead, behind = _parts(default)
        step = _TracedStep(options, attempts, traced, _trained(traced, config), instead)

        def overlapc_pass(graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
            return step.planned(graph, inputs)

        return [*before, overlapc_pass, *behind]

    registry.register_pass_pipeline(name)(pipeline)
    registry.register_post_init_hook(name)(_begun)
    return name


def _begun(trainer: Any) -> None:
    """Remember a graph trainer, and say so if it has no use for a pass pipeline."""
    _trainers.append(weakref.ref(trainer))
    compiles = trainer.config.compile
    reasons = {
        "pipeline parallelism": trainer.parallel_dims.pp_enabled,
        'compile.mode, expected "aot_fx_trace"': compiles.mode != "aot_fx_trace",
        "compile.enable_passes=False": not compiles.enable_passes,
    }
    if reason := next((reason for reason, found in reasons.items() if found), ""):
        warn(f"overlapc: this run is not planned: {reason}")


class _TracedStep:
    """A traced step that is to be planned."""

    def __init__(
        self,
        options: Options,
        attempts: Attempts,
        traced: Any,
        trained: Sequence[str],
        instead: Sequence[Callable[..., Any]],
    ) -> None:
        self.options, self.attempts, self.traced, self.instead = options, attempts, traced, instead
        self.trained = trained

    def planned(self, graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        static = range(self.traced.num_static_inputs)
        try:
            gradients = dict(self._gradients())
            try:
                options = self._as_much_as_theirs(graph, inputs)
                report = plan_step(graph, gradients, static, options, self.attempts, path_of)
            except Infeasible:
                if self.options.memory_budget is not None:
                    raise
                report = plan_step(graph, gradients, static, self.options, self.attempts, path_of)
        except CaptureError as error:
            self.attempts.refused(error)
            warn(f"overlapc: torchtitan's own passes run this step: {error}")
            for their_pass in self.instead:
                graph = their_pass(graph, inputs)
            return graph
        reports.append(report)
        logger.info(
            f"overlapc: a step of {len(report.problem.trace.ops)} ops, predicted "
            f"{report.step_ms:.1f} ms and {report.peak_bytes / 1e9:.2f} GB"
        )
        return graph

    def _as_much_as_theirs(self, graph: fx.GraphModule, inputs: Any) -> Options:
        """The options, with what their passes' order takes as the budget if none is given."""
        if self.options.memory_budget is not None:
            return self.options
        with unforeseen_refuses():
            theirs = copy.deepcopy(graph)
            for their_pass in self.instead:
                theirs = their_pass(theirs, inputs)
            return replace(self.options, memory_budget=peak_in_order(theirs))

    def _gradients(self) -> Iterator[tuple[int, int]]:
        """The places of trained inputs and of their gradients."""
        names, traced = self.traced.state_fqns, self.traced
        inputs = _places(len(names), traced.input_subclass_layouts)
        results = _places(traced.num_flat_outputs, traced.output_subclass_layouts)
        place = {name: i for i, name in enumerate(names)}
        for name, gradient in zip(self.trained, results[1:], strict=True):
            yield from zip(inputs[place[name]], gradient, strict=True)


def path_of(node: fx.Node) -> str:
    """The module that a node is in, as their tracer marks it."""
    return str((node.meta.get("custom") or {}).get("module_fqn", ""))


def _places(count: int, layouts: Any) -> list[range]:
    """The flat places of values, of which some are tensors around others."""
    found: list[range] = []
    begin = 0
    for i in range(count):
        end = begin + (layouts[i].num_tensors if i in layouts else 1)
        found.append(range(begin, end))
        begin = end
    return found


def _trained(traced: Any, config: Any) -> list[str]:
    """The names of parameters that get gradients, in the order of these."""
    for known in _trainers:
        trainer = known()
        if trainer is not None and trainer.config is config:
            [model] = trainer.model_parts
            named = model.named_parameters(remove_duplicate=False)
            return [name for name, parameter in named if parameter.requires_grad]
    return list(traced.state_fqns[: traced.num_flat_outputs - 1])


def _parts(default: Sequence[Callable[..., Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    """Their passes before a plan, those in its place, and those behind it."""
    names = [theirs._get_pass_name(each) for each in default]
    begin = names.index(_TAGS) + 1
    ends = [i for i, name in enumerate(names) if "inductor" in name or "cudagraph" in name]
    end = min(ends, default=len(names))
    return list(default[:begin]), list(default[begin:end]), list(default[end:])


def _unplanned(config: Any) -> str:
    """Why a step of this config is not planned, or ""."""
    compiles, layout = config.compile, config.parallelism
    reasons = {
        "compile.precompile_artifact_dir: its graphs are in an order already": (
            compiles.precompile_artifact_dir
        ),
        'compile.inductor_compilation="full": Inductor orders the step itself; expected '
        '"regional"': compiles.inductor_compilation == "full",
        f"compile.memory_policy={_OFFLOAD!r}: values on the host are not planned": (
            compiles.memory_policy == _OFFLOAD
        ),
        "compile.ep_overlap: it cuts the step into chunks": compiles.ep_overlap.enabled,
        "parallelism.context_parallel_degree: context parallelism is not planned": (
            layout.context_parallel_degree > 1
        ),
    }
    return next((reason for reason, found in reasons.items() if found), "")


_registered(Options())
