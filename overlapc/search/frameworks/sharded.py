"""`Shards` says what a microbatch takes more because weights and gradients are divided over the
replicas, layer by layer (FSDP, ZeRO-3), and what a rank holds for it.

A layer's weights are gathered while the layer before runs: two layers are whole at a time. Its
gradients are summed and scattered when its backward ends, while the next runs. Both go through one
communicator, one after the other, and slow the kernels beside them. The table of words, the scores
and the last norm are whole from the first forward to the last backward. The step waits for the last
sum of each microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlapc.profiler.hardware import load_hardware
from overlapc.search.frameworks.fp8 import CAST_BYTES
from overlapc.search.frameworks.known import find_framework
from overlapc.search.layouts import Cluster, Layout
from overlapc.search.models.transformer import Model
from overlapc.search.weights import layer_and_ends, sharing_ranks


@dataclass(frozen=True)
class Times:
    """What a rank computes for a microbatch, in nanoseconds: one of its equal layers, what comes
    before them (words), and behind them (scores and loss)."""

    layers: int
    forward: float
    backward: float
    before: tuple[float, float]  # forward, backward
    behind: tuple[float, float]


@dataclass(frozen=True)
class Shards:
    """The traffic of a layer and of the ends, in nanoseconds, beside kernels."""

    gather: float
    scatter: float
    ends_gather: float
    ends_scatter: float
    copies: float  # of a layer's gathered weights, also to FP8
    again: bool  # are weights gathered for the backward, too?
    slowdown: float  # how many times as long kernels take beside traffic

    @staticmethod
    def of(model: Model, cluster: Cluster, layout: Layout) -> Shards:
        framework, machine = find_framework(cluster.framework), load_hardware(cluster.hardware)
        layer, ends = layer_and_ends(model, layout)
        here = layout.replicas_near(machine.gpus_per_node)
        ranks = sharing_ranks(layout, framework, machine.gpus_per_node)
        size = framework.summed_bytes or framework.gradient_bytes

        nodes = layout.replicas // ranks
        # Between nodes a ring passes the links inside of each, too.
        links = [machine.intra.slowdown, machine.inter.slowdown][: 1 + (layout.replicas > here)]
        slower = max(link.comm_permille for link in links) / 1000

        def gathered(elements: int) -> float:
            return slower * machine.collective_ns("all_gather", elements * 2, ranks, here)

        def scattered(elements: int) -> float:
            took_ns = machine.collective_ns("reduce_scatter", elements * size, ranks, here)
            part = elements * size // ranks
            return slower * (took_ns + machine.collective_ns("all_reduce", part, nodes, 1))

        copied = framework.gather_moves * (ranks > 1) + cluster.fp8 * CAST_BYTES
        return Shards(
            gathered(layer),
            scattered(layer),
            gathered(ends),
            scattered(ends),
            machine.memory_ns(copied * layer),
            framework.gathers == "twice",
            max(link.compute_permille for link in links) / 1000,
        )

    def more_ns(self, times: Times) -> tuple[int, int]:
        """How much longer a microbatch's forward and its backward take."""
        alone = times.layers * times.forward + times.before[0] + times.behind[0]
        forward = self._forward(times) - alone
        alone = times.layers * times.backward + times.before[1] + times.behind[1]
        return round(forward), round(self._backward(times) - alone)

    def _beside(self, compute: float, traffic: float) -> float:
        """How long kernels take beside so much traffic."""
        slow = self.slowdown
        return compute + min(traffic * (1 - 1 / slow), compute * (slow - 1))

    def _forward(self, times: Times) -> float:
        lane, before = self.ends_gather, 0.0
        now = lane + times.before[0]
        for layer in range(times.layers):
            # It takes the place of the weights before last, if those are dropped.
            lane = (max(lane, before) if self.again else lane) + self.gather
            traffic = self.gather * (layer < times.layers - 1)
            before, now = now, max(now, lane) + self._beside(times.forward + self.copies, traffic)
        return now + times.behind[0]

    def _backward(self, times: Times) -> float:
        gather, copies = (self.gather, self.copies) if self.again else (0.0, 0.0)
        now, lane = times.behind[1], gather
        ready = lane
        for layer in reversed(range(times.layers)):
            start = max(now, ready)
            if layer > 0 and self.again:  # asked for as this backward starts
                lane = max(lane, start) + gather
                ready = lane
            traffic = gather * (layer > 0) + self.scatter * (layer < times.layers - 1)
            now = start + self._beside(times.backward + copies, traffic)
            lane = max(lane, now) + self.scatter
        return max(lane, now + times.before[1]) + self.ends_scatter
