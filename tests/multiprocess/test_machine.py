"""`overlapc profile`: this machine as a hardware file, alone and with the link between ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from overlapc.cli import GOOD, USAGE, main
from overlapc.emulate import Link, init_link
from overlapc.profiler.hardware import Hardware, load_hardware
from overlapc.profiler.machine import measure_machine
from tests.multiprocess.spawn import measures, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

LINK = Link(alpha_s=0.004, bytes_per_s=200e6)


def test_one_process_measures_what_it_can_and_says_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.toml"
    assert main(["profile", "--out", str(path), "--seconds", "2", "--json"]) == GOOD
    told = json.loads(capsys.readouterr().out)
    found = load_hardware(path)
    assert told["peak_flops"] == dict(found.peak_flops)
    assert found.name == "here"
    assert max(part for _, part in found.matmul_efficiency) == 1
    for key, source in found.sources.items():
        link = key.startswith(("intra.", "inter."))
        assert source.startswith("not measured" if link else "measured"), key
        assert (key in told["not_measured"]) == link


def measured(rank: int, ranks: int, here: int) -> Hardware:
    init_link(LINK)
    os.environ["LOCAL_WORLD_SIZE"] = str(here)
    return measure_machine("pair", load_hardware("cpu-gloo"), budget_s=15)


@pytest.mark.parametrize(
    ("ranks", "here"), [(2, 1), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in (2, 4))]
)
@measures
def test_ranks_measure_the_link_between_them(ranks: int, here: int) -> None:
    one, two, *_ = run_ranks(measured, ranks, here, timeout_s=120)
    which, other = ("intra", "inter") if here == ranks else ("inter", "intra")
    assert one.gpus_per_node == here
    if ranks == 2:
        assert getattr(one, which) == getattr(two, which)
    assert set(getattr(one, which).busbw) == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p",
    }  # fmt: skip
    for kind in ("all_reduce", "all_gather", "all_to_all", "p2p"):
        for size in (1 << 21, 1 << 24):
            # As it was measured: one rank of each node, the node's others beside it.
            expected = LINK.seconds(kind, size, 2) * 1e9  # type: ignore[arg-type]
            found = one.collective_ns(kind, size, 2, 2 if which == "intra" else 1)  # type: ignore[arg-type]
            assert 0.7 * expected < found < 2 * expected, (kind, size)
    assert one.sources[f"{which}.alpha_ns"].startswith("measured")
    assert "chain of all_reduce" in one.sources[f"{which}.slowdown.comm_permille"]
    assert one.sources[f"{other}.alpha_ns"].startswith("not measured")


def test_a_profile_wants_a_toml_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--out", "here.json"]) == USAGE
    assert "expected a name that ends in .toml" in capsys.readouterr().err
