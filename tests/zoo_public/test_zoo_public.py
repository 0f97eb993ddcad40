"""Every public architecture of the zoo, in every way of training: bitwise, or named.

`python -m tests.zoo_public.table` writes what is found into docs/models.md.
"""

from __future__ import annotations

import pytest

from tests.zoo_public.models import ZOO
from tests.zoo_public.table import LIBRARIES, WAYS, outcome

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ZOO)
def test_nothing_is_silent(name: str, way: str) -> None:
    for library in LIBRARIES:
        pytest.importorskip(library, reason="install the extra: pip install -e '.[zoo]'")
    found = outcome(name, way)
    assert found.honest, f"{found.verdict}: {found.detail}"
