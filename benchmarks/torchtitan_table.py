"""Steps of deep models at eight levels of memory: planned, and by torchtitan's own passes.

    python benchmarks/torchtitan_table.py --models 8b,70b,405b --solver overlap

One rank of many, on fake ranks, traced and planned, not run. All is predicted, for an H100: their
graphs by the same costs and in the same simulator as ours. Theirs are the graph trainer's memory
policies, and one that recomputes nothing, each with gathered parameters kept and gathered again,
and as far ahead as FSDP2's explicit prefetch goes (1 to 4 blocks). The levels run in equal ratios
from the least that any of them takes to the most.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab import write_results
from examples.common import say
from examples.torchtitan import on_cpu
from overlapc.core.errors import Infeasible
from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import simulate
from overlapc.passes.buckets import fuse
from overlapc.passes.nodes import is_wait
from overlapc.passes.trace import trace_in_order
from overlapc.passes.whole import WholeStep
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep
from overlapc.planning.road import plan
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import Hardware, load_hardware

HARDWARE = "h100-sxm"
POLICIES = ("nothing", "default", "eager", "full")  # what is recomputed
AHEAD = (1, 2, 3, 4)
CONSTANT = Hardware.collective_ns


@dataclass(frozen=True)
class Model:
    """A model of torchtitan's, and how it is spread."""

    kind: str
    flavor: str
    ranks: int
    tensor: int = 1
    experts: int = 1


MODELS = {
    "8b": Model("llama3", "8B", 64),
    "70b": Model("llama3", "70B", 128, tensor=8),
    "405b": Model("llama3", "405B", 512, tensor=8),
    "v3": Model("deepseek_v3", "671B", 512, experts=64),
}


@dataclass(frozen=True)
class Step:
    """A predicted step."""

    name: str
    ms: float
    gb: float


class Traced(Exception):
    """Ends a step before it runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", default="8b,70b,405b")
    add("--layers", type=int, help="of a model; default: all")
    add("--seq", type=int, default=8192)
    add("--batch", type=int, default=1)
    add("--levels", type=int, default=8)
    add("--solver", default="overlap")
    add("--constant", action="store_true", help="latency does not grow with ranks")
    add("--chunks", type=int, default=8, help="of the loss; 0: a loss of the whole sequence")
    args = parser.parse_args()
    names = args.models.split(",")
    if len(names) > 1:
        for name in names:
            subprocess.run([sys.executable, *sys.argv, "--models", name], check=True)
        return
    torch.set_num_threads(1)
    if not args.constant:
        Hardware.collective_ns = grown  # type: ignore[method-assign]
    model = MODELS[args.models]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=model.ranks)
    on_cpu.load()
    rows = table(model, args)
    write_results(f"torchtitan_table_{args.models}", {"arguments": vars(args), "predicted": rows})


def table(model: Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a model's table; return its rows."""
    theirs, traced = _traced(model, args)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    shares: list[float] = []
    for budget in _levels([step.gb for step in theirs], args.levels):
        best = min((step for step in theirs if step.gb <= budget), key=lambda step: step.ms)
        ours = _planned(traced, budget, args.solver)
        rows.append({"gb": budget, "best": asdict(best), "ours": ours and asdict(ours)})
        line = f"  {budget:7.2f} GB: {best.name:28} {best.ms:8.1f} ms, planned "
        if ours is None:
            say(f"{line}: nothing fits")
            continue
        shares.append(ours.ms / best.ms)
        say(f"{line}{ours.ms:8.1f} ms ({shares[-1]:.3f}), {ours.gb:.2f} GB, by {ours.name}")
    say(
        f"  {len(shares)} of {len(rows)} planned, median {statistics.median(shares):.3f} of their "
        f"best, worst {max(shares):.3f}; planned in {time.monotonic() - began:.0f} s"
    )
    return rows


def grown(hardware: Hardware, kind: Any, size_bytes: int, ranks: int, per_node: int) -> int:
    """How long a collective takes whose latency grows with ranks: of each hop of a ring, as NCCL
    reckons (src/graph/tuning.cc, ring, simple: 14 us between nodes, 3.4 us within)."""
    ns = CONSTANT(hardware, kind, size_bytes, ranks, per_node)
    if ranks <= per_node or kind not in ("all_gather", "reduce_scatter"):
        return ns
    nodes = -(-ranks // per_node)
    latency_ns = 8_400 + 14_000 * (nodes - 1) + 3_400 * (ranks - nodes)
    return ns + max(0, latency_ns - hardware.inter.alpha_ns)


def _levels(peaks: list[float], count: int) -> list[float]:
    """So many levels in equal ratios, from the least peak to the most."""
    least, most = min(peaks), max(peaks)
    return [least * (most / least) ** (i / max(1, count - 1)) * 1.000001 for i in range(count)]


def _traced(model: Model, args: argparse.Namespace) -> tuple[list[Step], list[WholeStep]]:
    """The steps of torchtitan's passes, and the traced one, to be planned: as it is, and with the
    collectives of each block joined."""
    from torchtitan.experiments.graph_trainer import passes, registry

    import overlapc.torchtitan

    theirs: list[Step] = []
    found: list[WholeStep] = []
    took_s: list[float] = []

    def look(traced: Any, config: Any, *, parallel_dims: Any = None) -> list[Any]:
        def compared(graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
            for policy in POLICIES:
                for keep in (False, True) if policy in ("nothing", "default") else (False,):
                    config.compile.memory_policy = policy
                    config.parallelism.fsdp_reshard_after_forward = "never" if keep else "always"
                    made = passes.construct_default_graph_passes(
                        traced, config, parallel_dims=parallel_dims
                    )
                    changed = copy.deepcopy(graph)
                    for one in made:
                        changed = one(changed, inputs)
                    theirs.extend(_ahead(changed, f"{policy}{', kept' if keep else ''}"))
            raise Traced

        return [compared]

    def caught(graph: Any, gradients: Any, static: Any, *_: Any) -> Any:
        took_s.append(time.monotonic() - began)
        joined = copy.deepcopy(graph)
        found.append(WholeStep(graph, gradients, static))
        if fuse(joined, overlapc.torchtitan.path_of):
            found.append(WholeStep(joined, gradients, static))
        raise Traced

    registry.register_pass_pipeline("look")(look)
    registry.register_memory_policy("nothing")(_nothing_again)
    overlapc.torchtitan.plan_step = caught  # type: ignore[assignment]
    for pipeline in ("look", ""):
        config = on_cpu.config_of(
            model.kind,
            args.layers or 1 << 20,
            flavor=model.flavor,
            sequence=args.seq,
            chunks=args.chunks,
            precision="bfloat16",
            tensor_parallel_degree=model.tensor,
            expert_parallel_degree=model.experts,
        )
        config.training.local_batch_size = args.batch
        config.compile.pass_pipeline = pipeline
        if not pipeline:
            overlapc.torchtitan.planned(
                config, profile="estimate", hardware=HARDWARE, memory_budget="1TB"
            )
        trainer = on_cpu.Titan(config, model.ranks, values=False)
        began = time.monotonic()
        try:
            trainer.step(0)
        except Traced:
            continue
    ops = found[0].captured.trace.ops
    say(f"{model}: {len(ops)} ops, traced in {took_s[0]:.0f} s")
    for step in theirs:
        say(f"  {step.name:28} {step.ms:8.1f} ms, {step.gb:.2f} GB")
    return theirs, found


def _nothing_again(graph: fx.GraphModule, *, config: Any) -> fx.GraphModule:
    """Tag a graph so that nothing is recomputed; but gathers run again, unless they are kept."""
    from torch.utils.checkpoint import CheckpointPolicy
    from torchtitan.experiments.graph_trainer.memory_policy import tag_sac_policy

    unsharded: set[fx.Node] = set()
    if config.parallelism.fsdp_reshard_after_forward == "always":
        for node in graph.graph.nodes:
            given, val = node.all_input_nodes, node.meta.get("val")
            weighs = isinstance(val, torch.Tensor) and val.is_floating_point()
            parameter = node.op == "placeholder" and weighs
            if parameter or (given and unsharded.issuperset(given)):
                unsharded.add(node)

    def policy(node: fx.Node) -> CheckpointPolicy:
        again = node in unsharded
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return tag_sac_policy(graph, policy_fn=policy)


def _ahead(graph: fx.GraphModule, name: str) -> Iterator[Step]:
    """A graph's step with its gathers started 1 to 4 blocks ahead."""
    waits = [n for n in graph.graph.nodes if is_wait(n) and "all_gather" in str(n.args[0].target)]
    waits = [wait for wait in waits if _bucket(wait) is not None]
    gathered: set[Any] = set()
    passes: tuple[list[fx.Node], list[fx.Node]] = [], []  # of forward and backward
    for wait in waits:
        key = tuple(_bucket(wait).all_input_nodes)  # type: ignore[union-attr]
        passes[key in gathered].append(wait)
        gathered.add(key)
    for blocks in AHEAD:
        if blocks > 1:
            for each in passes:
                for at, wait in enumerate(each):
                    for node in _made_for(wait.args[0]):
                        each[max(0, at - blocks)].prepend(node)
        graph.graph.lint()
        graph.recompile()
        yield _in_order(graph, f"{name}, {blocks} ahead")


def _bucket(wait: fx.Node) -> fx.Node | None:
    """What makes the bucket that a gather sends."""
    given = wait.args[0].all_input_nodes  # type: ignore[union-attr]
    return next((node for node in given if "_pre_bucket" in str(node.target)), None)


def _made_for(start: Any) -> list[fx.Node]:
    """A start behind all that is made for it."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for given in node.all_input_nodes:
            if given.op == "call_function" and given not in found:
                visit(given)
        found[node] = None

    visit(start)
    return list(found)


def _in_order(graph: fx.GraphModule, name: str) -> Step:
    captured = trace_in_order(graph)
    order = tuple(op.name for op in captured.trace.ops)
    costs = estimate(captured, load_hardware(HARDWARE))
    timeline = simulate(Problem(captured.trace, costs, phases=("F",)), Plan("", "", (), order))
    return Step(name, timeline.step_ns / 1e6, timeline.peak_bytes / 1e9)


def _planned(steps: list[WholeStep], budget: float, solver: str) -> Step | None:
    """The faster of the plans, as `plan_step` takes it."""
    options = Options(
        memory_budget=round(budget * 1e9), solver=solver, profile="estimate", hardware=HARDWARE
    )
    found: list[Step] = []
    for step, how in zip(steps, ("apart", "joined"), strict=False):
        try:
            report = plan(step.captured, options, TrainingStep("whole step")).report
        except Infeasible:
            continue
        name = f"{how}, {report.plan.found_by or solver}"
        found.append(Step(name, report.step_ms, report.peak_bytes / 1e9))
    return min(found, key=lambda step: step.ms, default=None)


if __name__ == "__main__":
    main()
