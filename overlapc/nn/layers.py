"""Autograd Functions for the communication of a model on several ranks; all can be captured.

Megatron's f and g operators, those of its sequence parallelism, and the experts' all-to-all, as
functional collectives. And what a model asks for that sees its whole batch, also where it is run in
slices: `whole`, `before` and `total`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of `x` over the ranks of the process group with that name."""
    start = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group)
    return torch.ops._c10d_functional.wait_tensor(start)


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: every rank uses the whole of `x`; the backward sums the gradients of all
    ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """Megatron's g: sums the ranks' partial results; in the backward every rank gets the whole
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Concatenate the rows of all ranks of the group, in the order of ranks."""
    start = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks, group)
    return torch.ops._c10d_functional.wait_tensor(start)


def scatter_sum(x: Tensor, ranks: int, group: str) -> Tensor:
    """Sum `x` over the ranks of the group and return this rank's rows of it."""
    start = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group)
    return torch.ops._c10d_functional.wait_tensor(start)


class GatherRows(torch.autograd.Function):
    """f for rows split over ranks: gathers all rows; the backward sums and scatters gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.where = ranks, group
        return gather(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sum(grad, *ctx.where), None, None


class ScatterRows(torch.autograd.Function):
    """g for rows split over ranks: sums the partial results, and each rank gets its part of the
    rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.where = ranks, group
        return scatter_sum(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather(grad, *ctx.where), None, None


def exchange(x: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
    """All-to-all of rows: `send[r]` of ours go to rank r, `receive[r]` come from it."""
    start = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), receive, send, group)
    return torch.ops._c10d_functional.wait_tensor(start)


class AllToAll(torch.autograd.Function):
    """`exchange` with a backward: gradients are exchanged back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, receive: Sequence[int], send: Sequence[int], group: str
    ) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return exchange(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grad, ctx.send, ctx.receive, ctx.group), None, None, None


# --------------------------------------------------------------------------- what sees the batch

_count = 1  # slices of the batch that the model is called with
_turns: list[_Turns] = []  # of slices that run as plain PyTorch, the innermost last


def whole(rows: int) -> int:
    """How many rows (tokens, samples) the whole batch has, of which this call has so many: the
    same number, or that of all slices where `slices=k` has cut the batch."""
    return rows * _count


def before(counts: Tensor) -> Tensor:
    """What the slices before this one counted at this place, added up: zeros, unless `slices=k` has
    cut the batch. With it a gate whose experts take only so many tokens gives and drops in slices
    what it gives and drops of the whole batch:

        place = hot.cumsum(0) + before(hot.sum(0))  # of each token among those of its expert
        keep = place <= factor * whole(tokens) / experts
    """
    if counts.requires_grad:
        raise ValueError("before: found counts that require a gradient; expected numbers of rows")
    found: Tensor = torch.ops.overlapc.before(counts)
    return found


def total(x: Tensor) -> Tensor:
    """The sum of `x` over all slices, each of which gets it: `x`, unless `slices=k` has cut the
    batch. Its gradient is summed over the slices, too. So auxiliary losses, batch statistics and
    losses over counted tokens are in slices what they are of the whole batch:

        share = total(gates.sum(0)) / whole(tokens)
        loss = total(losses.sum()) / total(is_token.sum())
    """
    if _turns:
        return _turns[-1].total(x)
    found: Tensor = torch.ops.overlapc.total(x)
    return found


@torch.library.custom_op("overlapc::before", mutates_args=())
def _before(counts: Tensor) -> Tensor:
    return _turns[-1].pass_on(counts) if _turns else torch.zeros_like(counts)


@_before.register_fake
def _(counts: Tensor) -> Tensor:
    return torch.empty_like(counts)


@torch.library.custom_op("overlapc::total", mutates_args=())
def _total(x: Tensor) -> Tensor:
    return x.clone()  # in slices other ops are in its place


@_total.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_total.register_autograd(lambda _, gradient: torch.ops.overlapc.total(gradient))


class _Turns:
    """Slices as plain PyTorch: what those so far counted, by place in the model."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.now = -1  # the slice that runs
        self.totals: list[Tensor] = []
        self.places = [0] * count  # each slice's next place

    def begin(self) -> None:
        self.now += 1

    def pass_on(self, counts: Tensor) -> Tensor:
        _refuse_again("before", self.count)
        if not 0 <= self.now < self.count:
            raise RuntimeError(
                f"before: found slice {self.now + 1} of {self.count}; expected begin() once before "
                "each of so many slices: overlapc.nn.layers.in_turn(count)"
            )
        place = self.places[self.now]
        if place == len(self.totals):
            self.totals.append(torch.zeros_like(counts))
        found = self.totals[place]
        self.totals[place] = found + counts
        self.places[self.now] += 1
        return found

    def total(self, x: Tensor) -> Tensor:
        if self.count == 1:
            return x.clone()
        _refuse_again("total", self.count)
        raise RuntimeError(
            "total: found slices that run one after the other; expected them beside each other: "
            "overlapc.nn.layers.beside(run, slices)"
        )


def _refuse_again(name: str, count: int) -> None:
    if count > 1 and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{name}: called again in the backward, where other slices are not asked; expected it "
            "outside of torch.utils.checkpoint: what overlapc plans needs none"
        )


def slices_now() -> int:
    """How many slices of a batch a model is called with."""
    return _count


@contextlib.contextmanager
def sliced(count: int) -> Iterator[None]:
    """While this is on, a model is called with one of so many slices of a batch."""
    global _count
    outer, _count = _count, count
    try:
        yield
    finally:
        _count = outer


@contextlib.contextmanager
def in_turn(count: int) -> Iterator[Callable[[], None]]:
    """Run so many slices of a batch one after the other as plain PyTorch:

    with in_turn(len(slices)) as begin:
        for each in slices:
            begin()
            (model(*each) / len(slices)).backward()
    """
    with _running(_Turns(count)) as turns:
        yield turns.begin


@contextlib.contextmanager
def _running(turns: _Turns) -> Iterator[_Turns]:
    _turns.append(turns)
    try:
        with sliced(turns.count):
            yield turns
    finally:
        _turns.pop()


def _leave() -> Callable[[], None]:
    return lambda: None


def beside(
    run: Callable[[Any], Any],
    slices: Sequence[Any],
    hold: Callable[[], Callable[[], None]] = _leave,
) -> list[Any]:
    """Run slices of a batch beside each other as plain PyTorch, as far as each comes until it asks
    for a `total`; return what `run` returns for each. One backward is for all:

        losses = beside(lambda each: model(*each), slices)
        (sum(losses) / len(losses)).backward()

    `hold` returns what puts Python's state back as it is now. With it every slice finds the state
    in which the first began, and after each `total` its own again.
    """
    with _running(_Beside(run, slices, hold)) as turns:
        assert isinstance(turns, _Beside)
        return turns.results()


class _Beside(_Turns):
    """Slices in threads, of which one runs at a time."""

    def __init__(
        self,
        run: Callable[[Any], Any],
        slices: Sequence[Any],
        hold: Callable[[], Callable[[], None]],
    ) -> None:
        super().__init__(len(slices))
        self.threads = [_Thread(run, each) for each in slices]
        self.hold = hold

    def results(self) -> list[Any]:
        back = [self.hold()] * len(self.threads)
        try:
            while True:
                for i, thread in enumerate(self.threads):
                    self.now = i
                    back[i]()
                    thread.go_on()
                    back[i] = self.hold()
                if all(thread.is_done for thread in self.threads):
                    return [thread.value for thread in self.threads]
                self.refuse_fewer(self.threads)
        finally:
            for thread in self.threads:
                thread.end()

    def refuse_fewer(self, threads: Sequence[_Thread]) -> None:
        if any(thread.is_done for thread in threads):
            raise RuntimeError(
                "total: some slices ask for more totals than others; expected all to ask for the "
                "same"
            )

    def total(self, x: Tensor) -> Tensor:
        """The last slice that comes here adds up: autograd goes back through a slice in the order
        in which its thread went, so each thread makes one node here."""
        thread, others = self.threads[self.now], self.threads[:-1]
        if thread in others:
            thread.value = x.view_as(x)
        else:
            self.refuse_fewer(others)
            found = _AddUp.apply(*(other.value for other in others), x)
            for each, value in zip(self.threads, found, strict=True):
                each.value = value
        return thread.waits()


class _Thread:
    """A slice in a thread of its own. `value` is what it asks the total of, then the total, and at
    last its result."""

    def __init__(self, run: Callable[[Any], Any], part: Any) -> None:
        self.value: Any = None
        self.is_done = self.is_ended = False
        self.error: BaseException | None = None
        self.mine, self.theirs = threading.Semaphore(0), threading.Semaphore(0)
        here = as_here()

        def body() -> None:
            self.mine.acquire()
            try:
                if not self.is_ended:
                    with here():
                        self.value = run(part)
            except BaseException as error:
                self.error = error
            self.is_done = True
            self.theirs.release()

        self.thread = threading.Thread(target=body, daemon=True)
        self.thread.start()

    def go_on(self) -> None:
        """Let it run until it waits, or is done."""
        self.mine.release()
        self.theirs.acquire()
        if self.error is not None:
            raise self.error

    def waits(self) -> Tensor:
        self.theirs.release()
        self.mine.acquire()
        if self.is_ended:
            raise RuntimeError("another slice failed")
        found: Tensor = self.value
        return found

    def end(self) -> None:
        if not self.is_done:
            self.is_ended = True
            self.mine.release()
        self.thread.join()


def as_here() -> Callable[[], contextlib.ExitStack]:
    """What makes gradients, autocast and CUDA's stream elsewhere, or in another thread, as they
    are here."""
    gradients, devices = torch.is_grad_enabled(), ("cpu", "cuda")
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(gradients))
        if stream is not None:  # and its device
            stack.enter_context(torch.cuda.stream(stream))
        for device, enabled, dtype in casts:
            if enabled:
                stack.enter_context(torch.autocast(device, dtype))
        return stack

    return enter


class _AddUp(torch.autograd.Function):
    """Gives every slice the sum of all, the first slice first; so it does with gradients."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        found = summed(*parts)
        made = tuple(found.clone() for _ in parts)
        if not found.is_floating_point() and not found.is_complex():
            ctx.mark_non_differentiable(*made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (summed(*gradients),) * len(gradients)


def summed(*parts: Tensor) -> Tensor:
    """The sum, the first first."""
    found, *others = parts
    for part in others:
        found = found + part
    return found
