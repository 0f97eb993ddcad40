"""Lancet's models on Lancet's clusters (Jiang et al., MLSys 2024): published beside predicted.

    python benchmarks/papers/lancet.py [--microbatches 4] [--slices 2]

Eight nodes of eight GPUs, two experts each, every other block of experts, capacity factor 1,
float32, the batch a GPU that the paper gives. Blocks only: no embedding, head, loss or gradient
all-reduce. Each way of overlapping is compared with the graph run op by op, nothing overlapped
and everything saved, and may use as much memory, but for the greedy placement, which knows no
memory and may use any. Everything is *predicted*.

Lancet also cuts forwards into parts that overlap each other's all-to-alls. Here a forward's
all-to-alls run under another slice of the same batch, which is cut as a whole, forward and
backward; or under the backward of another microbatch. Each way is also shown without late weight
gradients: with weight gradients that run as soon as they can, as eager has them. All add their
gradients up, slices once for each slice.

Two more baselines cut only ranges (`lancet_ranges.py`): Lancet's own program, whose
backward stays whole, and the experts alone, from all-to-all to all-to-all, as Tutel and FasterMoE
do, forward and backward; each with the number of pieces that suits it best. What a range reads is
copied once where it is split for its pieces, and what it leaves where they are joined: Lancet's
published code puts a split and a concatenation there and counts what they take
(src/pass/dist_optimization/partition_exprs.cc: `SplitTensor`, `ConcatTensor`, `Finalize_`). Ranges
are chosen with that in view. "free joins" are the same baselines if neither took any time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lab import write_results
from benchmarks.papers import lancet_ranges as ranges
from benchmarks.problems import MOE_SHAPES, Stage, captured
from overlapc.core.ir import Plan, Problem, Timeline, issue
from overlapc.core.merge import merge
from overlapc.core.simulate import simulate
from overlapc.passes.emit.parts import parameter_gradients
from overlapc.planning.problem import TrainingStep, eager_timeline, formulate
from overlapc.profiler.estimate import estimate
from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.solvers import solve
from overlapc.solvers.order.slices import across_border, solve_slices
from overlapc.solvers.step import solve_step

RANKS = 64
LAYERS = {"lancet-S": 12, "lancet-L": 24}
BATCH = {"lancet-S": {"a100": 24, "v100": 16}, "lancet-L": {"a100": 48, "v100": 8}}
PIECES = (2, 4)  # of ranges; Lancet never takes more
# speedup (most, mean) over the best of its rivals with Switch gates, and how much less
# communication is exposed (against RAF, against Tutel)
PUBLISHED = {"a100": ((1.21, 1.17), (0.69, 0.66)), "v100": ((1.30, 1.22), (0.83, 0.77))}


def machines() -> dict[str, tuple[str, Hardware]]:
    """A100 with four 100 Gb/s cards a node, as p4d.24xlarge, and V100 with one."""
    a100, v100 = load_hardware("a100-sxm-40"), load_hardware("v100-sxm2-32")
    cards = replace(a100.inter, bytes_per_s=50e9)
    plain = replace(a100, inter=cards)
    fast = replace(plain, peak_flops={**a100.peak_flops, "float32": a100.peak_flops["tf32"]})
    return {"A100": ("a100", plain), "A100, TF32": ("a100", fast), "V100": ("v100", v100)}


def formulated(
    model: str, kind: str, machine: Hardware, pieces: int, slices: int = 1
) -> tuple[Problem, Problem]:
    """The problem of the batch's so many slices, or of one of its pieces, and that of one that
    all slices are held with. Gradients are added up, as in training."""
    graph = captured(Stage(model, LAYERS[model], RANKS, 512, BATCH[model][kind] // pieces))
    profile = estimate(graph, machine, {lane: RANKS for lane in graph.trace.lanes})
    step = TrainingStep(
        gradients=tuple(parameter_gradients(graph)),
        add_ns_per_kib=machine.add_ns_per_kib,
        slices=slices,
        loss=False,
    )
    return formulate(graph.trace, profile, None, step), step.slice(graph.trace, profile)


def problem_of(model: str, kind: str, machine: Hardware) -> Problem:
    problem, _ = formulated(model, kind, machine, 1)
    return replace(problem, budget_bytes=eager_timeline(problem).peak_bytes)


def sliced(
    model: str, kind: str, machine: Hardware, slices: int, budget: int
) -> tuple[Problem, Plan]:
    """The problem of a batch in slices, and its plan, as `TrainStep` has it."""
    both = formulated(model, kind, machine, slices, slices)
    problem, lone = (replace(each, budget_bytes=budget) for each in both)
    return across_border(problem, solve_slices(problem, lone, solve(lone, "overlap")))


def exposed_ns(timeline: Timeline) -> int:
    return sum(exposure.exposed_ns for exposure in timeline.exposures)


def copy_ns_per_byte(machine: Hardware) -> float:
    """What it takes to read and write a byte once."""
    return 2e9 / (machine.memory_bytes_per_s * machine.memory_efficiency)


def at_once(problem: Problem, plan: Plan) -> Plan:
    """The plan with each weight gradient where what it reads has just been made."""
    trace = problem.trace
    late = {op.name: op for op in trace.ops if op.piece.letter == "W"}
    order = [text for text in plan.order if text not in late]
    for op in late.values():
        made = set()
        for name in op.inputs:
            maker = trace.op.get(trace.value[name].producer)
            if maker is None:
                continue
            if issue(maker.name, True) in order:
                made.add(issue(maker.name, True))
            elif not maker.is_forward or maker.piece.microbatch == op.piece.microbatch:
                made.add(maker.name)  # what an earlier step saved is there
        last = max((at for at, text in enumerate(order) if text in made), default=-1)
        order.insert(last + 1, op.name)
    return replace(plan, order=tuple(order))


def measure(
    model: str, name: str, kind: str, machine: Hardware, count: int, slices: int
) -> dict[str, Any]:
    problem = problem_of(model, kind, machine)
    plain = eager_timeline(problem)
    lanes = sum(problem.cost(op.name).comm_ns for op in problem.trace.ops)
    found = {"nothing": (plain.step_ns, exposed_ns(plain))}
    boundless = replace(problem, budget_bytes=10 * plain.peak_bytes)
    greedy = simulate(problem, solve(boundless, "lancet"))
    found["weight gradients, greedy"] = greedy.step_ns, exposed_ns(greedy)
    alone = solve(problem, "overlap")
    joint = simulate(problem, alone)
    found["joint"] = joint.step_ns, exposed_ns(joint)
    cut, plan = sliced(model, kind, machine, slices, plain.peak_bytes)
    compute_ns = sum(problem.cost(op.name).compute_ns for op in problem.trace.ops)
    more_ns = sum(cut.cost(op.name).compute_ns for op in cut.trace.ops)
    for way, timeline in (
        ("slices, weight gradients at once", simulate(cut, at_once(cut, plan))),
        ("slices", simulate(cut, plan)),
    ):
        found[way] = timeline.step_ns, exposed_ns(timeline)
    pieces = {k: formulated(model, kind, machine, k)[0] for k in PIECES}
    for way, rival in ranges.BASELINES.items():
        for said, copy_ns in ((way, copy_ns_per_byte(machine)), (f"{way}, free joins", 0.0)):
            timeline = simulate(*rival(problem, pieces, copy_ns))
            found[said] = timeline.step_ns, exposed_ns(timeline)
    plans = solve_step(problem, "heu", lambda: alone, count)
    assert len(plans) == 2, "merging found nothing faster"
    lone, merged = plans
    both = merge(problem, 1)
    parts = (problem, lone, 1), (both, merged, count - 1)
    for way, placed in (
        ("microbatches merged, weight gradients at once", at_once),
        ("microbatches merged", lambda _, plan: plan),
    ):
        ran = [(simulate(piece, placed(piece, plan)), times) for piece, plan, times in parts]
        found[way] = (
            sum(timeline.step_ns * times for timeline, times in ran) // count,
            sum(exposed_ns(timeline) * times for timeline, times in ran) // count,
        )
    return {
        "slices_peak": simulate(cut, plan).peak_bytes / plain.peak_bytes,
        "slices_compute": more_ns / compute_ns,
        "greedy_peak": greedy.peak_bytes / plain.peak_bytes,
        "model": model,
        "cluster": name,
        "all_to_all_share": lanes / plain.step_ns,
        "ways": {
            way: {
                "step_ms": step / 1e6,
                "faster": plain.step_ns / step,
                "exposed_less": 1 - exposed / max(1, exposed_ns(plain)),
            }
            for way, (step, exposed) in found.items()
        },
        "published": PUBLISHED[kind],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=4, help="of a merged step")
    parser.add_argument("--slices", type=int, default=2, help="of a batch")
    args = parser.parse_args()
    rows = []
    for model in LAYERS:
        assert MOE_SHAPES[model][2] == 2
        for name, (kind, machine) in machines().items():
            row = measure(model, name, kind, machine, args.microbatches, args.slices)
            rows.append(row)
            (most, mean), cuts = row["published"]
            print(
                f"{model} on {name}: all-to-all is {row['all_to_all_share']:.0%} of the step; "
                f"published {mean:.2f}x (most {most:.2f}x), exposed up to -{cuts[0]:.0%} and "
                f"-{cuts[1]:.0%}"
            )
            print(f"    (the greedy placement's peak is {row['greedy_peak']:.2f} of the others')")
            print(f"    (slices compute {row['slices_compute']:.3f} of the uncut batch's time)")
            for way, ns in row["ways"].items():
                print(
                    f"    {way:46} {ns['step_ms']:8.1f} ms  {ns['faster']:.2f}x  exposed "
                    f"-{ns['exposed_less']:.0%}",
                    flush=True,
                )
            note = {"microbatches": args.microbatches, "slices": args.slices}
            write_results(
                "papers_lancet", {"what": "predicted, per microbatch", **note, "rows": rows}
            )


if __name__ == "__main__":
    main()
