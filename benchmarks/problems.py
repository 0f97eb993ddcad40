"""The benchmark set: problems from real captures of GPT and MoE stages on fake ranks.

    python benchmarks/problems.py > benchmarks/set.txt
    python benchmarks/problems.py --small --write tests/plain/problems

A case is a stage of a model (its blocks; embedding and head lie in other stages), the ranks its
tensors or experts are spread over, a hardware profile, how many microbatches are in flight, and
a memory budget as a share of the way from the smallest plan known to everything saved. Costs are
estimated for the hardware, so every figure that comes of them is *predicted*.
"""

from __future__ import annotations

import argparse
import functools
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlapc.core.ir import Problem
from overlapc.core.text import format_problem
from overlapc.planning.problem import eager_timeline
from overlapc.solvers import smallest_bytes

# width, heads and layers as the papers give or imply them
GPT_SHAPES = {
    "1.3B": (2048, 16, 24),
    "4.7B": (3072, 24, 40),
    "7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
    "20B": (6144, 48, 44),
    "23B": (6144, 48, 50),
}
# width, heads, experts a rank, expert width, top-k, ranks; every other block is an MoE block
MOE_SHAPES = {
    "lancet-S": (768, 12, 2, 3072, 1, 16),
    "lancet-L": (1024, 16, 2, 4096, 1, 16),
    "fine-grained": (2048, 16, 8, 1408, 6, 8),
}


@dataclass(frozen=True)
class Stage:
    """What is captured: the same for every hardware, budget and number of microbatches."""

    model: str
    layers: int
    ranks: int
    seq: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layers}L-x{self.ranks}-s{self.seq}-b{self.batch}"


@dataclass(frozen=True)
class Case:
    stage: Stage
    hardware: str
    in_flight: int
    share: float  # of the memory between the smallest plan and all saved

    @property
    def name(self) -> str:
        return f"{self.stage.name}-{self.hardware}-f{self.in_flight}-m{self.share:g}"


def cases(thorough: bool = False) -> Iterator[Case]:
    """The set. `thorough` crosses everything; without it every value of every axis occurs."""
    hardware = ("a100-sxm-80", "a100-pcie-80", "h100-sxm", "l20")
    shares = (0.0, 0.15, 0.35, 0.6, 1.0)
    flights = (1, 2, 4, 8)
    models = list(GPT_SHAPES)
    for m, model in enumerate(models):
        for t, ranks in enumerate((2, 4, 8)):
            for s, seq in enumerate((2048, 4096, 8192)):
                for h, name in enumerate(hardware):
                    for i, share in enumerate(shares):
                        k = m + t + s + h + i
                        if not thorough and ((m + t + s) % 3 or (m + h + i) % 3):
                            continue
                        flight = flights[k % 4]
                        yield Case(Stage(model, 8, ranks, seq, 16384 // seq), name, flight, share)
    for model, batch in (("lancet-S", 48), ("lancet-L", 24), ("fine-grained", 4)):
        for name in ("a100-sxm-40", "v100-sxm2-32"):
            for i, share in enumerate(shares):
                if thorough or i % 2 == 0:
                    size = batch // 3 if name.startswith("v100") else batch
                    ranks = MOE_SHAPES[model][5]
                    seq = 2048 if model == "fine-grained" else 512
                    yield Case(Stage(model, 6, ranks, seq, max(1, size)), name, 1, share)


def small_cases() -> Iterator[Case]:
    """A few of two blocks, for tests: their texts are kept beside these."""
    yield Case(Stage("7B", 2, 4, 2048, 8), "a100-pcie-80", 1, 0.35)
    yield Case(Stage("20B", 2, 8, 8192, 2), "h100-sxm", 4, 0.0)
    yield Case(Stage("lancet-L", 2, 16, 512, 24), "a100-sxm-40", 1, 0.15)
    yield Case(Stage("fine-grained", 2, 8, 2048, 1), "v100-sxm2-32", 2, 0.6)


def describe(case: Case, problem: Problem, text: str) -> str:
    """One line by which a problem is known again."""
    return (
        f"{case.name} digest {problem.trace.digest} crc {zlib.crc32(text.encode()):08x} "
        f"{len(problem.trace.ops)} ops {len(problem.trace.lanes)} lanes "
        f"budget {problem.budget_bytes}"
    )


def build(case: Case) -> Problem:
    """The case's problem, with its budget in bytes."""
    problem = replace(costed(case.stage, case.hardware), in_flight=case.in_flight)
    most = eager_timeline(problem).peak_bytes
    least = smallest_bytes(problem)
    return replace(problem, budget_bytes=least + round(case.share * (most - least)))


@functools.lru_cache(maxsize=4)
def captured(stage: Stage) -> Any:
    """The stage's joint graph on fake tensors and fake ranks."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from overlapc.passes.capture.front import capture

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=stage.ranks)
    with FakeTensorMode():
        torch.set_default_dtype(torch.float32 if stage.model in MOE_SHAPES else torch.bfloat16)
        model = _moe(stage) if stage.model in MOE_SHAPES else _gpt(stage)
        width = (MOE_SHAPES.get(stage.model) or GPT_SHAPES[stage.model])[0]
        x = torch.zeros(stage.batch, stage.seq, width, requires_grad=True)
        return capture(model, x)


@functools.lru_cache(maxsize=8)
def costed(stage: Stage, hardware: str) -> Problem:
    from overlapc.planning.problem import formulate
    from overlapc.profiler.estimate import estimate
    from overlapc.profiler.hardware import load_hardware

    graph = captured(stage)
    lanes = {lane: stage.ranks for lane in graph.trace.lanes}
    # By the size of matrices alone, as when the set was listed: plans of then stay comparable.
    machine = load_hardware(hardware)
    machine = replace(machine, kernels=None, streams={}, intra=replace(machine.intra, measured=()))
    return formulate(graph.trace, estimate(graph, machine, lanes))


def _gpt(stage: Stage) -> Any:
    import torch.distributed as dist
    from torch import nn

    from examples.gpt.model import Block, GPTConfig, Shard

    width, heads, _ = GPT_SHAPES[stage.model]
    config = GPTConfig(width=width, heads=heads, max_seq=stage.seq)
    shard = Shard(dist.group.WORLD)
    return nn.Sequential(*(Block(config, shard) for _ in range(stage.layers)))


def _moe(stage: Stage) -> Any:
    """Every other block a mixture of experts of fixed capacity, as Switch has them."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn

    from examples.gpt.model import MLP, Attention, GPTConfig, Shard
    from overlapc.nn.layers import AllToAll

    width, heads, held, expert_width, top_k, _ = MOE_SHAPES[stage.model]
    ranks = stage.ranks
    config = GPTConfig(width=width, heads=heads, max_seq=stage.seq)
    shard = Shard(None)
    rows = stage.batch * stage.seq * top_k // (held * ranks)  # capacity factor 1

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(width, held * ranks, bias=False)
            self.up = nn.Parameter(torch.zeros(held, width, expert_width))
            self.down = nn.Parameter(torch.zeros(held, expert_width, width))

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1)
            weights, chosen = F.softmax(self.router(tokens), dim=-1).topk(top_k, dim=-1)
            order = torch.argsort(chosen.flatten(), stable=True)[: held * ranks * rows]
            sent = tokens[order // top_k]
            even = [held * rows] * ranks
            group = dist.group.WORLD.group_name
            there = AllToAll.apply(sent, even, even, group)
            parts = there.view(ranks, held, rows, width).transpose(0, 1).flatten(1, 2)
            done = torch.bmm(F.gelu(torch.bmm(parts, self.up)), self.down)
            flat = done.view(held, ranks, rows, width).transpose(0, 1).reshape(-1, width)
            back = AllToAll.apply(flat, even, even, group)
            scaled = back * weights.flatten()[order][:, None]
            return torch.zeros_like(tokens).index_add(0, order // top_k, scaled).view_as(x)

    class Block(nn.Module):
        def __init__(self, is_moe: bool) -> None:
            super().__init__()
            self.attn_norm, self.attn = nn.LayerNorm(width), Attention(config, shard)
            self.norm, self.rest = nn.LayerNorm(width), Experts() if is_moe else MLP(config, shard)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.attn_norm(x))
            return x + self.rest(self.norm(x))

    return nn.Sequential(*(Block(layer % 2 == 1) for layer in range(stage.layers)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="write each problem as text into this folder")
    parser.add_argument("--small", action="store_true", help="only the few that tests use")
    parser.add_argument("--thorough", action="store_true", help="the full cross product")
    args = parser.parse_args()
    for case in small_cases() if args.small else cases(args.thorough):
        problem = build(case)
        text = format_problem(problem)
        print(describe(case, problem, text), flush=True)
        if args.write:
            args.write.mkdir(parents=True, exist_ok=True)
            (args.write / f"{case.name}.txt").write_text(text)


if __name__ == "__main__":
    main()
