"""What becomes of a public model in overlapc: bitwise, named, plain PyTorch, or silently wrong."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import overlapc
from overlapc.core.errors import Infeasible
from tests.torch.exact import bits, leaves, loss_of, moved, random_state
from tests.zoo_public.models import ZOO, Case

STEPS = 2
_NAMED = re.compile(
    r'may be not as eager: File "(?P<file>[^"]*)", line (?P<line>\d+), in \S+: (?P<reason>.*)'
)
BITWISE, NAMED, PLAIN, SILENT = "bitwise", "named", "plain PyTorch, said so", "SILENT"


@dataclass(frozen=True)
class Outcome:
    """How one way of training ended; `detail` is what was said or what differs."""

    verdict: str
    detail: str = ""

    @property
    def honest(self) -> bool:
        return not self.verdict.startswith(SILENT)


def build(name: str, device: str) -> Case:
    torch.manual_seed(0)
    case = ZOO[name]()
    case.model.train().to(device)
    args, kwargs = moved((case.args, case.kwargs), device)
    return replace(case, args=args, kwargs=kwargs, device=device)


def objective(outputs: Any) -> Tensor:
    """The model's own loss where it gives one."""
    loss = getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.requires_grad else loss_of(outputs)


def repeats(name: str, device: str) -> bool:
    """Whether eager gives the same twice."""
    one, other = (_train(case, case.model) for case in (build(name, device), build(name, device)))
    return not _differences(one, other)


def optimized(name: str, budget: int | float | None, device: str = "cpu") -> Outcome:
    """`optimize` against eager: two training steps from one random state. Where a fraction leaves
    too little room, the smallest budget that the error names must do."""
    case = build(name, device)
    wanted = _train(case, case.model)
    case = build(name, device)
    with _recorded() as said:
        twin = overlapc.optimize(case.model, memory_budget=budget, solver="heu")
        try:
            found = _train(case, twin)
        except Infeasible as error:
            if isinstance(budget, int):
                return Outcome(f"{SILENT} refusal", f"the budget that was named, too: {error}")
            torch._dynamo.reset()
            return optimized(name, error.smallest_bytes, device)
    return _judge(wanted, found, bool(twin.graphs), said, twin.explain(), twin.fallbacks)


def stepped(name: str, device: str = "cpu") -> Outcome:
    """`TrainStep` of two microbatches against plain accumulation."""
    case = build(name, device)
    step_loss = _loss(case)
    batches = [_leaves(case)] * STEPS
    torch.manual_seed(7)
    results = []
    for given in batches:
        results.append(step_loss(case.model, *given))
        results[-1].backward()
    wanted = _state(case.model, results)
    case = build(name, device)
    with _recorded() as said:
        step = overlapc.TrainStep(case.model, _loss(case), solver="heu")
        torch.manual_seed(7)
        found = _state(case.model, step(batches))
    captured = step.report is not None
    return _judge(wanted, found, captured, said, step.explain(), () if captured else said)


def _judge(
    wanted: dict[str, Any],
    found: dict[str, Any],
    captured: bool,
    said: Sequence[str],
    explained: str,
    unchanged: Sequence[str],
) -> Outcome:
    different = _differences(wanted, found)
    if different and not said_inexact(explained):
        return Outcome(f"{SILENT} difference", ", ".join(different[:3]))
    if (unchanged or not captured) and not (said and unchanged):
        return Outcome(f"{SILENT} fallback", explained.strip().splitlines()[-1])
    if different:
        return Outcome(NAMED, said_inexact(explained))
    if not captured:
        return Outcome(PLAIN, said[0])
    return Outcome(BITWISE, f"{len(unchanged)} graphs unchanged" if unchanged else "")


def said_inexact(explained: str) -> str:
    """What a report says of lines whose trace may give other numbers than eager, or ''."""
    places: dict[str, list[str]] = {}
    for line in explained.splitlines():
        found = _NAMED.match(line)
        if found is not None:
            place = f"{found['file'].rpartition('site-packages/')[2]}:{found['line']}"
            places.setdefault(found["reason"], []).append(place)
        elif line.startswith("may be not as eager"):
            places.setdefault(line, [])
    return "; ".join(
        f"{reason} ({', '.join(at)})" if at else reason for reason, at in places.items()
    )


def _train(case: Case, model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(7)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        case.model.zero_grad()
        with case.around(case.device):
            outputs = model(*case.args, **case.kwargs)
        objective(outputs).backward()
        results = [out for out in leaves(outputs) if isinstance(out, Tensor)]
        state = _state(case.model, results)
        state |= {
            f"gradient of input {i}": bits(given.grad)
            for i, given in enumerate(leaves((case.args, case.kwargs)))
            if isinstance(given, Tensor) and given.grad is not None
        }
        found |= {f"step {step}: {key}": value for key, value in state.items()}
    return found


def _state(model: nn.Module, results: Sequence[Any]) -> dict[str, Any]:
    found = {f"result {i}": bits(result) for i, result in enumerate(results)}
    found["random state"] = random_state()
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = bits(parameter.grad)
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = bits(buffer)
    return copy.deepcopy(found)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return a[:2] == b[:2] and torch.equal(a[2], b[2])
        return a is b

    return [key for key in one.keys() | other.keys() if not same(one.get(key), other.get(key))]


def _leaves(case: Case) -> tuple[Any, ...]:
    """Arguments as one microbatch's tuple: positional ones, then keywords' values in order."""
    values = (*case.args, *case.kwargs.values())
    return tuple(v.detach() if isinstance(v, Tensor) else v for v in values)


def _loss(case: Case) -> Callable[..., Tensor]:
    count, names = len(case.args), tuple(case.kwargs)
    around = functools.partial(case.around, case.device)

    def loss(model: nn.Module, *given: Any) -> Tensor:
        with around():
            outputs = model(*given[:count], **dict(zip(names, given[count:], strict=True)))
        return objective(outputs)

    return loss


class _recorded:
    """Collects what overlapc warns of; other libraries' warnings are left out."""

    def __enter__(self) -> list[str]:
        self._caught = warnings.catch_warnings(record=True)
        self._all = self._caught.__enter__()
        warnings.simplefilter("always")
        self.said: list[str] = []
        return self.said

    def __exit__(self, *failure: Any) -> None:
        self._caught.__exit__(*failure)
        texts = [str(each.message) for each in self._all]
        self.said += [text for text in texts if "overlapc" in text]
