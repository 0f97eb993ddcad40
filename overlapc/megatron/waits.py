"""`Waits` runs recompute and weight gradients where Megatron waits for other stages.

The rule is fixed: a rank that waits runs all deferred work first and, if it waits for a gradient,
the recompute of the next backward. It never depends on whether something has arrived: the ranks of
a tensor-parallel group must issue the same collectives.

`apart` chooses which work of a backward may be deferred: as much as the budget has room for.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from overlapc.core.ir import Plan, Problem
from overlapc.core.simulate import simulate
from overlapc.core.stages import turns

SLOWER = 1.02  # deferred work hides no collective: a microbatch may take so much longer


class Waits:
    """The deferred work in a step of a pipeline."""

    def __init__(self, again: Sequence[Callable[[], None]]) -> None:
        self._again = again  # runs the recompute of the next backward
        self._late: deque[Callable[[], None]] = deque()

    def later(self, work: Callable[[], None]) -> None:
        self._late.append(work)

    def run(self) -> None:
        while self._late:
            self._late.popleft()()

    def begin(self, for_gradient: bool) -> None:
        """Run deferred work; called before a wait."""
        if for_gradient:
            for again in self._again:
                again()
        self.run()

    @contextlib.contextmanager
    def filled(self, configs: Sequence[Any]) -> Iterator[None]:
        """While the block runs, deferred work runs before each wait for other stages, and before
        gradients are reduced."""
        from megatron.core.pipeline_parallel import p2p_communication

        with contextlib.ExitStack() as stack:
            for name in ("_batched_p2p_ops", "_p2p_ops"):
                _set(stack, p2p_communication, name, self._asked)
            for config in {id(config): config for config in configs}.values():
                for name in ("grad_sync_func", "finalize_model_grads_func"):
                    if getattr(config, name, None) is not None:
                        _set(stack, config, name, self._done_before)
            yield
            self.run()

    def _asked(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(**given: Any) -> Any:
            for_gradient = given.get("tensor_recv_next") is not None
            requests = real(**given)
            if isinstance(requests, dict):
                return {k: _Request(r, self, for_gradient) for k, r in requests.items()}
            return [_Request(request, self, for_gradient) for request in requests]

        return ask

    def _done_before(self, real: Any) -> Any:
        if isinstance(real, (list, tuple)):
            return [self._done_before(one) for one in real]

        def call(*args: Any, **kwargs: Any) -> Any:
            self.run()
            return real(*args, **kwargs)

        return call


class _Request:
    """A request to another stage. Deferred work runs before a wait for it."""

    def __init__(self, request: Any, waits: Waits, for_gradient: bool) -> None:
        self._request, self._waits, self._for_gradient = request, waits, for_gradient

    def wait(self, *args: Any) -> Any:
        self._waits.begin(self._for_gradient)
        return self._request.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _set(stack: contextlib.ExitStack, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    real = getattr(owner, name)
    setattr(owner, name, around(real))
    stack.callback(setattr, owner, name, real)


def apart(problem: Problem, plan: Plan, first: bool) -> dict[str, str]:
    """Issue of the backward -> R (may run early), W (may run late) or I. On the `first` stage,
    which sends no gradient, late work waits for the next forward."""
    action = turns(problem.trace, plan.order)
    weights = [text for text in plan.order if action.get(text) == "W"]
    again = [text for text in plan.order if action.get(text) == "R"]
    longest = SLOWER * simulate(problem, plan).step_ns

    def fits(early: Sequence[str], late: Sequence[str]) -> bool:
        moved = {*early, *late}
        begins = next(i for i, text in enumerate(plan.order) if text in action)
        kept = [text for text in plan.order[begins:] if text not in moved]
        order = (*plan.order[:begins], *early, *kept, *late)
        timeline = simulate(problem, replace(plan, order=order))
        peak = timeline.peak_bytes
        if first and late:
            held = timeline.memory[-len(late)] - timeline.memory[-1]
            peak = max(peak, max(timeline.memory[:begins], default=0) + held)
        return peak <= (problem.budget_bytes or 0) and timeline.step_ns <= longest

    late = _most(len(weights), lambda n: fits((), weights[len(weights) - n :]))
    suffix = weights[len(weights) - late :]
    early = _most(len(again), lambda n: fits(again[:n], suffix))
    moved = {*again[:early], *suffix}
    return {text: kind if text in moved else "I" for text, kind in action.items()}


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits, by bisection: if a number fits, smaller ones
    do."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
