"""An interval is as wide as the sources of its parts deserve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.profiler.hardware import known_hardware, load_hardware
from overlapc.search.evaluate import Found
from overlapc.search.layouts import Cluster, Layout
from overlapc.validation.interval import Interval, interval

CLUSTER = Cluster("a100-sxm-80", 16, 8, 80 * 10**9, 128)
FOUND = Found(Layout(8, 2, 1, 1), "heu", 1_000_000)


def width(found: Interval) -> float:
    return (found.high_ns - found.low_ns) / 1_000_000


@given(st.integers(0, 400_000), st.integers(0, 400_000))
def test_the_predicted_step_is_inside_and_traffic_is_not_as_certain(tp: int, dp: int) -> None:
    found = replace(FOUND, exposed_ns={"tp": tp, "dp": dp})
    within = interval(found, CLUSTER)
    assert 0 < within.low_ns < found.step_ns < within.high_ns
    more = replace(FOUND, exposed_ns={"tp": tp, "dp": min(dp + 500_000, 1_000_000 - tp)})
    assert width(interval(more, CLUSTER)) >= width(within) - 0.08  # kernels are less of it


def test_what_is_guessed_is_named_and_wider() -> None:
    exposed = replace(FOUND, exposed_ns={"tp": 300_000, "p2p": 200_000})
    known = interval(exposed, CLUSTER)
    assert known.guessed == ("p2p",)  # between nodes
    guessed = interval(exposed, replace(CLUSTER, hardware="v100-sxm2-32"))
    assert "kernels" in guessed.guessed
    assert width(guessed) > 1.2 * width(known)


def test_a_step_is_as_many_times_longer_as_shorter() -> None:
    within = interval(FOUND, CLUSTER)
    assert within.high_ns * within.low_ns == pytest.approx(FOUND.step_ns**2, rel=1e-4)
    assert not within.launching


def test_steps_that_hosts_hardly_launch_in_time_are_less_certain() -> None:
    assert interval(replace(FOUND, launching=0.4), CLUSTER) == interval(FOUND, CLUSTER)
    waits = interval(replace(FOUND, launching=0.6), CLUSTER)
    assert waits.launching
    assert width(waits) > 1.3 * width(interval(FOUND, CLUSTER))


def test_no_traffic_has_no_part() -> None:
    assert interval(replace(FOUND, exposed_ns={"dp": 0}), CLUSTER).guessed == ()


def test_every_machine_has_an_interval() -> None:
    exposed = {"tp": 100_000, "dp": 100_000, "p2p": 50_000, "all-to-all": 50_000, "stragglers": 9}
    for name in known_hardware():
        cluster = replace(CLUSTER, hardware=name, gpus_per_node=load_hardware(name).gpus_per_node)
        within = interval(replace(FOUND, exposed_ns=exposed), cluster)
        assert 0 < within.low_ns < FOUND.step_ns < within.high_ns
