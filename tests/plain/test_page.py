"""The page of a search: whole, self-contained, with the figures of the JSON it was made from."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from overlapc.core.errors import FileError
from overlapc.report import charts
from overlapc.report.page import GLOSSARY, layout_name, page
from tests.plain.html_checks import check_page

GOLDEN = Path(__file__).parent / "golden" / "search.json"
FULL = ("exposed TP", "all-to-all", "DP", "p2p")


@pytest.fixture
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


def equal(cells: list[str], head: list[str], found: dict[str, Any]) -> None:
    """A row of a table says what the JSON says, rounded."""
    told = dict(zip(head[1:], cells[1:], strict=True))
    step, exposed = found["step_ns"], found["exposed_ns"]
    shares = {"MFU": found["mfu"], "bubble": found["bubble"], "gap": found["gap"]}
    for name, kind in zip(FULL, ("tp", "all-to-all", "dp", "p2p"), strict=True):
        shares[name] = exposed.get(kind, 0) / step
    shares["recompute"] = found["recompute_ns"] / step
    shares["hidden"] = found["recompute_hidden_ns"] / step
    for name, share in shares.items():
        assert float(told[name].removesuffix("%")) / 100 == pytest.approx(share, abs=0.00051)
    assert float(told["step ms"]) == pytest.approx(step / 1e6, rel=1e-3)
    assert float(told["peak GB"]) == pytest.approx(max(found["peak_bytes"]) / 1e9, rel=0.01)
    assert told["tokens/s"] == f"{found['tokens_per_s']:,.0f}"


def test_its_figures_are_those_of_the_json(document: dict[str, Any]) -> None:
    found = check_page(page(document))
    head, *rows = found.tables["This layout, planned by"]
    for cells, one in zip(rows, document["compared"], strict=True):
        assert cells[0] == one["solver"]
        equal(cells, head, one)
    head, *rows = found.tables["Each on its own best layout"]
    everyone = [document["best"], *document["rivals"]]
    for cells, one in zip(rows, everyone, strict=True):
        assert cells[0] == f"{one['solver']}: {layout_name(one)}"
        equal(cells, head, one)
    head, *rows = found.tables[f"The fastest layouts of {len(document['tried'])} planned"]
    fitting = [one for one in document["tried"] if not one["smallest_bytes"]]
    for cells, one in zip(rows, fitting, strict=True):
        assert cells[0] == layout_name(one)
        equal(cells, head, one)


def test_it_has_all_its_parts(document: dict[str, Any]) -> None:
    text = page(document)
    assert document["command"] in text
    ranks = document["pipeline"]["ranks"]
    for rank, row in enumerate(ranks):
        assert text.count(f">rank {rank}<small>stage") == 2  # what it does, what it holds
        assert text.count(f'title="rank {rank}: ') == len(row["steps"])
        mine = [one for one in document["pipeline"]["reductions"] if one[1] == rank]
        assert text.count(f"over the replicas of rank {rank}, ") == len(mine)
    assert all(f"<dt>{word}</dt>" in text for word in GLOSSARY)
    assert 'class="axis"' in text
    assert "Et*2|t*2L" in text


def test_it_says_what_the_text_says(document: dict[str, Any]) -> None:
    """Risk, interval, guesses and arguments: page and text have them from one place."""
    lines = (GOLDEN.parent / "verdict.txt").read_text()
    said = document["answer"]
    shown = check_page(page(document)).text
    for key in ("headline", "recompute", "within", "memory", "why_none"):
        assert said[key]
        assert said[key] in lines
        assert said[key] in shown
    assert document["counted"] in lines
    assert document["counted"] in shown
    assert "15 of 45 figures of the hardware are guesses" in lines
    assert "figures of the hardware are guesses" in shown
    started = {"script": "pretrain_gpt.py", "arguments": "--num-layers 4", "why_none": ""}
    ours = {"ours": "with overlapc: faster", "ours_script": "-m", "ours_arguments": "--ours"}
    document["answer"] = {**said, **started, **ours}
    shown = check_page(page(document)).text
    for line in ("pretrain_gpt.py --num-layers 4", "with overlapc: faster", "-m --ours"):
        assert line in shown
    document["ours"]["found"] = {**document["best"], "solver": "opt", "step_ns": 5}
    _, *rows = check_page(page(document)).tables["Each on its own best layout"]
    assert rows[-1][0] == f"opt: {layout_name(document['best'])}"


def test_the_pieces_of_a_bar_are_the_step(document: dict[str, Any]) -> None:
    every = [*document["tried"], *document["compared"], *document["rivals"]]
    for found in every:
        if not found["smallest_bytes"]:
            assert sum(charts.parts_of(found).values()) == pytest.approx(found["step_ns"], abs=2)
            widths = re.findall(r"width:([\d.]+)%", charts.bar(found, 2 * found["step_ns"]))
            assert sum(map(float, widths)) == pytest.approx(50, abs=0.01)


def test_memory_is_held_while_a_rank_stands_still(document: dict[str, Any]) -> None:
    """Between its forward and its backward the first rank has what the forward saved."""
    first = document["pipeline"]["ranks"][0]
    static = document["static_bytes"][0]
    assert static < first["held"][0] <= first["memory"][0]
    drawn = charts.memory(document["pipeline"], ["a", "b"], [static] * 2, [1, 1], 200_000_000)
    points = re.findall(r'points="0,100 (.*?) 1000,100"', drawn)[0]
    heights = {}
    for x, y in (map(float, point.split(",")) for point in points.split()):
        heights.setdefault(x, []).append(100 - y)
    (_, _, end), (_, start, _) = first["steps"][0], first["steps"][1]
    step = document["pipeline"]["step_ns"]
    still = [heights[round(at / step * 1000, 1)] for at in (end, start)]
    assert still[0][-1] == still[1][0] > static / 200_000_000 / 1.04 * 100


def test_names_cannot_break_out(document: dict[str, Any]) -> None:
    document["model"]["name"] = document["command"] = document["explain"] = "</pre><script>x"
    text = page(document)
    check_page(text)
    assert "<script>x" not in text


@pytest.mark.parametrize("change", ["no winner", "interrupted", "one stage"])
def test_other_ends_of_a_search(change: str, document: dict[str, Any]) -> None:
    if change == "one stage":
        for found in (document["best"], *document["tried"], *document["rivals"]):
            found["layout"].update(pp=1, dp=4, schedule="1f1b")
        document["pipeline"] = None
    else:
        document["best"] = document["pipeline"] = None
        document["interrupted"] = change == "interrupted"
        document["tried"] = [dict(found, smallest_bytes=10**9) for found in document["tried"]]
    said = {
        "no winner": "Nothing fits",
        "interrupted": "Interrupted before",
        "one stage": "Side by",
    }
    assert said[change] in page(document)


def test_garbled_json_is_an_error(document: dict[str, Any]) -> None:
    for key in document:
        broken = deepcopy(document)
        del broken[key]
        if key in ("fixed", "solver", "certain", "public", "pruned", "seconds", "within"):
            continue  # not on the page, or in its words
        with pytest.raises(FileError, match="expected"):
            page(broken)


@pytest.mark.parametrize(("least", "most"), [(0, 1.2), (0, 3780.5), (61.2, 73.6), (5, 5.0001)])
def test_ticks_are_round_and_within(least: float, most: float) -> None:
    found = charts.ticks(least, most)
    assert 3 <= len(found) <= 8
    assert all(least - 1e-6 <= at <= most + 1e-6 for at, _ in found)
    assert len({shown for _, shown in found}) == len(found)
