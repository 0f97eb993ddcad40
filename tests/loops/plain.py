"""Loops that need PyTorch alone."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.loops.loop import WIDTH, Door, Net, State, batches, loop, sgd, state_of


def trained(model: Any, optimizer: torch.optim.Optimizer, given: Any = None) -> list[Tensor]:
    """The plainest loop there is."""
    losses = []
    for x, y in given or batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


@loop()
def momentum(door: Door) -> State:
    model = door.optimize(Net())
    return state_of(model, *trained(model, sgd(model, momentum=0.9)))


@loop()
def adamw_with_clipping_and_a_schedule(door: Door) -> State:
    model = door.optimize(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return state_of(model, norm)


@loop()
def groups_of_parameters(door: Door) -> State:
    model = door.optimize(Net())
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 1e-3},
    ]
    return state_of(model, *trained(model, torch.optim.AdamW(groups, lr=1e-2)))


@loop()
def accumulation(door: Door) -> State:
    model = door.optimize(Net())
    optimizer, losses = sgd(model), []
    for i, (x, y) in enumerate(batches(4)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        losses.append(loss)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model, *losses)


@loop()
def a_step_of_microbatches(door: Door) -> State:
    model = Net()
    step = door.step(model, lambda model, x, y: F.cross_entropy(model(x), y) / 2)
    optimizer, losses = sgd(model), []
    for _ in range(2):
        losses += step(batches())
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, *losses)


@loop()
def bfloat16_autocast(door: Door) -> State:
    model = door.optimize(Net())
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return state_of(model, loss)


@loop()
def a_grad_scaler_that_overflows(door: Door) -> State:
    model = door.optimize(Net())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * 2.0**10).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return state_of(model, loss, scaler.get_scale())


@loop()
def pure_bfloat16(door: Door) -> State:
    model = door.optimize(Net().bfloat16())
    given = [(x.bfloat16(), y) for x, y in batches()]
    return state_of(model, *trained(model, sgd(model), given))


@loop()
def a_moving_average_of_weights(door: Door) -> State:
    model = door.optimize(Net())
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = sgd(model)
    for batch in batches():
        trained(model, optimizer, [batch])
        average.update_parameters(model)
    return state_of(model) | {f"average {k}": v for k, v in state_of(average.module).items()}


@loop()
def averaged_weights_and_norms(door: Door) -> State:
    model = door.optimize(nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))
    average = AveragedModel(model)
    losses = trained(model, sgd(model))
    average.update_parameters(model)
    update_bn([x for x, _ in batches()], average)
    return state_of(average.module, *losses)


@loop()
def the_optimizer_in_the_backward(door: Door) -> State:
    model = door.optimize(Net())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    return state_of(model, loss)


@loop()
def ragged_batches(door: Door) -> State:
    model = door.optimize(Net())
    given = [(x[:rows], y[:rows]) for (x, y), rows in zip(batches(4), (6, 5, 3, 6), strict=True)]
    return state_of(model, *trained(model, sgd(model), given))


@loop()
def a_retry_after_running_out_of_memory(door: Door) -> State:
    inner = Net()

    def too_large(module: nn.Module, given: tuple[Tensor]) -> None:
        if len(given[0]) > 4:
            raise torch.OutOfMemoryError("out of memory")

    inner.register_forward_pre_hook(too_large)
    model = door.optimize(inner)
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        for rows in (6, 3):
            try:
                loss = F.cross_entropy(model(x[:rows]), y[:rows])
            except torch.OutOfMemoryError:
                continue
            loss.backward()
        optimizer.step()
    return state_of(model, loss)


@loop()
def save_and_resume(door: Door) -> State:
    model = door.optimize(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained(model, optimizer, batches(1))
    path = door.folder / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    saved = torch.load(path)
    again = door.optimize(Net())
    again.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    return state_of(again, *trained(again, optimizer))


@loop()
def a_model_saved_whole(door: Door) -> State:
    model = door.optimize(Net())
    trained(model, sgd(model), batches(1))
    again = pickle.loads(pickle.dumps(model))
    return state_of(again, *trained(again, sgd(again)))


@loop()
def a_copy_that_goes_its_own_way(door: Door) -> State:
    model = door.optimize(Net())
    trained(model, sgd(model), batches(1))
    other = copy.deepcopy(model)
    losses = trained(other, sgd(other)) + trained(model, sgd(model), batches(1))
    return state_of(model, *losses) | {f"other {k}": v for k, v in state_of(other).items()}


@loop()
def freezing_and_unfreezing(door: Door) -> State:
    model = door.optimize(Net())
    optimizer = sgd(model)
    losses = []
    for frozen in (True, False):
        model.up.requires_grad_(not frozen)
        losses += trained(model, optimizer, batches(1))
    return state_of(model, *losses)


@loop()
def a_new_head(door: Door) -> State:
    model = door.optimize(Net())
    losses = trained(model, sgd(model), batches(1))
    model.down = nn.Linear(4 * WIDTH, 3)
    return state_of(model, *losses, *trained(model, sgd(model), batches(1, classes=3)))


@loop()
def adversaries(door: Door) -> State:
    maker, judge = door.optimize(Net(WIDTH)), door.optimize(Net(1))
    of_maker, of_judge = sgd(maker), sgd(judge)
    for x, _ in batches():
        made = maker(x)
        of_judge.zero_grad()
        (F.softplus(-judge(x)) + F.softplus(judge(made.detach()))).mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        loss = F.softplus(-judge(made)).mean()
        loss.backward()
        of_maker.step()
    return state_of(maker, loss) | {f"judge {k}": v for k, v in state_of(judge).items()}


@loop()
def distillation(door: Door) -> State:
    teacher, student = Net(width=WIDTH).eval(), door.optimize(Net())
    optimizer = sgd(student)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        found = student(x)
        loss = F.cross_entropy(found, y) + F.kl_div(found.log_softmax(-1), wanted)
        loss.backward()
        optimizer.step()
    return state_of(student, loss)


@loop()
def preferences(door: Door) -> State:
    """DPO: chosen and rejected in one batch, beside a frozen copy."""
    model = Net()
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    model = door.optimize(model)
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        rows = torch.arange(len(y))
        scores = model(x).log_softmax(-1)[rows, y]
        with torch.no_grad():
            before = frozen(x).log_softmax(-1)[rows, y]
        chosen, rejected = (scores - before).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        loss.backward()
        optimizer.step()
    return state_of(model, loss)


@loop()
def several_losses(door: Door) -> State:
    model = door.optimize(Net())
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        found = model(x)
        first = F.cross_entropy(found, y)
        first.backward(retain_graph=True)
        (found.square().mean() * 0.1).backward()
        optimizer.step()
    return state_of(model, first)


@loop()
def a_closure_that_is_called_again(door: Door) -> State:
    model = door.optimize(Net()).eval()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    return state_of(model, loss)


@loop()
def sharpness_aware(door: Door) -> State:
    model = door.optimize(Net())
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        steps = [p.grad * 0.05 for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), steps)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), steps)
        optimizer.step()
    return state_of(model, loss)


@loop()
def checkpointed_layers(door: Door) -> State:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Net(WIDTH) for _ in range(2))
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    model = door.optimize(Deep())
    return state_of(model, *trained(model, sgd(model)))


@loop()
def pictures(door: Door) -> State:
    model = door.optimize(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(72, 4)),
        )
    )
    given = [(x.view(4, 3, 8, 8), y) for x, y in batches(rows=4, width=192)]
    return state_of(model, *trained(model, sgd(model), given))


@loop()
def truncated_backward_through_time(door: Door) -> State:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(WIDTH, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            found, hidden = self.rnn(x, hidden)
            return self.head(found[:, -1]), hidden

    model, hidden = door.optimize(Reader()), torch.zeros(1, 2, 16)
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        found, hidden = model(x.view(2, 3, WIDTH), hidden.detach())
        loss = F.cross_entropy(found, y[:2])
        loss.backward()
        optimizer.step()
    return state_of(model, loss, hidden)


@loop()
def parametrized_weights(door: Door) -> State:
    inner = Net()
    parametrizations.weight_norm(inner.up)
    parametrizations.spectral_norm(inner.down)
    model = door.optimize(inner)
    return state_of(model, *trained(model, sgd(model)))


@loop()
def policy_gradient(door: Door) -> State:
    """Sample without gradients, then two clipped updates on what was sampled."""
    model = door.optimize(Net())
    optimizer = sgd(model)
    x = batches(1)[0][0]
    with torch.no_grad():
        drawn = torch.distributions.Categorical(logits=model(x))
        actions, rewards = drawn.sample(), torch.randn(len(x))
        before = drawn.log_prob(actions)
    for _ in range(2):
        optimizer.zero_grad()
        now = torch.distributions.Categorical(logits=model(x))
        ratio = (now.log_prob(actions) - before).exp()
        loss = -torch.min(ratio * rewards, ratio.clamp(0.8, 1.2) * rewards).mean()
        (loss - 0.01 * now.entropy().mean()).backward()
        optimizer.step()
    return state_of(model, loss)


@loop()
def a_variational_autoencoder(door: Door) -> State:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = Net(2 * WIDTH), Net(WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, width = self.encode(x).chunk(2, -1)
            drawn = mean + torch.randn_like(mean) * (width / 2).exp()
            return self.decode(drawn), mean, width

    model = door.optimize(Coder())
    optimizer = sgd(model)
    for x, _ in batches():
        optimizer.zero_grad()
        found, mean, width = model(x)
        loss = F.mse_loss(found, x) - 0.5 * (1 + width - mean.square() - width.exp()).mean()
        loss.backward()
        optimizer.step()
    return state_of(model, loss)


@loop()
def noise_prediction(door: Door) -> State:
    model = door.optimize(Net(WIDTH, width=WIDTH + 1))
    optimizer = sgd(model)
    for x, _ in batches():
        optimizer.zero_grad()
        noise, time = torch.randn_like(x), torch.rand(len(x), 1)
        loss = F.mse_loss(model(torch.cat([x * time + noise * (1 - time), time], 1)), noise)
        loss.backward()
        optimizer.step()
    return state_of(model, loss)


@loop()
def experts(door: Door) -> State:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(Net() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            found = x.new_zeros(len(x), 4)
            for i, expert in enumerate(self.experts):
                found = found + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
            return found

    model = door.optimize(Mixed())
    return state_of(model, *trained(model, sgd(model)))


@loop()
def evaluation_between_steps(door: Door) -> State:
    model = door.optimize(Net())
    optimizer, seen = sgd(model), []
    for batch in batches():
        seen += trained(model, optimizer, [batch])
        model.eval()
        with torch.inference_mode():
            seen.append(F.cross_entropy(model(batch[0]), batch[1]).clone())
        model.train()
    return state_of(model, *[loss.item() for loss in seen])


@loop()
def steps_that_are_left_out(door: Door) -> State:
    """The loss is looked at: a batch whose loss is no number is skipped."""
    model = door.optimize(Net())
    optimizer, losses = sgd(model), []
    for i, (x, y) in enumerate(batches(3)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * (float("nan") if i == 1 else 1)), y)
        if not loss.isfinite():
            continue
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return state_of(model, *losses)


@loop()
def features_from_a_hook(door: Door) -> State:
    inner, kept = Net(), []
    inner.norm.register_forward_hook(lambda module, given, out: kept.append(out))
    model = door.optimize(inner)
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return state_of(model, loss, *(out.detach() for out in kept))


class _Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), float(i)), torch.tensor(i % 4)


@loop()
def a_loader_with_workers(door: Door) -> State:
    model = door.optimize(Net())
    optimizer = sgd(model)
    trained(model, optimizer, batches(1))  # planned before the workers are forked
    loader = DataLoader(_Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    return state_of(model, *trained(model, optimizer, list(loader)))


@loop()
def an_interrupted_step(door: Door) -> State:
    model = door.optimize(Net())
    optimizer = sgd(model)

    def interrupted() -> Iterator[tuple[Tensor, Tensor]]:
        yield batches(1)[0]
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        trained(model, optimizer, interrupted())
    return state_of(model, *trained(model, optimizer))


@loop()
def noisy_gradients(door: Door) -> State:
    """Clipped and with noise, as private training has them."""
    model = door.optimize(Net())
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for parameter in model.parameters():
            parameter.grad += torch.randn_like(parameter) * 0.001
        optimizer.step()
    return state_of(model, loss)


@loop()
def replicas_of_one(door: Door) -> State:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = DistributedDataParallel(door.optimize(Net()))
        losses = trained(model, sgd(model))
        return state_of(model.module, *losses)
    finally:
        dist.destroy_process_group()


@loop()
def a_budget_of_half(door: Door) -> State:
    class Deep(nn.Sequential):
        pass

    model = door.optimize(Deep(*(Net(WIDTH) for _ in range(3))), memory_budget=0.7)
    return state_of(model, *trained(model, sgd(model)))
