"""Following a graph, against a search that looks again until nothing is new."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlapc.tools.reach import reached

Graph = dict[int, list[int | None]]
NODES = st.integers(0, 7)


@given(
    st.dictionaries(NODES, st.lists(NODES | st.none(), max_size=4)),
    st.lists(NODES | st.none(), max_size=3),
    st.sets(NODES, max_size=2),
)
def test_all_that_is_reached_once(graph: Graph, starts: list[int | None], but: set[int]) -> None:
    found = [*reached(starts, lambda node: graph.get(node, []), but)]
    expected = {node for node in starts if node is not None} - but
    while more := {n for node in expected for n in graph.get(node, [])} - expected - but - {None}:
        expected |= {node for node in more if node is not None}
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_node_comes_before_what_it_leads_to() -> None:
    graph = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": ["a"]}
    assert [*reached(["a"], graph.__getitem__)] == ["a", "b", "d", "c"]
