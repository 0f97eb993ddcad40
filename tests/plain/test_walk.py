"""`walk` against a recursive reading of the same objects."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from overlapc.state.walk import walk


def parts(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, dict):
        return [("/" + "k" * (1 + i), part) for i, part in enumerate(value.values())]
    if isinstance(value, list):
        return [("/" + "i" * (1 + i), part) for i, part in enumerate(value)]
    return None


TREES = st.recursive(
    st.integers(0, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=1), inner),
    max_leaves=20,
)


@given(TREES)
def test_it_comes_to_each_part_by_each_way(tree: Any) -> None:
    def read(way: str, value: Any) -> list[tuple[str, Any, bool]]:
        found = parts(value)
        inner = [one for step, part in found or () for one in read(way + step, part)]
        return [(way, value, found is not None), *inner]

    visited = list(walk([("x", tree)], parts))
    assert sorted(visited, key=str) == sorted(read("x", tree), key=str)


@given(TREES, st.integers(0, 4))
def test_what_is_deeper_is_not_looked_into(tree: Any, deepest: int) -> None:
    visited = list(walk([("", tree)], parts, deepest=deepest))
    steps = [way.count("/") for way, _, _ in visited]
    assert max(steps) <= deepest
    opened = [way.count("/") for way, _, is_opened in visited if is_opened]
    assert all(count < deepest for count in opened)


def test_a_shared_object_is_looked_into_once_and_a_circle_ends() -> None:
    shared: list[Any] = [1]
    circle: dict[str, Any] = {"one": shared, "other": shared}
    circle["self"] = circle
    visited = list(walk([("", circle)], parts))
    assert [id(value) for _, value, opened in visited if opened] == [id(circle), id(shared)]
    assert sum(value == 1 for _, value, _ in visited) == 1


def test_some_are_left_out() -> None:
    left_out = [1, 2]
    visited = list(walk([("", [left_out, 3])], parts, {id(left_out)}))
    assert [way for way, _, _ in visited] == ["", "/ii"]
