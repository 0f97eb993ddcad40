"""`Replicas` serves PyTorch's `DistributedDataParallel` in a step of microbatches: gradients are
reduced once, in the last backward, as in

    with replicas.no_sync():
        for each in microbatches[:-1]:
            loss(replicas, *each).backward()
    loss(replicas, *microbatches[-1]).backward()

No trace enters its `forward`, which prepares the reduction. So it stands aside while the model is
traced and run: what it does before its module's forward is done before the graph, and what it does
behind is done before the last backward. Buckets are reduced as their gradients come, at the hooks
on autograd's nodes (`passes/capture/watched.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.joint import Joint, owner_of
from overlapc.passes.capture.marks import called
from overlapc.passes.capture.watched import graph_of
from overlapc.runtime.program import State

G = TypeVar("G")
T = TypeVar("T")
_PARTS = ("forward", "_run_ddp_forward", "_pre_forward", "_post_forward")
_MANY = 64  # more calls of one in a forward are not told apart
# Attributes that are set if its forward does more than a graph could.
_REFUSED = {
    "static_graph": "static_graph=True",
    "mixed_precision": "mixed_precision",
    "_delay_all_reduce_all_params": "delay_all_reduce_named_params",
    "_use_python_reducer": 'torch._dynamo.config.optimize_ddp = "python_reducer"',
}


class Replicas:
    """The modules of a model that are DistributedDataParallel, in a running step."""

    def __init__(self, model: nn.Module) -> None:
        self._each = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._left = 0  # microbatches of the step behind the one that runs
        # What the traced forwards read and write
        self._now: dict[str, list[Any]] = {"reduces": [], "calls": []}
        self._forwards = [_aside(i, each, self._now) for i, each in enumerate(self._each)]
        self._behind: list[Callable[[], None]] = []  # what is due before the last backward

    def __bool__(self) -> bool:
        return bool(self._each)

    def in_turn(self, microbatches: Sequence[G], run: Callable[[G], T]) -> list[T]:
        """Run microbatches one after the other."""
        found, self._behind = [], []
        for i, given in enumerate(microbatches):
            self._left = len(microbatches) - 1 - i
            found.append(run(given))
        return found

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """The block runs a microbatch as plain PyTorch. (A static graph has to reduce each.)"""
        with ExitStack() as stack:
            for each in self._each:
                if self._left and not each.static_graph:
                    stack.enter_context(each.no_sync())
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While the block runs, the forward of each is its module's."""
        for each in self._each:
            if what := _more_than_a_graph(each):
                raise CaptureError(
                    f"DistributedDataParallel has {what}, which works in its forward; expected it "
                    "without, or DistributedDataParallel(overlapc.optimize(model))"
                )
        self._now["reduces"] = [each.require_backward_grad_sync for each in self._each]
        self._now["calls"] = [0 for _ in self._each]
        try:
            for each, forward in zip(self._each, self._forwards, strict=True):
                vars(each)["forward"] = forward
            yield
        finally:
            for each in self._each:
                vars(each).pop("forward", None)

    def check(self, joint: Joint) -> None:
        """Raise if a graph has calls around which more would have to be done than before all."""
        for i, each in enumerate(self._each):
            if len(_calls(joint, i)) > 1 and each.broadcast_buffers and each.modules_buffers:
                raise CaptureError(
                    "DistributedDataParallel is called several times for a microbatch, and hands "
                    "its buffers round each time; expected one call, or broadcast_buffers=False"
                )

    def around(self, joint: Joint, state: State, slices: tuple[int, int]) -> None:
        """Before a graph runs, do what is done around the forwards in it; for `slices` (number,
        count) before the last, whose gradients alone hooks then hear."""
        number, count = slices
        for i, each in enumerate(self._each):
            if not _calls(joint, i):
                continue
            mine = {id(parameter) for parameter in each.parameters()}
            named = {owner_of(name): state[owner_of(name)] for name in joint.leaves}
            owners = {name: owner for name, owner in named.items() if id(owner.tensor) in mine}
            if number < count - 1:
                state |= {name: replace(owner, watched=False) for name, owner in owners.items()}
                continue
            tensors = [owner.tensor for owner in owners.values()]
            with each.no_sync() if self._left else nullcontext(), torch.enable_grad():
                each._pre_forward(None)  # one input, since some versions of it look at the first
                if self._left:
                    each._post_forward(None)
            if not self._left:
                self._behind.append(partial(_prepare, each, tensors))
        if count > 1:
            self.before_last()

    def before_last(self) -> None:
        """Do what is due before the last backward."""
        due, self._behind = self._behind, []
        for prepare in due:
            prepare()


def _aside(number: int, each: DistributedDataParallel, now: dict[str, list[Any]]) -> Any:
    """The forward that is traced in the place of its own."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if each.require_backward_grad_sync != now["reduces"][number]:
            raise RuntimeError(
                "no_sync() of DistributedDataParallel begins or ends within the step"
            )
        if not torch.is_grad_enabled():
            raise RuntimeError("DistributedDataParallel is called without gradients in the step")
        if torch.compiler.is_dynamo_compiling():
            now["calls"][number] += 1
        with called(_MANY * number + now["calls"][number]):
            return each.module(*args, **kwargs)

    return forward


def _calls(joint: Joint, number: int) -> list[int]:
    return [call for call in joint.calls if call // _MANY == number]


def _prepare(each: DistributedDataParallel, owners: Sequence[Tensor]) -> None:
    with torch.enable_grad():
        each._post_forward(graph_of(owners))


def _more_than_a_graph(each: DistributedDataParallel) -> str:
    """Say what its forward does that a graph would not; "" if nothing."""
    own = [getattr(type(each), name) is not vars(DistributedDataParallel)[name] for name in _PARTS]
    if any(own) or "forward" in vars(each):
        return "a forward of one's own"
    hook = getattr(each, "buffer_hook", None)
    if hook is not None and "POST" in str(hook.buffer_comm_hook_location):
        return "a hook that hands buffers round behind its forward"
    found = [said for name, said in _REFUSED.items() if getattr(each, name, None)]
    return next(iter(found), "join()" if each._join_config.enable else "")
