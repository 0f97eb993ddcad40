"""In slices a mean over counted targets is the batch's, whichever targets are to be ignored."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlapc import TrainStep, optimize
from overlapc.core.errors import OptionError
from tests.torch.exact import DYNAMO_WARNINGS

pytestmark = DYNAMO_WARNINGS
BATCH, LENGTH, WORDS = 8, 6, 20
OPTIONS: dict[str, Any] = {"profile": "estimate", "solver": "heu"}


class Words(nn.Module):
    """A language model whose loss is inside."""

    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(WORDS, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, WORDS)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, WORDS))
        self.loss = loss

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self, self.out(torch.tanh(self.hidden(self.embed(words)))), targets)


def flat(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def weighted(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), targets, m.weight)


def smoothed(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), targets, m.weight, label_smoothing=0.1)


def other_index(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    known = targets.clamp(min=0)  # word 0 is no target
    return F.nll_loss(scores.log_softmax(-1).flatten(0, 1), known.flatten(), ignore_index=0)


def shifted(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    """As transformers does, beside an auxiliary loss."""
    later = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous()
    mean = F.cross_entropy(scores.float().view(-1, WORDS), later.view(-1), reduction="mean")
    return mean + 0.01 * scores.square().mean()


def module(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    half = nn.CrossEntropyLoss(weight=m.weight)(scores.flatten(0, 1), targets.flatten())
    return half / 2 + F.cross_entropy(scores[:, 0], targets[:, 0]) / 2


LOSSES = {f.__name__: f for f in (flat, weighted, smoothed, other_index, shifted, module)}


def made(loss: Callable[..., Tensor]) -> Words:
    torch.manual_seed(0)
    return Words(loss)


def batch(seed: int, ignored: int) -> tuple[Tensor, Tensor]:
    """The first targets of the batch are to be ignored."""
    generator = torch.Generator().manual_seed(seed)
    words, targets = torch.randint(1, WORDS, (2, BATCH, LENGTH), generator=generator)
    targets.view(-1)[:ignored] = -100
    return words, targets


def step_of(model: nn.Module, call: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = call(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", LOSSES)
def test_targets_to_be_ignored_come_later(name: str) -> None:
    """The first batch has none, so that its comparison with the whole batch shows nothing."""
    model = made(LOSSES[name])
    twin, step = optimize(model, slices=2, **OPTIONS), TrainStep(model, slices=4, **OPTIONS)
    for ignored in (0, 3, BATCH * LENGTH // 2, BATCH * LENGTH // 2 + 5):
        inputs = batch(ignored, ignored)
        if name == "module" and ignored > 2 * LENGTH:
            continue  # a quarter without any first word is NaN, whole or not
        wanted = step_of(model, model, *inputs)
        torch.testing.assert_close(step_of(model, twin, *inputs), wanted)
        model.zero_grad()
        (loss,) = step([inputs])
        found = [loss, *(p.grad for p in model.parameters())]
        torch.testing.assert_close(found, wanted)
        with torch.no_grad():
            torch.testing.assert_close(twin(*inputs), wanted[0])
    assert twin.fallbacks == step.fallbacks == []
    assert not any("not weighed" in line for line in twin.differences)


@pytest.mark.parametrize("name", LOSSES)
def test_where_each_slice_has_as_many_nothing_is_rounded_otherwise(name: str) -> None:
    model, (words, targets) = made(LOSSES[name]), batch(1, 0)
    if name == "smoothed":
        pytest.skip("its trace is not as eager, and says so")
    targets[:, -2:] = -100
    targets[:, :-2] = targets[:1, :-2]  # the same sum of weights
    twin = optimize(model, slices=2, **OPTIONS)
    found = step_of(model, twin, words, targets)
    model.zero_grad()
    losses = [model(*each) / 2 for each in zip(words.chunk(2), targets.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    plain = [sum(loss.detach() for loss in losses), *(p.grad for p in model.parameters())]
    assert all(map(torch.equal, found, plain))


def test_the_whole_batch_without_a_target_is_nan_as_it_is_uncut() -> None:
    model = made(flat)
    twin = optimize(model, slices=2, **OPTIONS)
    step_of(model, twin, *batch(0, 0))
    assert model(*batch(1, BATCH * LENGTH)).isnan()
    assert twin(*batch(1, BATCH * LENGTH)).isnan()


@settings(max_examples=settings.default.max_examples // 4)  # each captures two graphs
@given(
    name=st.sampled_from(["flat", "weighted", "shifted"]),
    slices=st.sampled_from([2, 4]),
    ignored=st.lists(st.integers(0, BATCH * LENGTH - 1), max_size=40, unique=True),
)
def test_any_targets(name: str, slices: int, ignored: list[int]) -> None:
    model = made(LOSSES[name])
    words, targets = batch(7, 0)
    targets.view(-1)[ignored] = -100
    wanted = step_of(model, model, words, targets)
    twin = optimize(model, slices=slices, profile="estimate", solver="none")
    torch.testing.assert_close(step_of(model, twin, words, targets), wanted)


def each_sample(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    means = [F.cross_entropy(scores[i], targets[i]) for i in range(len(scores))]
    return torch.stack(means).mean()


def as_a_sum(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    counted = (targets != -100).sum()
    return flat(m, scores, targets) * counted / targets.numel()


@pytest.mark.parametrize("loss", [each_sample, as_a_sum])
@pytest.mark.parametrize("ignored", [0, 5])
def test_what_is_no_mean_over_the_batch_is_not_weighed(loss: Any, ignored: int) -> None:
    model = made(loss)
    twin = optimize(model, slices=2, **OPTIONS)
    for seed, padded in ((0, ignored), (1, 3), (2, 5)):
        inputs = batch(seed, padded)
        torch.testing.assert_close(step_of(model, twin, *inputs), step_of(model, model, *inputs))
    (line,) = twin.differences
    assert "test_means.py" in line
    assert "a slice's mean is not weighed" in line


def masked_later(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    targets = targets.clone()
    targets[targets == 3] = -100
    return F.cross_entropy(scores.transpose(1, 2), targets) * 0.5 + m.out.bias.square().sum()


def test_targets_that_the_model_masks_itself() -> None:
    model = made(masked_later)
    twin = optimize(model, slices=2, **OPTIONS)
    for seed in range(3):
        inputs = batch(seed, 0)
        torch.testing.assert_close(step_of(model, twin, *inputs), step_of(model, model, *inputs))


def test_in_double_precision_a_share_is_as_precise() -> None:
    model = made(flat).double()
    twin = optimize(model, slices=2, **OPTIONS)
    for ignored in (0, 7):
        inputs = batch(1, ignored)
        found, wanted = step_of(model, twin, *inputs), step_of(model, model, *inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_under_vmap_samples_have_means_of_their_own() -> None:
    def mapped(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
        return torch.vmap(F.cross_entropy)(scores, targets).mean()

    model = made(mapped)
    twin = optimize(model, slices=2, **OPTIONS)
    inputs = batch(0, 0)
    torch.testing.assert_close(step_of(model, twin, *inputs), step_of(model, model, *inputs))


def test_within_a_checkpoint_a_mean_is_the_slices() -> None:
    """It would run again without the other slices. The first batch shows that it is another."""

    def inner(m: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
        return checkpoint(flat, m, scores, targets, use_reentrant=False)

    model = made(inner)
    with pytest.raises(OptionError, match=re.escape("the loss")):
        optimize(model, slices=2, **OPTIONS)(*batch(0, 7))
    twin = optimize(model, slices=2, **OPTIONS)
    step_of(model, twin, *batch(0, 0))
    assert "a slice's mean is not weighed" in twin.explain()
