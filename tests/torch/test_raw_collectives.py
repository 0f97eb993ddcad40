"""A capture holds the raw collectives of `torch.distributed`, sync and async, as eager has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlapc.core.errors import CaptureError
from overlapc.emulate import Link, init_fabric
from overlapc.passes.capture.front import capture
from tests.torch.exact import randn
from tests.torch.raw_models import eager_step, gather, planned_step, scatter

RANKS = 2
Call = Callable[..., Any]


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, call: Call) -> Tensor:
        out: Tensor = call(y.clone())
        ctx.shape = y.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.sum().expand(ctx.shape), None


class Calls(nn.Module):
    """Calls a collective on what it computes, and hands on what that wrote."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(randn(4, 4, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Once.apply(x @ self.weight, self.call)
        return out.sum()


def starts_and_waits(call: Call) -> list[str]:
    trace = capture(Calls(call), randn(4, 4)).trace
    return [op.name for op in trace.ops if op.role in ("start", "wait")]


def reduced(y: Tensor, **how: Any) -> Any:
    return y, dist.all_reduce(y, **how)


def broadcast(y: Tensor, **how: Any) -> Any:
    return y, dist.broadcast(y, 1, **how)


def gathered(y: Tensor, **how: Any) -> Any:
    out = y.new_empty(4 * RANKS, 4)
    return out, gather(out, y, **how)


def listed(y: Tensor, **how: Any) -> Any:
    outs = [torch.empty_like(y) for _ in range(RANKS)]
    work = dist.all_gather(outs, y, **how)
    return torch.stack(outs) if work is None else outs[1], work


def listed_unevenly(y: Tensor, **how: Any) -> Any:
    outs = [y.new_empty(4 + rank, 4) for rank in range(RANKS)]
    return outs[1], dist.all_gather(outs, y, **how)


def scattered(y: Tensor, **how: Any) -> Any:
    out = y.new_empty(2, 4)
    return out, scatter(out, y, **how)


def scattered_list(y: Tensor, **how: Any) -> Any:
    out = y.new_empty(2, 4)
    return out, dist.reduce_scatter(out, [y[:2], y[2:]], **how)


def exchanged(y: Tensor, **how: Any) -> Any:
    out = torch.empty_like(y)
    return out, dist.all_to_all_single(out, y, **how)


def exchanged_unevenly(y: Tensor, **how: Any) -> Any:
    out = y.new_empty(5, 4)
    return out, dist.all_to_all_single(out, y, [2, 3], [1, 3], **how)


def exchanged_lists(y: Tensor, **how: Any) -> Any:
    outs = [y.new_empty(2, 4), y.new_empty(3, 2)]
    return outs[1], dist.all_to_all(outs, [y[:1], y[1:]], **how)


COLLECTIVES = {
    reduced: "all_reduce",
    broadcast: "broadcast",
    gathered: "all_gather_into_tensor",
    listed: "all_gather_into_tensor",
    listed_unevenly: "all_to_all_single",
    scattered: "reduce_scatter_tensor",
    scattered_list: "reduce_scatter_tensor",
    exchanged: "all_to_all_single",
    exchanged_unevenly: "all_to_all_single",
    exchanged_lists: "all_to_all_single",
}
each = pytest.mark.parametrize("call", COLLECTIVES, ids=lambda call: call.__name__)


@each
def test_a_synchronous_call_is_a_start_and_a_wait(fake_ranks: None, call: Call) -> None:
    assert starts_and_waits(lambda y: call(y)[0]) == [COLLECTIVES[call], "wait_tensor"]


@each
def test_an_asynchronous_call_is_waited_for_where_the_model_waits(
    fake_ranks: None, call: Call
) -> None:
    def later(y: Tensor) -> Tensor:
        out, work = call(y, async_op=True)
        meanwhile = torch.ones(3).exp()
        work.wait()
        work.wait()
        return out.sum() + meanwhile.sum()

    names = [op.name for op in capture(Calls(later), randn(4, 4)).trace.ops]
    assert names.index(COLLECTIVES[call]) < names.index("exp") < names.index("wait_tensor")
    assert names.count("wait_tensor") == 1


def never_waited(y: Tensor) -> Tensor:
    dist.all_reduce(y, async_op=True)
    return torch.ones(4, 4)


def read_too_early(y: Tensor) -> Tensor:
    work = dist.all_reduce(y[1:], async_op=True)
    early = y * 2
    work.wait()
    return early


def written_too_early(y: Tensor) -> Tensor:
    out, work = gathered(y, async_op=True)
    y.mul_(2)
    work.wait()
    return out


def asked(y: Tensor) -> Tensor:
    work = dist.all_reduce(y, async_op=True)
    while not work.is_completed():
        pass
    return y


def reduced_to_one(y: Tensor) -> Tensor:
    dist.reduce(y, 0)
    return y


def sent(y: Tensor) -> Tensor:
    dist.isend(y, 1).wait()
    return y


def received(y: Tensor) -> Tensor:
    dist.irecv(y, 1).wait()
    return y


def barred(y: Tensor) -> Tensor:
    dist.barrier()
    return y


def by_the_group(y: Tensor) -> Tensor:
    dist.group.WORLD.allreduce([y]).wait()
    return y


def coalesced(y: Tensor) -> Tensor:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(y)
    return y


def scaled(y: Tensor) -> Tensor:
    dist.all_reduce(y, op=dist._make_nccl_premul_sum(2.0))
    return y


def scattered_unevenly(y: Tensor) -> Tensor:
    out = y.new_empty(1, 4)
    dist.reduce_scatter(out, [y[:1], y[1:]])
    return out


REFUSED = [
    (never_waited, r"dist\.all_reduce is never waited for"),
    (read_too_early, r"aten\.mul\.Tensor reads a tensor that dist\.all_reduce .* may still"),
    (written_too_early, r"aten\.mul_\.Tensor writes a tensor that dist\.all_gather"),
    (asked, r"asked for is_completed"),
    (reduced_to_one, r"dist\.reduce cannot be captured"),
    # Before torch 2.13 these do not ask whether something else takes the call: the op is named.
    (sent, r"(dist\.isend|c10d\.send\S*) cannot be captured"),
    (received, r"(dist\.irecv|c10d\.recv\S*) cannot be captured"),
    (barred, r"c10d\.barrier\.default cannot be captured"),
    (by_the_group, r"c10d\.allreduce_\.default cannot be captured"),
    (coalesced, r"dist\.all_reduce within a coalescing manager cannot be captured"),
    (scattered_unevenly, r"reduce_scatter of tensors of several shapes cannot be captured"),
    (scaled, r"a reduction by .* cannot be captured"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_captured_is_named(fake_ranks: None, call: Call, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as refused:
        capture(Calls(call), randn(4, 4))
    line = call.__code__.co_firstlineno
    assert any(f'{__file__}", line {line + i}' in str(refused.value) for i in range(1, 5))


def test_splits_may_be_numpys(fake_ranks: None) -> None:
    def exchanged(y: Tensor) -> Tensor:
        out = y.new_empty(5, 4)
        dist.all_to_all_single(out, y, np.array([2, 3]), np.array([1, 3]))
        return out

    assert starts_and_waits(exchanged) == ["all_to_all_single", "wait_tensor"]


def test_other_parts_of_a_tensor_are_free_while_one_is_reduced(fake_ranks: None) -> None:
    def beside(y: Tensor) -> Tensor:
        work = dist.all_reduce(y[:2], async_op=True)
        y[2:].mul_(2)
        work.wait()
        return y

    assert starts_and_waits(beside) == ["all_reduce", "wait_tensor"]


def test_outside_of_a_function_autograd_does_not_know_the_collective(fake_ranks: None) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(4, 4, seed=1))

        def forward(self, x: Tensor) -> Tensor:
            y = (x @ self.weight).exp()
            dist.all_reduce(y)
            return y.sum()

    trace = capture(Plain(), randn(4, 4)).trace
    assert [op.name for op in trace.ops if op.role == "start"] == ["all_reduce"]


class Auxiliary(torch.autograd.Function):
    """Trains something beside the loss: its gradient begins with a constant."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, beside: Tensor) -> Tensor:
        ctx.save_for_backward(beside)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def test_a_gradient_that_begins_with_a_constant_is_of_the_backward() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(4, 4, seed=1))

        def forward(self, x: Tensor) -> Tensor:
            y = Summed.apply(x @ self.weight)
            out: Tensor = Auxiliary.apply(y.square(), (y * 2).exp())
            return out.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        init_fabric(Link(alpha_s=0.0, bytes_per_s=1e13), world_size=RANKS)
    try:
        x = randn(4, 4)
        loss, (expected,) = eager_step(Beside(), (x,))
        for solver in ("none", "full", "heu"):
            found, (gradient,) = planned_step(Beside(), (x,), solver, budget="1MB")
            assert torch.equal(found, loss)
            assert gradient is not None
            assert expected is not None
            assert torch.equal(gradient, expected)
    finally:
        dist.destroy_process_group()


def test_after_a_capture_collectives_are_eagers_again(fake_ranks: None) -> None:
    for refused in (never_waited, coalesced):
        with pytest.raises(CaptureError):
            capture(Calls(refused), randn(4, 4))
    y = torch.ones(4)
    assert dist.all_reduce(y) is None
    assert isinstance(dist.all_reduce(y, async_op=True), dist.Work)


# --------------------------------------------------------------------------- in sequence, on views

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda t: t,
    "rows": lambda t: t[2:6],
    "one row": lambda t: t[3],
    "turned": lambda t: t.t(),
    "flat": lambda t: t.view(-1)[8:40],
    "columns": lambda t: t[:, 2:4],
}
CALLS = {"all_reduce", "broadcast", "gather", "scatter", "exchange", "listed"}


def run_calls(t: Tensor, calls: list[tuple[str, str, bool, bool]]) -> Tensor:
    """Each call on a view of `t`, asynchronous or not; the works are waited for at the end of
    each, or with compute on another tensor in between."""
    total = torch.zeros(())
    for name, where, later, doubled in calls:
        view = VIEWS[where](t)
        if name in ("all_reduce", "broadcast") and where == "columns":
            view = VIEWS["rows"](t)  # these take what lies without gaps
        rows = view.shape[0]
        out: Tensor | list[Tensor] = view
        if name == "all_reduce":
            work = dist.all_reduce(view, async_op=later)
        elif name == "broadcast":
            work = dist.broadcast(view, 1, async_op=later)
        elif name == "gather":
            out = view.new_zeros(RANKS * rows, *view.shape[1:])
            work = gather(out, view.contiguous(), async_op=later)
        elif name == "scatter":
            out = view.new_zeros(rows // RANKS, *view.shape[1:])
            work = scatter(out, view.contiguous(), async_op=later)
        elif name == "exchange":
            out = view.new_zeros(view.shape)
            work = dist.all_to_all_single(out, view.contiguous(), async_op=later)
        else:
            out = [view.new_zeros(view.shape) for _ in range(RANKS)]
            work = dist.all_gather(out, view.contiguous(), async_op=later)
        other = total.cos()
        if later:
            work.wait()
        whole = torch.stack(out) if isinstance(out, list) else out
        total = other + (whole * torch.arange(1.0, whole.numel() + 1).view(whole.shape)).sum()
        if doubled:
            VIEWS["rows"](t).mul_(0.5)
    return t.sum() + total


@settings(max_examples=8)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(CALLS)),
            st.sampled_from(sorted(VIEWS)),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_sequence_of_collectives_on_views_is_as_eager(
    calls: list[tuple[str, str, bool, bool]],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        init_fabric(Link(alpha_s=0.0, bytes_per_s=1e13), world_size=RANKS, rank=1)
    try:
        model = Sequence(calls)
        x = randn(8, 8)
        eager = model(x)
        eager.backward()
        expected = model.weight.grad
        assert expected is not None
        loss, (gradient,) = planned_step(model, (x,))
        assert torch.equal(loss, eager.detach())
        assert gradient is not None
        assert torch.equal(gradient, expected)
    finally:
        dist.destroy_process_group()


class Sequence(nn.Module):
    """The calls in a Function's forward, and in its backward."""

    def __init__(self, calls: list[tuple[str, str, bool, bool]]) -> None:
        super().__init__()
        self.calls = calls
        self.weight = nn.Parameter(randn(8, 8, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        calls = self.calls

        class Both(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                y = y.clone()
                return y + run_calls(y, calls)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                grad = grad.clone()
                return grad + run_calls(grad, calls)

        return (Both.apply(x @ self.weight) * x).sum()
