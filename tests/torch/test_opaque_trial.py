"""What an opaque module changes when it is tried out on noise is refused, and put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.front import capture
from overlapc.state.snapshot import restore_of
from tests.torch.exact import randn
from tests.torch.test_opaque import WIDTH, Around, Numpy
from tests.torch.test_opaque_state import Slotted

pytestmark = pytest.mark.filterwarnings("ignore:overlapc runs")

CALLS = 0
DRAWS = np.random.default_rng(0)


class Remembers(nn.Module):
    """Changes what it holds, or draws, as `how` says."""

    calls = 0

    def __init__(self, how: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how
        self.helper, self.tensors = SimpleNamespace(calls=0), [[torch.zeros(1)]]
        self.slotted, self.array = Slotted(torch.zeros(1)), np.zeros(1)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        y = Numpy.apply(self.linear(x))
        self.how(self, y)
        return y


def _counts(module: Any, _: Tensor) -> None:
    module.helper.calls += 1


def _adds(module: Any, y: Tensor) -> None:
    module.tensors[0][0].add_(1)


def _appends(module: Any, y: Tensor) -> None:
    module.tensors[0].append(y)


def _counts_in_a_slot(module: Any, _: Tensor) -> None:
    module.slotted.calls += 1


def _counts_in_its_class(module: Any, _: Tensor) -> None:
    Remembers.calls += 1


def _counts_in_a_global(module: Any, _: Tensor) -> None:
    global CALLS
    CALLS += 1


def _makes_a_global(module: Any, _: Tensor) -> None:
    global MADE
    MADE = 1  # type: ignore[name-defined]


def _writes_to_an_array(module: Any, _: Tensor) -> None:
    module.array += 1


def _draws_from_its_own(module: Any, _: Tensor) -> None:
    torch.rand(1, generator=module.generator)


def _draws_from_a_global(module: Any, _: Tensor) -> None:
    DRAWS.random()


def _pythons(_: Any, y: Tensor) -> None:
    random.random()


def _numpys(_: Any, y: Tensor) -> None:
    np.random.rand()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (_counts, "changes its attribute 'helper'"),
        (_adds, "changes what it holds"),
        (_appends, "changes what it holds"),
        (_counts_in_a_slot, "changes its attribute 'slotted'"),
        (_counts_in_its_class, "changes what it holds"),
        (_counts_in_a_global, "changes what it holds, or what its code names"),
        (_makes_a_global, "changes what it holds, or what its code names"),
        (_writes_to_an_array, "changes its attribute 'array'"),
        (_draws_from_its_own, "changes its attribute 'generator'"),
        (_draws_from_a_global, "changes what it holds, or what its code names"),
        (_pythons, "draws from Python's or NumPy's"),
        (_numpys, "draws from Python's or NumPy's"),
    ],
)
def test_what_it_changes_on_noise_is_refused_and_put_back(how: Any, message: str) -> None:
    kernel = Remembers(how)
    before = states_of(kernel)
    with pytest.raises(CaptureError, match=message):
        capture(Around(kernel, lambda result: result), randn(4, WIDTH))
    assert states_of(kernel) == before


def states_of(kernel: Any) -> list[Any]:
    """All that a kernel may change."""
    generators = repr(np.random.get_state()), repr(DRAWS.bit_generator.state), random.getstate()
    calls = kernel.helper.calls, kernel.slotted.calls, Remembers.calls, CALLS, "MADE" in globals()
    own = kernel.generator.get_state().tolist(), kernel.array.tolist(), str(kernel.tensors)
    return [*generators, *calls, *own]


def test_a_generic_type_holds_nothing() -> None:
    assert restore_of(list[int]) is None
