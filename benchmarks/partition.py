"""Layers of GPTs to pipeline stages: the even split, layers moved, and the proven best.

    python benchmarks/partition.py --models 7B,13B,23B --stages 4,8 --hardware a100-sxm-80

A stage is captured on fake ranks, with its part of embedding or head, and takes what HEU's plan for
it takes: in the memory that weights, gradients and optimizer leave, and with as many microbatches
in flight as 1F1B holds there. Everything is *predicted*, but the search's time is measured.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab import write_results
from benchmarks.problems import GPT_SHAPES
from overlapc.errors import Infeasible
from overlapc.ir import Problem
from overlapc.simulate import simulate
from overlapc.solvers import solve
from overlapc.solvers.partition import Partition, best_partition, even, moved

VOCAB = 51200
# bf16 weights, float32 weights and both moments; gradients are in the plan
BYTES_PER_PARAMETER = 2 + 4 + 4 + 4
RANKS, SEQ, BATCH = 8, 2048, 1
USABLE = 0.92  # of the device's memory


@functools.cache
def stage_problem(model: str, layers: int, first: bool, last: bool, hardware: str) -> Problem:
    """One microbatch of a stage, with what its parameters take as resident."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import overlapc
    from examples.gpt.model import Block, GPTConfig, Shard
    from overlapc.planning import formulate
    from overlapc.profiler.estimate import estimate
    from overlapc.profiler.hardware import load_hardware

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    width, heads, _ = GPT_SHAPES[model]

    class Stage(nn.Module):
        """Embedding and head have a rank's share of the vocabulary."""

        def __init__(self) -> None:
            super().__init__()
            config = GPTConfig(width=width, heads=heads, max_seq=SEQ)
            shard = Shard(dist.group.WORLD)
            self.embed = nn.Embedding(VOCAB // RANKS, width) if first else None
            self.blocks = nn.ModuleList(Block(config, shard) for _ in range(layers))
            self.head = nn.Linear(width, VOCAB // RANKS, bias=False) if last else None

        def forward(self, x: Tensor) -> Tensor:
            x = x if self.embed is None else self.embed(x)
            for block in self.blocks:
                x = block(x)
            if self.head is None:
                return x
            logits = self.head(x).float().flatten(0, 1)
            return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))

    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        module = Stage()
        x = torch.zeros(BATCH, SEQ, width, requires_grad=True)
        if first:
            x = torch.zeros(BATCH, SEQ, dtype=torch.long)
        captured = overlapc.capture(module, x)
    count = sum(p.numel() for p in module.parameters())
    found = formulate(
        captured.trace,
        estimate(captured, load_hardware(hardware), dict.fromkeys(captured.trace.lanes, RANKS)),
    )
    return replace(found, resident_bytes=found.resident_bytes + count * BYTES_PER_PARAMETER)


class Times:
    """What stages take, each asked of HEU once."""

    def __init__(self, model: str, stages: int, hardware: str, memory: int) -> None:
        self.model, self.stages, self.hardware, self.memory = model, stages, hardware, memory
        self.layers = GPT_SHAPES[model][2]
        self.known: dict[Any, int | None] = {}
        self.limit: int | None = None
        self.solved = 0
        one, two = (stage_problem(model, n, False, False, hardware) for n in (1, 2))
        self.layer_ns = compute(two) - compute(one)

    def __call__(self, stage: int, first: int, behind: int) -> int | None:
        least = (behind - first) * self.layer_ns
        if self.limit is not None and least > self.limit:
            return least  # surely too slow: no need to know by how much
        key = behind - first, first == 0, behind == self.layers, self.stages - stage
        if key not in self.known:
            self.known[key] = self.solve(*key)
        return self.known[key]

    def solve(self, layers: int, first: bool, last: bool, in_flight: int) -> int | None:
        problem = stage_problem(self.model, layers, first, last, self.hardware)
        problem = replace(problem, in_flight=in_flight, budget_bytes=self.memory)
        self.solved += 1
        try:
            return simulate(problem, solve(problem, "heu")).step_ns
        except Infeasible:
            return None


def compute(problem: Problem) -> int:
    return sum(problem.cost(op.name).compute_ns for op in problem.trace.ops)


def row(name: str, found: Partition) -> str:
    slowest = "does not fit" if found.slowest_ns is None else f"{found.slowest_ns / 1e6:9.2f} ms"
    return f"  {name:6} {slowest}  {found.layout()}{'  (proven)' if found.optimal else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default="7B,13B,23B")
    add("--stages", default="4,8")
    add("--hardware", default="a100-sxm-80")
    add("--memory-gb", type=float, help="of a device; by default the hardware's")
    args = parser.parse_args()
    from overlapc.profiler.hardware import load_hardware

    rows = []
    for hardware in args.hardware.split(","):
        whole = load_hardware(hardware).memory_bytes
        memory = int(USABLE * (args.memory_gb * 1e9 if args.memory_gb else whole))
        for model in args.models.split(","):
            for stages in map(int, args.stages.split(",")):
                begin = time.perf_counter()
                times = Times(model, stages, hardware, memory)
                split = even(times.layers, stages, times)
                times.limit = split.slowest_ns
                shifted = moved(times.layers, stages, times)
                best = best_partition(times.layers, stages, times)
                took = time.perf_counter() - begin
                print(
                    f"{model} on {stages} stages of {RANKS} {hardware}, {memory / 1e9:.0f} GB: "
                    f"{times.solved} stages planned, {took:.1f} s"
                )
                for name, found in (("even", split), ("moved", shifted), ("best", best)):
                    print(row(name, found), flush=True)
                rows.append(
                    {
                        "model": model,
                        "stages": stages,
                        "hardware": hardware,
                        "memory_bytes": memory,
                        "planned": times.solved,
                        "seconds": took,
                        "even_ns": split.slowest_ns,
                        "moved_ns": shifted.slowest_ns,
                        "best_ns": best.slowest_ns,
                        "best_layout": best.layout(),
                    }
                )
    write_results("partition", {"what": "predicted; seconds are measured", "rows": rows})


if __name__ == "__main__":
    main()
