"""Between the steps of a run: other shapes and counts, validation, a rank that fails."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc.core.errors import OverlapcError
from tests.megatron import cpu
from tests.megatron.models import Layout, Trained, innermost, set_up, twins, two_steps
from tests.megatron.test_patch import differences
from tests.multiprocess.spawn import run_ranks

VERSION = "0.16.1"
QUICKLY: dict[str, Any] = {"solver": "none", "profile": "estimate"}


def ranks(function: Any, count: int = 2) -> list[Any]:
    cpu.need(VERSION)
    return run_ranks(function, count, timeout_s=100)


def run_of_many_kinds(rank: int, count: int) -> dict[str, Any]:
    """Steps of 2 microbatches, of 4, of other shapes; validation between; patched twice."""
    cpu.use(VERSION)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    layout = Layout(tp=2, layers=1, dropout=0.1)
    set_up(layout)
    plain, ours = twins(layout)
    kinds = [(2, 16), (4, 16), (4, 8), (2, 16)]

    def run(model: Trained) -> list[Any]:
        found = []
        for number, (microbatches, sequence) in enumerate(kinds):
            model.microbatches, model.sequence = microbatches, sequence
            found.append(model.step(number))
            found.append({"losses": model.validate()})
        return found

    expected = run(plain)
    patched.patch(solver="heu", profile="estimate")
    patched.patch(**QUICKLY)
    found = run(ours)
    assert patched._steps is not None
    (chunk,) = patched._steps.chunks.values()
    plans, explained = len(chunk._planned), patched.explain()
    patched.unpatch()
    dist.barrier()
    dist.destroy_process_group()
    wrong = [d for pair in zip(expected, found, strict=True) for d in differences(*pair)]
    return {"wrong": wrong, "ran": chunk.ran, "plans": plans, "text": explained}


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_plan_serves_steps_of_any_number_of_microbatches() -> None:
    for found in ranks(run_of_many_kinds):
        assert found["wrong"] == []
        assert found["ran"]["planned"] == 12
        assert found["ran"]["plain"] == 0
        assert found["plans"] == 2  # of two shapes
        assert "ran: 12 planned" in found["text"]


def run_with_a_rank_that_fails(rank: int, count: int) -> dict[str, Any]:
    cpu.use(VERSION)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    layout = Layout(tp=2, layers=1)
    set_up(layout)
    plain, ours = twins(layout)
    for trained in (plain, ours):
        mlp = innermost(trained.models[0]).decoder.layers[0].mlp
        mlp.forward = Peeking(mlp.forward) if rank == 1 else mlp.forward
    expected = [plain.step(number) for number in range(2)]
    patched.patch(**QUICKLY)
    found, told, chunk = two_steps(ours)
    dist.barrier()
    dist.destroy_process_group()
    wrong = [d for pair in zip(expected, found, strict=True) for d in differences(*pair)]
    texts = [text for text in told if "plain Megatron" in text]
    return {"wrong": wrong, "ran": chunk.ran, "told": texts}


class Peeking:
    """A forward that looks at a value, which no graph can."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        assert float(given.sum()) < 1e9
        return self.forward(given, *args, **kwargs)


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_if_one_rank_cannot_be_captured_all_run_plain_megatron() -> None:
    one, other = ranks(run_with_a_rank_that_fails)
    for found in (one, other):
        assert found["wrong"] == []
        assert found["ran"]["planned"] == 0
        assert found["ran"]["plain"] == 8
        assert len(found["told"]) == 1
    assert "(on rank 1)" in one["told"][0]


def test_megatron_is_imported_when_it_is_patched() -> None:
    program = "import sys, overlapc, overlapc.megatron; overlapc.megatron.unpatch(); "
    program += "overlapc.megatron.explain(); sys.exit('megatron' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def run_that_changes(rank: int, count: int) -> dict[str, Any]:
    """One step after each change of the model's Python side, each of which changes the result."""
    cpu.use(VERSION)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    layout = Layout(ranks=1, layers=2, dropout=0.1)
    set_up(layout)

    def run(model: Trained) -> list[Any]:
        inner = innermost(model.models[0])
        found = [model.step(0)]
        for layer in inner.decoder.layers:
            layer.hidden_dropout = 0.5
        found.append(model.step(1))
        layers = inner.decoder.layers
        layers[0], layers[1] = layers[1], layers[0]
        found.append(model.step(2))
        inner.rotary_pos_emb.inv_freq = inner.rotary_pos_emb.inv_freq * 2
        inner.rotary_pos_emb.forward.cache_clear()
        found.append(model.step(3))
        hook = layers[0].mlp.register_forward_hook(lambda m, given, out: (out[0] * 2, out[1]))
        found.append(model.step(4))
        hook.remove()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(model.step(5))
        layers[1].mlp.forward = Counting(layers[1].mlp)
        found.append(model.step(6))
        return found

    plain, ours = twins(layout)
    expected = run(plain)
    patched.patch(**QUICKLY)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = run(ours)
    assert patched._steps is not None
    (chunk,) = patched._steps.chunks.values()
    patched.unpatch()
    dist.destroy_process_group()
    wrong = [
        f"step {number}: {what}"
        for number, pair in enumerate(zip(expected, found, strict=True))
        for what in differences(*pair)
    ]
    texts = [str(each.message) for each in told if "plain Megatron" in str(each.message)]
    return {"wrong": wrong, "ran": chunk.ran, "told": texts}


class Counting:
    """A forward that counts its calls in its module, and depends on the count."""

    def __init__(self, module: Any) -> None:
        self.module, self.forward = module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.module.calls = getattr(self.module, "calls", 0) + 1
        out, bias = self.forward(*args, **kwargs)
        return out * self.module.calls, bias


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_what_changes_in_python_is_seen_or_runs_plain() -> None:
    (found,) = ranks(run_that_changes, 1)
    assert found["wrong"] == []
    assert found["ran"]["planned"] == 16  # of 4 steps; 3 ran plain
    assert found["ran"]["plain"] == 12
    hook, autocast, counts = found["told"]
    assert "hook that is not Megatron's" in hook
    assert "torch.autocast" in autocast
    assert "forward changes the attribute decoder.layers.1.mlp.calls" in counts


def run_of_several_models(rank: int, count: int) -> dict[str, Any]:
    """The first is refused; the second is trained by a function fetched before; then by two threads
    at once."""
    cpu.use(VERSION)
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    layout = Layout(ranks=1, layers=1, microbatches=2)
    set_up(layout)
    refused, (plain, ours) = Trained(layout), twins(layout)
    handle = innermost(refused.models[0]).decoder.register_forward_hook(print_nothing)
    before = {**vars(schedules)}
    fetched = get_forward_backward_func()
    signature = inspect.signature(fetched)
    expected = plain.gradients(0)
    patched.patch(**QUICKLY)
    same_signature = inspect.signature(fetched) == signature
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        refused.step(0)
    handle.remove()
    ours._zero()
    fetched(**ours._given(0))
    assert patched._steps is not None
    (chunk,) = patched._steps.chunks.values()
    found: dict[str, Any] = {
        "equal": all(map(torch.equal, expected, ours.gradients(0))),
        "ran": dict(chunk.ran),
        "told": [str(each.message) for each in told if "plain Megatron" in str(each.message)],
        "explained": patched.explain(),
        "signature": same_signature,
        "threads": in_threads(fetched, ours),
    }
    patched.unpatch()
    planned = chunk.ran["planned"]
    fetched(**ours._given(0))
    found["after"] = chunk.ran["planned"] - planned
    found["left"] = [name for name, value in before.items() if vars(schedules)[name] is not value]
    dist.destroy_process_group()
    return found


def print_nothing(*_: Any) -> None: ...


def in_threads(step: Any, trained: Trained) -> list[str]:
    """What a second thread is told that begins a step within the first one's."""
    told: list[str] = []
    given = trained._given(0)
    inner = given["forward_step_func"]

    def begin() -> None:
        try:
            step(**trained._given(0))
        except OverlapcError as error:
            told.append(str(error))

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        return inner(*args, **kwargs)

    step(**{**given, "forward_step_func": forward_step})
    return told


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_each_model_is_planned_or_refused_by_itself_and_steps_do_not_meet() -> None:
    (found,) = ranks(run_of_several_models, 1)
    assert len(found["told"]) == 1
    assert "print_nothing" in found["told"][0]
    assert "runs as plain Megatron" in found["explained"]
    assert found["equal"]
    assert found["signature"]
    assert found["ran"]["planned"] == 4
    assert found["ran"]["plain"] == 0
    assert len(found["threads"]) == 2
    assert "run the steps on one thread" in found["threads"][0]
    assert (found["left"], found["after"]) == ([], 0)


def called_twice(rank: int, count: int) -> tuple[bool, list[str]]:
    """A forward step that calls the model two times for each microbatch."""
    cpu.use(VERSION)
    import overlapc.megatron as patched

    dist.init_process_group("gloo")
    layout = Layout(ranks=1, layers=1, ddp=None)
    set_up(layout)

    class Twice(Trained):
        def _given(self, number: int) -> dict[str, Any]:
            given = super()._given(number)
            once = given["forward_step_func"]

            def step(data: Any, model: Any, *_: Any, **__: Any) -> Any:
                first, _ = once(data, model)
                second, loss = once(data, model)
                return first + second, loss

            return {**given, "forward_step_func": step, "num_microbatches": 2}

    plain, ours = Twice(layout), Twice(layout)
    ours.random = {name: state.clone() for name, state in plain.random.items()}
    expected = plain.gradients(0)
    patched.patch(solver="none", profile="estimate")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [ours.gradients(0), ours.gradients(0)][0]
    patched.unpatch()
    close = all(map(torch.allclose, expected, found))
    return close, [str(each.message) for each in told if "overlapc" in str(each.message)]


def test_a_model_that_is_called_twice_for_a_microbatch_is_told_once() -> None:
    ((close, told),) = ranks(called_twice, 1)
    assert close
    assert [text.partition(";")[0] for text in told] == [
        "overlapc: a model is called more than once for a microbatch"
    ]
