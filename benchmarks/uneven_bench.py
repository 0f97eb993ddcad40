"""All-to-alls of uneven parts, as experts without a capacity send them: predicted beside measured.

    python benchmarks/uneven_bench.py --rates 400 --routings 50

Two ranks, each in a network namespace of its own (`lab.py`), route random tokens to experts. The
more a routing is skewed, the more tokens the experts of one rank get. Links are measured once, as
planning measures them for the counts of the first routing; every other routing is predicted from
its counts and those figures. So is what a plan would say of a layer whose routing has changed.

Receives are posted before sends, as NCCL does (`duplex.py`); `--backend gloo` takes gloo's own
all-to-all, which lets the two directions of the link work in turn, by chance.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.duplex import init_duplex
from benchmarks.lab import as_two_ranks, parse_rates, write_results
from examples.common import leave, say
from overlapc.profiler.clock import Clock
from overlapc.profiler.link_model import Collective, LinkModel
from overlapc.profiler.links import agree, agree_sizes, as_if_even, measure_links, middle_mean

TOKENS, WIDTH, EXPERTS, TOP_K = 1024, 512, 8, 2
CPU = torch.device("cpu")
ROW_BYTES = 4 * WIDTH


@dataclass(frozen=True)
class Routing:
    """How many rows each rank sends to each: `rows[sender][receiver]`."""

    rows: tuple[tuple[int, ...], ...]

    @staticmethod
    def drawn(generator: torch.Generator, ranks: int) -> Routing:
        """Route tokens by random scores. Experts are liked by all ranks, some more than others."""
        skew = 2.0 * torch.rand(1, generator=generator)
        liked = skew * torch.randn(EXPERTS, generator=generator)
        rows = []
        for _ in range(ranks):
            scores = liked + torch.randn(TOKENS, EXPERTS, generator=generator)
            owner = scores.topk(TOP_K).indices // (EXPERTS // ranks)
            rows.append(tuple(int((owner == rank).sum()) for rank in range(ranks)))
        return Routing(tuple(rows))

    def splits(self, rank: int) -> tuple[list[int], list[int]]:
        """Rows that a rank receives, and that it sends, by rank."""
        return [rows[rank] for rows in self.rows], [*self.rows[rank]]

    @property
    def largest(self) -> float:
        """The most bytes of one direction, in MB."""
        return max(self.rows[0][1], self.rows[1][0]) * ROW_BYTES / 1e6


def call_of(routing: Routing, group: str) -> Collective:
    """The collective as planning sees it on this rank."""
    received, sent = routing.splits(dist.get_rank())
    return Collective(group, "all_to_all", "", as_if_even(received, sent, ROW_BYTES, group))


def measured_ns(routing: Routing, group: str, repeats: int) -> int:
    """The time from before the launch to the end, on the slowest rank."""
    received, sent = routing.splits(dist.get_rank())
    given, clock = torch.ones(sum(sent), WIDTH), Clock(CPU)
    times = []
    for _ in range(repeats + 1):
        agree([0], "max", group, CPU)
        begun = clock.mark()
        out = torch.ops._c10d_functional.all_to_all_single(given, received, sent, group)
        torch.ops._c10d_functional.wait_tensor(out)
        _, took = clock.read([begun, clock.mark()])
        times.append(took)
    return agree([middle_mean(times[1:])], "max", group, CPU)[0]


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    init_duplex() if args.backend == "duplex" else dist.init_process_group("gloo")
    group = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(args.seed)
    first, *routings = (
        Routing.drawn(generator, dist.get_world_size()) for _ in range(args.routings + 1)
    )
    links: LinkModel = measure_links([call_of(first, group)])
    rows = []
    for routing in routings:
        (call,) = agree_sizes([call_of(routing, group)], CPU)
        even = Collective(group, "all_to_all", "", TOKENS * TOP_K * ROW_BYTES)
        took = measured_ns(routing, group, args.repeats)
        rows.append((routing.largest, links.time_ns(call) / took, links.time_ns(even) / took, took))
    if dist.get_rank() == 0:
        report(args, rows)
    leave()


def report(args: argparse.Namespace, rows: list[tuple[float, float, float, int]]) -> None:
    of_counts = sorted(abs(predicted - 1) for _, predicted, _, _ in rows)
    of_even = sorted(abs(predicted - 1) for _, _, predicted, _ in rows)
    sizes = [size for size, *_ in rows]

    def said(errors: list[float]) -> str:
        worst = math.ceil(0.9 * len(errors)) - 1
        return (
            f"median {statistics.median(errors):.1%}, nine in ten within {errors[worst]:.1%}, "
            f"worst {errors[-1]:.1%}"
        )

    say(
        f"{len(rows)} routings, {min(sizes):.2f} to {max(sizes):.2f} MB in the fuller direction, "
        f"{min(took for *_, took in rows) / 1e6:.0f} to {max(took for *_, took in rows) / 1e6:.0f} "
        "ms measured"
    )
    say(f"error of the prediction from counts: {said(of_counts)}")
    say(f"error if parts were even:            {said(of_even)}")
    if args.save:
        write_results(
            "uneven",
            {
                "backend": args.backend,
                "repeats": args.repeats,
                "mb_predicted_even_ns": rows,
                "median_error": statistics.median(of_counts),
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Uneven all-to-alls, predicted and measured.")
    parser.add_argument("--rates", type=parse_rates, default=[400.0], help="Mbit/s, or none")
    parser.add_argument("--routings", type=int, default=50)
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of each; the middle half's mean"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("duplex", "gloo"), default="duplex")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/uneven.json")
    args = parser.parse_args()
    as_two_ranks(rank_main, args, args.rates)


if __name__ == "__main__":
    main()
