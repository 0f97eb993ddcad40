"""What every test shares.

One thread per process, so that tests of several ranks do not fight over the cores; a Dynamo
without memory of the test before; and the hypothesis profiles `ci` (default, the same examples
every time) and `thorough` (`make test-all`).
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tracing makes many objects that stay; with Python's 700 a seventh of the tests' time is looking at
# them. Tests of what is freed collect by themselves.
gc.set_threshold(20_000, 10, 10)

# Read when torch is first imported, and inherited by the processes a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

# No deadline, no health check on speed: an example that compiles a graph takes seconds.
settings.register_profile(
    "ci",
    max_examples=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough", max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


LONG = Path(__file__).with_name("long.txt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long, and whose ground others cover, are slow. A test hangs if it takes many
    times as long as on a machine of its own."""
    from tests.multiprocess.spawn import PATIENCE

    long = set(LONG.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)
        if (mark := item.get_closest_marker("timeout")) is not None:
            item.add_marker(pytest.mark.timeout(PATIENCE * mark.args[0]), append=False)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Dynamo counts recompilations per code object and gives up at a limit, across tests."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
