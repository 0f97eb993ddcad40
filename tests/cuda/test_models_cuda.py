"""Public models on a GPU, in every way of training: bitwise, or named."""

from __future__ import annotations

import pytest
import torch

from tests.zoo_public import outcome as judged
from tests.zoo_public.models import ZOO
from tests.zoo_public.table import WAYS, outcome

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("name", ZOO)
def test_nothing_is_silent(name: str) -> None:
    try:
        judged.build(name, "cpu")
    except ImportError as error:
        pytest.skip(str(error))
    if not judged.repeats(name, "cuda"):
        pytest.skip("eager differs from itself")
    found = {way: outcome(name, way, "cuda") for way in WAYS}
    print(name, {way: (each.verdict, each.detail[:200]) for way, each in found.items()})
    assert all(each.honest for each in found.values()), found
    torch.cuda.synchronize()
