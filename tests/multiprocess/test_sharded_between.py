"""What loops do to a sharded model between steps: planned steps stay FSDP2's, bit by bit."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.multiprocess.sharded import STEPS, Case, batches, built, one_by_one
from tests.multiprocess.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

Action = Callable[[Any, Any, int], Sequence[Tensor]]  # model, optimizer, step -> what it saw


def weights_sent(model: Any, _optimizer: Any, _step: int) -> list[Tensor]:
    return [p.full_tensor() for p in model.parameters()]


def gathered_by_hand(model: Any, _optimizer: Any, _step: int) -> list[Tensor]:
    parts = [model, *model.blocks]
    for part in parts:
        part.unshard()
    seen = [p.detach().clone() for p in model.parameters()]
    for part in parts:
        part.reshard()
    return seen


def left_gathered(model: Any, _optimizer: Any, _step: int) -> list[Tensor]:
    for block in model.blocks:
        block.unshard()
    return []


def saved_and_loaded(model: Any, optimizer: Any, _step: int) -> list[Tensor]:
    """A checkpoint is written, the weights are lost, and the checkpoint is read."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place, 0)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "states": states}, checkpoint_id=place[0])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    weights, states = get_state_dict(model, optimizer)
    read = {"weights": weights, "states": states}
    dcp.load(read, checkpoint_id=place[0])
    set_state_dict(
        model, optimizer, model_state_dict=read["weights"], optim_state_dict=read["states"]
    )
    return []


def averaged(model: Any, _optimizer: Any, _step: int) -> list[Tensor]:
    """Other weights for an evaluation, and its own again."""
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        loss = model(batches(Case(), 7)[0])
        model.reshard()
        for p, mine in zip(model.parameters(), before, strict=True):
            p.copy_(mine)
    return [loss]


def converted(model: Any, _optimizer: Any, _step: int) -> list[Tensor]:
    model.to(torch.float64)
    model.to(torch.float32)
    return []


def frozen_in_turn(model: Any, _optimizer: Any, step: int) -> list[Tensor]:
    for p in model.blocks[0].parameters():
        p.requires_grad_(step % 2 == 1)
    return []


def prefetched(model: Any, _optimizer: Any, _step: int) -> list[Tensor]:
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_backward_prefetch([model.blocks[1]])
    return []


def evaluated(model: Any, _optimizer: Any, _step: int) -> list[Tensor]:
    model.eval()
    with torch.inference_mode():
        loss = model(batches(Case(), 7)[0])
    model.train()
    return [loss]


def out_of_memory(model: Any, _optimizer: Any, _step: int) -> list[Tensor]:
    """A forward that fails in the middle, as one that is out of memory does."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    handle = model.blocks[1].up.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        model(batches(Case(), 7)[0])
    handle.remove()
    return []


ACTIONS: dict[str, Action] = {
    each.__name__: each
    for each in (
        *(weights_sent, gathered_by_hand, left_gathered, saved_and_loaded, averaged, converted),
        *(frozen_in_turn, prefetched, evaluated, out_of_memory),
    )
}


def seen(case: Case, model: Any, optimizer: Any, run: Any, action: Action) -> list[Tensor]:
    found: list[Any] = []
    for step in range(STEPS + 1):
        found += [loss.detach().clone() for loss in run(batches(case, step))]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [each.clone() for each in action(model, optimizer, step)]
    return [each.to_local() if hasattr(each, "to_local") else each for each in found]


def kept_until_the_last(model: Any, call: Any) -> Any:
    """Accumulation that gathers once: parameters stay until the last backward."""

    def run(each: Sequence[Tensor]) -> list[Tensor]:
        losses = []
        for i, batch in enumerate(each):
            is_last = i == len(each) - 1
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last)
            losses.append(call(batch))
            losses[-1].backward()
        return losses

    return run


def between(_rank: int, _ranks: int, door: str, names: Sequence[str]) -> list[Any]:
    import overlapc

    dist.init_process_group("gloo")
    options: dict[str, Any] = {"profile": "estimate", "solver": "heu", "timeout_s": 120}
    found = []
    for name in names:
        torch.compiler.reset()
        case = Case(microbatches=1 if door == "optimize" and name in ACTIONS else 3)
        action = ACTIONS.get(name, lambda *_: ())
        loop = one_by_one if name in ACTIONS else None
        model, optimizer = built(case)
        run = loop(model) if loop else kept_until_the_last(model, model)
        expected = seen(case, model, optimizer, run, action)
        model, optimizer = built(case)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if door == "optimize":
                twin: Any = overlapc.optimize(model, **options)
                run = loop(twin) if loop else kept_until_the_last(model, twin)
            else:
                twin = run = overlapc.TrainStep(model, reduce="each", **options)
            got = seen(case, model, optimizer, run, action)
        same = [torch.equal(*pair) for pair in zip(expected, got, strict=True)]
        said = [text for w in caught if (text := str(w.message)).startswith("overlapc")]
        planned = bool(twin.graphs) if door == "optimize" else twin.report is not None
        found.append((name, all(same), planned, twin.fallbacks, said))
    return found


@pytest.mark.parametrize(
    ("door", "names"),
    [
        ("optimize", [*ACTIONS, kept_until_the_last.__name__]),
        ("TrainStep", ["weights_sent", "saved_and_loaded", "frozen_in_turn", "evaluated"]),
    ],
)
def test_what_happens_between_steps_changes_no_bit(door: str, names: list[str]) -> None:
    for found in run_ranks(between, 2, door, names, timeout_s=880):
        assert found == [(name, True, True, [], []) for name in names]
