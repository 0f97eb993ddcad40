"""`RowRun` runs one rank's row of a pipeline: the parts of its stages, and transfers between ranks.

Results for another rank are sent as soon as they are made, while the rank goes on; receives are
posted a few steps ahead. A late rank is waited for, as long as the process group would; one that
has ended or has raised is a RankError that names the action. When a stage's last gradients are
made, their reduction begins, while the rank goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin only from 3.11
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlapc.core.errors import RankError
from overlapc.core.pipeline import AHEAD
from overlapc.core.schedule import Action, Schedule, Step, format_step, is_pair
from overlapc.ranks.board import group_timeout_s
from overlapc.ranks.exchange import naming_the_dead
from overlapc.ranks.lookout import waiting_for
from overlapc.ranks.waiting import Waiter
from overlapc.runtime.stage import Shape, Stage, blank, has_gradient

_ON_ITS_WAY_S = 2.0  # what a rank sent before it ended still comes
_SOON_S = 0.2  # after so long a wait the rank looks whether the other can still come
# A transfer: the receiving stage, is it an activation, microbatch, which of several tensors
Key = tuple[int, bool, int, int]


@dataclass
class Links:
    """The groups of a rank: along the pipeline, with its replicas, and for tied weights."""

    group: dist.ProcessGroup
    rank: int
    timeout_s: float | None
    replicas: dist.ProcessGroup | None
    tied: Sequence[Mapping[int, str]]
    width: int = 1  # the most tensors between two stages

    @property
    def limit_s(self) -> float:
        """How long to wait for a rank that is late."""
        return self.timeout_s or group_timeout_s()


class Sent:
    """Tensors being sent to other ranks. A thread waits until each has arrived, so that its memory
    is freed before the end of the step."""

    def __init__(self) -> None:
        self._waiter = Waiter("overlapc-sent")
        self._entries: deque[tuple[Future[None], Tensor, str, int]] = deque()

    def add(self, work: Any, tensor: Tensor, what: str, peer: int) -> None:
        self._entries.append((self._waiter.put(work), tensor, what, peer))

    def release(self) -> None:
        """Free the tensors that have arrived."""
        while self._entries and self._entries[0][0].done():
            if self._entries[0][0].exception() is not None:
                return  # `wait` raises it
            self._entries.popleft()

    def wait(self, patiently: Callable[[Future[None], str, int], None]) -> None:
        """Wait until all tensors have arrived, each as `patiently` does; raise what went wrong."""
        self.close()
        while self._entries:
            arrived, _, what, peer = self._entries[0]
            patiently(arrived, f"{what} was not taken", peer)
            self._entries.popleft()

    def close(self) -> None:
        """End the thread: no more tensors will be added."""
        self._waiter.close()


class RowRun:
    """One call of a pipeline."""

    def __init__(
        self,
        schedule: Schedule,
        row: Sequence[Step],
        stages: Mapping[int, Stage],
        modules: Mapping[int, nn.Module],
        links: Links,
    ) -> None:
        self.schedule, self.row = schedule, row
        self.stages, self.modules = stages, modules
        self.links = links
        self.inputs: Sequence[tuple[Any, ...]] = ()
        self.targets: Sequence[tuple[Any, ...]] = ()
        self.here: dict[Key, Tensor] = {}  # results of this rank for this rank
        self.asked: dict[Key, tuple[Any, Tensor]] = {}
        self.sent = Sent()
        self.waiter = Waiter("overlapc-received")
        self.at = ""
        self.last_of: dict[int, int] = {}  # stage -> the last step that makes gradients
        for i, step in enumerate(row):
            for action in step:
                if action.kind in "BW":
                    self.last_of[action.stage] = i
        self.averaging: list[tuple[Any, Tensor, str]] = []
        self.owed = sorted(self.last_of, reverse=True)  # stages that are not averaged yet
        self.done: set[int] = set()  # stages whose gradients are made

    def run(
        self, inputs: Sequence[tuple[Any, ...]], targets: Sequence[tuple[Any, ...]]
    ) -> list[Tensor]:
        self.inputs, self.targets = inputs, targets
        for stage in self.stages.values():
            stage.states.clear()
        before = self.lay_by_tied()
        try:
            losses = self.run_row()
            self.at = "the end of the step"
            for which, names in enumerate(self.links.tied):
                self.add_tied(which, names)
            self.end_averages()
            for parameter, gradient in before:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
            self.guarded(lambda: self.sent.wait(self.patiently), "waiting for what was sent")
        except BaseException:  # gradients from before the step are not lost
            for parameter, gradient in before:
                parameter.grad = gradient
            raise
        finally:
            self.sent.close()
            self.waiter.close()
        return losses

    def run_row(self) -> list[Tensor]:
        losses = []
        with torch.no_grad():
            for i, step in enumerate(self.row):
                self.at = format_step(step)
                for later in self.row[i : i + AHEAD]:
                    for action in later:
                        self.ask(action)
                losses += self.do(step)
                self.sent.release()
                self.done |= {stage for stage, last in self.last_of.items() if last == i}
                while self.owed and self.owed[0] in self.done:
                    self.gradients_done(self.owed.pop(0))
        return losses

    def do(self, step: Step) -> list[Tensor]:
        """Run a step; return its losses."""
        first = step[0]
        stage = self.stages[first.stage]
        if is_pair(step) and stage.merges:
            forward, backward = step
            self.get(forward)
            self.get(backward)
            results, gradients = stage.do_merged(forward.microbatch, backward.microbatch)
            return self.give(forward, results) + self.give(backward, gradients)
        losses = []
        # The backward first, since it frees memory for the forward.
        for action in sorted(step, key=lambda a: a.kind == "F"):
            self.get(action)
            losses += self.give(
                action, self.stages[action.stage].do(action.kind, action.microbatch)
            )
        return losses

    def get(self, action: Action) -> None:
        """Receive what the action needs."""
        stage, m = self.stages[action.stage], action.microbatch
        if action.kind == "F":
            given = self.inputs[m] if action.stage == 0 else self.receive(action)
            stage.begin(m, (*given, *self.targets[m]) if stage.last else given)
        elif action.kind in "BI" and not stage.last:
            stage.gradients_came(m, self.receive(action))

    def give(self, action: Action, results: Sequence[Tensor]) -> list[Tensor]:
        """Send the action's results; return a loss."""
        m, forward = action.microbatch, action.kind == "F"
        if forward and action.stage == self.schedule.stages - 1:
            return list(results[:1])
        for which, result in enumerate(results):
            self.send(result, (action.stage + (1 if forward else -1), forward, m, which))
        return []

    # --- what travels along the pipeline

    def needed(self, action: Action) -> list[tuple[Key, Shape]]:
        """The transfers that the action needs from another stage."""
        stage, forward = self.stages[action.stage], action.kind == "F"
        shapes: Sequence[Shape] = ()
        if forward:
            shapes = stage.incoming
        elif action.kind in "BI":
            shapes = [shape for shape in stage.outgoing if has_gradient(shape)]
        return [
            ((action.stage, forward, action.microbatch, which), shape)
            for which, shape in enumerate(shapes)
        ]

    def ask(self, action: Action) -> None:
        for key, shape in self.needed(action):
            source = self.source(key)
            if key in self.asked or source == self.links.rank:
                continue
            buffer = blank(shape).detach()
            what = f"{_named(key)} from rank {source}"
            self.asked[key] = self.post(dist.irecv, buffer, self.tag(key), source, what), buffer

    def receive(self, action: Action) -> tuple[Tensor, ...]:
        found = []
        for key, _ in self.needed(action):
            if key in self.here:
                found.append(self.here.pop(key))
            else:
                work, buffer = self.asked.pop(key)
                source = self.source(key)
                self.wait(work, f"{_named(key)} from rank {source}", source)
                found.append(buffer)
        return tuple(found)

    def send(self, result: Tensor, key: Key) -> None:
        target = self.schedule.rank_of[key[0]]
        result = result.contiguous()  # the receiving stage was traced so
        if target == self.links.rank:
            self.here[key] = result
            return
        what = f"{_named(key)} to rank {target}"
        work = self.post(dist.isend, result, self.tag(key), target, what)
        self.sent.add(work, result, what, target)

    def source(self, key: Key) -> int:
        return self.schedule.rank_of[key[0] + (-1 if key[1] else 1)]

    def tag(self, key: Key) -> int:
        stage, forward, microbatch, which = key
        number = (stage * self.schedule.microbatches + microbatch) * 2 + forward
        return number * self.links.width + which

    # --- gradients that several ranks add up

    def gradients_done(self, stage: int) -> None:
        """Average the finished gradients of a stage over the replicas, unless other stages share
        them (tied weights). Each replica places its own rows, so stages are reduced in a fixed
        order, the last first."""
        tied = {names[stage] for names in self.links.tied if stage in names}
        later = {id(p) for s in self.owed for p in self.modules[s].parameters()}
        for name, parameter in self.modules[stage].named_parameters():
            if name not in tied and id(parameter) not in later:
                self.average(parameter.grad, f"stage {stage}'s {name}")

    def average(self, gradient: Tensor | None, name: str) -> None:
        """Begin to average a gradient over the replicas."""
        if self.links.replicas is None or gradient is None:
            return
        work = self.guarded(
            lambda: dist.all_reduce(gradient, group=self.links.replicas, async_op=True),
            f"averaging the gradient of {name}",
        )
        self.averaging.append((work, gradient, f"the replicas' gradients of {name}"))

    def end_averages(self) -> None:
        for work, gradient, what in self.averaging:
            assert self.links.replicas is not None
            self.wait_for_all(work, what, self.links.replicas)
            gradient /= dist.get_world_size(self.links.replicas)
        self.averaging.clear()

    def lay_by_tied(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Set aside gradients that tied weights have from before the step: only this step's are
        summed."""
        found = []
        for names in self.links.tied:
            for stage in sorted(set(names) & set(self.stages)):
                parameter = self.modules[stage].get_parameter(names[stage])
                if parameter.grad is not None:
                    found.append((parameter, parameter.grad))
                    parameter.grad = None
        return found

    def add_tied(self, which: int, names: Mapping[int, str]) -> None:
        """Set the gradient of a tied weight to the sum of its stages' gradients, in the order of
        stages."""
        mine = [stage for stage in names if stage in self.stages]
        if not mine:
            return
        ranks = {stage: self.schedule.rank_of[stage] for stage in names}
        gradients = {stage: _gradient(self.modules[stage], names[stage]) for stage in mine}
        first = 2 * self.schedule.stages * (self.schedule.microbatches + which)
        first *= self.links.width  # tags after those of the pipeline's transfers
        coming: list[tuple[Any, str, int]] = []
        for stage in sorted(set(names) - set(mine)):
            what = f"the gradient of {names[stage]} of stage {stage}, tied to {names[mine[0]]}"
            gradients[stage] = torch.empty_like(gradients[mine[0]])
            work = self.post(dist.irecv, gradients[stage], first + stage, ranks[stage], what)
            coming.append((work, what, ranks[stage]))
        for stage in mine:
            for other in sorted(set(ranks.values()) - {self.links.rank}):
                what = f"the gradient of {names[stage]} of stage {stage} to rank {other}"
                work = self.post(dist.isend, gradients[stage], first + stage, other, what)
                self.sent.add(work, gradients[stage], what, other)
        for work, what, source in coming:
            self.wait(work, what, source)
        total = sum(gradients[stage] for stage in sorted(names))
        for stage in mine:
            parameter = self.modules[stage].get_parameter(names[stage])
            parameter.grad = total.clone() if len(mine) > 1 else total
            self.average(parameter.grad, f"the tied {names[stage]}")

    # --- waiting

    def post(self, how: Callable[..., Any], tensor: Tensor, tag: int, peer: int, what: str) -> Any:
        """Begin a transfer to or from a rank."""
        end = "group_dst" if how is dist.isend else "group_src"
        return self.guarded(
            lambda: how(tensor, group=self.links.group, tag=tag, **{end: peer}), f"posting {what}"
        )

    def wait(self, work: Any, what: str, source: int) -> None:
        """Wait for what comes from a rank of the pipeline."""
        ended = self.waiter.put(work)
        self.guarded(
            lambda: self.patiently(ended, "it did not come", source), f"waiting for {what}"
        )

    def patiently(self, ended: Future[None], late: str, peer: int) -> None:
        """Wait until a transfer has ended, as long as its rank may still come."""
        rank = dist.get_process_group_ranks(self.links.group)[peer]
        self.wait_for(ended, late, [rank], [])

    def wait_for_all(self, work: Any, what: str, group: dist.ProcessGroup) -> None:
        """Wait for a collective."""
        ended, ranks = self.waiter.put(work), dist.get_process_group_ranks(group)
        self.guarded(
            lambda: self.wait_for(ended, "it did not end", [], ranks, group.group_name),
            f"waiting for {what}",
        )

    def wait_for(
        self,
        ended: Future[None],
        late: str,
        missing: Sequence[int],
        concerned: Sequence[int],
        group: str = "",
    ) -> None:
        with suppress(FutureTimeoutError):
            return ended.result(_SOON_S)
        at = f"is at action {self.at}"
        with waiting_for(missing, at, lambda: not ended.done(), group) as lookout:
            while not ended.done():
                if hopeless := lookout.hopeless(missing, concerned):
                    wait([ended], _ON_ITS_WAY_S)
                    if not ended.done():
                        raise RankError(hopeless)
                elif time.monotonic() - lookout.start > self.links.limit_s:
                    raise TimeoutError(late)
                wait([ended], _SOON_S)
        return ended.result()

    def guarded(self, do: Callable[[], Any], what: str) -> Any:
        try:
            with naming_the_dead():
                return do()
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            where = f"rank {self.links.rank} at action {self.at}, {what}: {first_line}"
            if isinstance(error, RankError) and "; expected" in first_line:
                raise RankError(where) from error
            raise RankError(
                f"{where}; expected it within {self.links.limit_s:g} s (timeout_s, or the process "
                "group's own): see the output of that rank for why it ended or is late"
            ) from error


def _named(key: Key) -> str:
    stage, activation, microbatch, which = key
    what = "the input" if activation else "the gradient"
    ordinal = f" {which}" if which else ""
    return f"{what}{ordinal} of stage {stage}, microbatch {microbatch}"


def _gradient(module: nn.Module, name: str) -> Tensor:
    parameter = module.get_parameter(name)
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
