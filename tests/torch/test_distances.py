"""How far results in slices are from the uncut ones, where they are no ordinary numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overlapc import optimize
from overlapc.runtime.slicing.tolerances import distance
from tests.torch.exact import DYNAMO_WARNINGS

pytestmark = DYNAMO_WARNINGS

INF, NAN = float("inf"), float("nan")


def test_equal_infinities_and_nans_are_no_distance() -> None:
    masked = torch.tensor([1.0, -INF, NAN, 4.0])
    near = torch.tensor([1.0, -INF, NAN, 4.002])
    assert 4e-4 < distance(masked, near)[0] < 6e-4
    assert not distance(masked, torch.tensor([1.0, INF, NAN, 4.0]))[0] < INF
    assert not distance(masked, torch.tensor([NAN, -INF, NAN, 4.0]))[0] < INF


def test_complex_numbers_are_compared() -> None:
    one = torch.tensor([1 + 2j, 3 - 4j])
    assert 0 < distance(one, one * (1 + 1e-6))[0] < 1e-5
    assert distance(one, one.conj().imag * 1j + one.real * 0.5)[0] > 0.4


def test_a_batch_of_no_numbers_proves_nothing() -> None:
    nothing = torch.full((3,), NAN)
    assert distance(nothing, nothing.clone()) == (
        INF,
        "no number in the uncut batch, so they cannot be compared",
    )


class _Rotates(nn.Module):
    """Complex inside; what it returns beside the loss is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sizes = (x.to(torch.complex64) @ self.turn).abs()
        return sizes.square().mean(), sizes.masked_fill(torch.arange(8) < 3, -INF)


def test_slices_of_complex_numbers_and_masked_scores() -> None:
    torch.manual_seed(0)
    model, x = _Rotates(), torch.randn(8, 8)
    model(x)[0].backward()
    assert model.turn.grad is not None
    expected, model.turn.grad = model.turn.grad, None
    loss, scores = optimize(model, slices=2, profile="estimate")(x)
    loss.backward()
    assert torch.equal(scores, model(x)[1])
    torch.testing.assert_close(model.turn.grad, expected)
