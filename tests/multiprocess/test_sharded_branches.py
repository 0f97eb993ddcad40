"""Models that FSDP2 shards and that do not run all of their parts in each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.multiprocess.sharded import BF16, FP32
from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

Flags = Callable[[int, int], dict[str, Any]]  # of a step's microbatch


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.extra = nn.Linear(8, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(
        self, x: Tensor, left_out: int = 9, extra: str = "", times: int = 1, skipped: bool = False
    ) -> Tensor:
        h = F.gelu(self.stem(x))
        for i, block in enumerate(self.blocks):
            if i != left_out:
                h = h + F.gelu(block(h))
        loss = h.float().square().mean() * times
        read = x if extra == "alone" else h
        return loss + self.extra(read).float().square().mean() if extra else loss


def late(_step: int, i: int) -> dict[str, Any]:
    """The last microbatch, which reduces the gradients of all, leaves a block out."""
    return {"left_out": 1} if i == 1 else {}


def early(_step: int, i: int) -> dict[str, Any]:
    return {"left_out": 1} if i == 0 else {}


def odd(step: int, _i: int) -> dict[str, Any]:
    """Parameters of the root's group are used from the second step on, in every other."""
    return {"extra": "alone" if step % 2 == 1 else ""}


def on_top(step: int, _i: int) -> dict[str, Any]:
    """The same, and the backward of the other parts needs them."""
    return {"extra": "on top" if step % 2 == 1 else ""}


def skipped(step: int, i: int) -> dict[str, Any]:
    """A microbatch without a backward, as where a loss is not finite."""
    return {"skipped": i == 0 and step in (1, 2)}


def numbers(step: int, i: int) -> dict[str, Any]:
    return {"times": 2 * step + i}


def seen(flags: Flags, together: bool, half: bool, planned: bool) -> tuple[list[Any], list[str]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import overlapc

    torch.compiler.reset()
    torch.manual_seed(0)
    model = Branches()
    policy = MixedPrecisionPolicy(BF16, FP32) if half else MixedPrecisionPolicy()
    for each in (*model.blocks, model):
        fully_shard(each, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"profile": "estimate", "solver": "heu", "timeout_s": 120}
    call: Any = overlapc.optimize(model, **options) if planned else model
    found: list[Any] = []
    for step in range(4):
        made = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for i in range(2):
            call.set_requires_gradient_sync(i == 1 or not together)
            given = flags(step, i)
            loss = call(torch.randn(4, 8, generator=made), **given)
            if not given.get("skipped"):
                loss.backward()
            found.append(loss.detach())
        grads = [p.grad for p in model.parameters()]
        found += [None if grad is None else grad.to_local().clone() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
    return found, list(getattr(call, "fallbacks", ()))


def _compared(_rank: int, _ranks: int) -> list[tuple[str, bool, list[str], list[str]]]:
    dist.init_process_group("gloo")
    found = []
    for flags, together, half in (
        (late, True, False),
        (early, True, False),
        (odd, False, False),
        (on_top, False, False),
        (skipped, False, False),
        (numbers, False, True),
    ):
        expected, _ = seen(flags, together, half, False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine, fallbacks = seen(flags, together, half, True)
        said = [str(w.message) for w in caught if str(w.message).startswith("overlapc")]
        same = [
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(expected, mine, strict=True)
        ]
        found.append((flags.__name__, all(same), fallbacks, said))
    return found


def test_parts_that_some_calls_leave_out() -> None:
    for of_rank in run_ranks(_compared, 2, timeout_s=400):
        for name, same, fallbacks, said in of_rank:
            assert same, name
            assert (fallbacks, said) == ([], []), name
