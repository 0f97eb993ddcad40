"""A job that starts again has its plans: the same, without a search, for costs that are near."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import overlapc
from overlapc.core.text import format_plan
from overlapc.planning import kept as kept_plans
from overlapc.planning import road
from overlapc.planning.kept import _near
from tests.torch.zoo import MLP


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often something was solved."""
    calls: list[int] = []
    real = road.solve

    def counted(problem: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(problem.trace.ops))
        return real(problem, *args, **kwargs)

    monkeypatch.setattr(road, "solve", counted)
    return calls


def started(cache: Path, **options: Any) -> str:
    """A job's plan."""
    torch.manual_seed(0)
    model: Any = overlapc.optimize(MLP(), cache=cache, **options)
    model(torch.randn(8, 16)).sum().backward()
    return format_plan(model.plan)


def kept(cache: Path) -> list[Path]:
    return sorted(cache.with_suffix(".plans").iterdir())


@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_a_second_start_plans_the_same_without_a_search(
    tmp_path: Path, searched: list[int], profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_plans, "_NEAR", 1e9)  # however fast this machine is at the moment
    cache = tmp_path / "costs.json"
    first = started(cache, profile=profile)
    assert started(cache, profile=profile) == first
    assert len(searched) == 1


def test_another_machines_estimates_are_planned_apart(tmp_path: Path, searched: list[int]) -> None:
    cache = tmp_path / "costs.json"
    for hardware in ("h100-sxm", "h200-sxm", "h100-sxm"):
        started(cache, profile="estimate", hardware=hardware)
    assert len(searched) == 2
    assert len(kept(cache)) == 2


def test_each_budget_is_asked_once_on_the_same_costs(tmp_path: Path, searched: list[int]) -> None:
    cache = tmp_path / "costs.json"
    found = [
        started(cache, profile="estimate", memory_budget=b)
        for b in (16_500, 20_000, 16_500, 20_000)
    ]
    assert found[:2] == found[2:]
    assert len(searched) == 2
    assert len(kept(cache)) == 1


def test_graphs_that_were_not_used_for_long_are_forgotten(
    tmp_path: Path, searched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_plans, "_FILES", 2)
    cache = tmp_path / "costs.json"
    for hardware in ("h100-sxm", "h200-sxm", "h100-sxm", "b200"):  # the second is oldest then
        started(cache, profile="estimate", hardware=hardware)
    assert len(kept(cache)) == 2
    assert len(searched) == 3
    other = cache.with_suffix(".plans") / "somebody's.json"
    other.touch()
    started(cache, profile="estimate", hardware="h100-sxm")
    assert len(searched) == 3
    started(cache, profile="estimate", hardware="h200-sxm")
    assert len(searched) == 4
    assert len(kept(cache)) == 3
    assert other.exists()


def test_times_are_near_within_a_factor_of_two() -> None:
    now = {"costs": {"f": [100, 0, 8, ""], "g": [50, 40, 0, ""]}, "slowdown": [1000, 1000]}
    for factor, is_near in ((1.9, True), (0.6, True), (2.1, False), (0.4, False)):
        for place in (0, 1):
            costs = {name: list(cost) for name, cost in now["costs"].items()}
            for cost in costs.values():
                cost[place] = int(cost[place] * factor)
            assert _near({**now, "costs": costs}, now) == is_near
    costs = {**now["costs"], "f": [100, 0, 9, ""]}
    assert not _near({**now, "costs": costs}, now)


def test_other_estimates_are_planned_anew(tmp_path: Path, searched: list[int]) -> None:
    cache = tmp_path / "costs.json"
    first = started(cache, profile="estimate")
    (path,) = kept(cache)
    content = json.loads(path.read_text())
    for cost in content["ranks"][0]["costs"].values():
        cost[0] += 1
    path.write_text(json.dumps(content))
    assert started(cache, profile="estimate") == first
    assert len(searched) == 2
    assert json.loads(path.read_text())["ranks"] != content["ranks"]


@pytest.mark.parametrize("text", ["", "[]", '{"overlapc": "kept plans", "version": 1}', "{"])
def test_a_broken_file_is_replaced(tmp_path: Path, searched: list[int], text: str) -> None:
    cache = tmp_path / "costs.json"
    first = started(cache, profile="estimate")
    (path,) = kept(cache)
    path.write_text(text)
    assert [started(cache, profile="estimate") for _ in range(2)] == [first, first]
    assert len(searched) == 2
