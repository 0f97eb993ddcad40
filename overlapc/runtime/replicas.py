"""`Replicas` serves PyTorch's `DistributedDataParallel` in a step of microbatches: gradients
are reduced once, in the last backward, as in

    with replicas.no_sync():
        for each in microbatches[:-1]:
            loss(replicas, *each).backward()
    loss(replicas, *microbatches[-1]).backward()

No trace enters its `forward`, which prepares the reduction. So it stands aside while the model is
traced and run, and what it does around its module's forward is done before the graph runs. Buckets
are reduced as their gradients come, at the hooks on autograd's nodes (`passes/watched.py`), which
hear the last microbatch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlapc.errors import CaptureError
from overlapc.passes.joint import Joint, owner_of
from overlapc.passes.watched import graph_of
from overlapc.runtime.program import State

G = TypeVar("G")
T = TypeVar("T")
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
        self._ahead = False

    def in_turn(self, microbatches: Sequence[G], run: Callable[[G], T]) -> list[T]:
        """Run microbatches one after the other, all but the last without a reduction. (Those that
        no graph could be reduce each time.)"""
        found = []
        for i, given in enumerate(microbatches):
            self._left = len(microbatches) - 1 - i
            with ExitStack() as stack:
                for each in self._each if self._left else ():
                    if not _more_than_a_graph(each):
                        stack.enter_context(each.no_sync())
                found.append(run(given))
        return found

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """The block begins the next microbatch before its turn."""
        self._left, self._ahead = self._left - 1, True
        try:
            yield
        finally:
            self._left, self._ahead = self._left + 1, False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While the block runs, the forward of each is its module's."""
        for each in self._each:
            if what := _more_than_a_graph(each):
                raise CaptureError(
                    f"DistributedDataParallel has {what}, which works in its forward; expected it "
                    "without, or DistributedDataParallel(overlapc.optimize(model))"
                )
        try:
            for each in self._each:
                vars(each)["forward"] = each.module.__call__
            yield
        finally:
            for each in self._each:
                vars(each).pop("forward", None)

    def around(self, joint: Joint, state: State, last: bool) -> None:
        """Before a graph runs, do what each does around its module's forward; but only before the
        `last` slice of a batch. Hooks hear no gradients but those of the last microbatch's."""
        for each in self._each:
            mine = {id(parameter) for parameter in each.parameters()}
            named = {owner_of(name): state[owner_of(name)] for name in joint.leaves}
            owners = {name: owner for name, owner in named.items() if id(owner.tensor) in mine}
            if not last or self._left:
                state |= {name: replace(owner, watched=False) for name, owner in owners.items()}
            if last and not self._ahead:
                with torch.enable_grad():
                    each._pre_forward()
                    each._post_forward(graph_of([owner.tensor for owner in owners.values()]))


def _more_than_a_graph(each: DistributedDataParallel) -> str:
    """Say what its forward does that a graph would not; "" if nothing."""
    found = [said for name, said in _REFUSED.items() if getattr(each, name, None)]
    return next(iter(found), "join()" if each._join_config.enable else "")
