"""What a rank makes of the others' answers: dead, disagreeing or late."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from overlapc.ranks import lookout
from overlapc.ranks.board import History
from overlapc.ranks.lookout import Lookout
from overlapc.ranks.presence import ENDED

G = "one group"


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of rank 0, which waits in step 2 of round 5, and has done its part in step 1."""
    monkeypatch.setattr(lookout, "APART_S", 0.3)
    monkeypatch.setattr(lookout, "issued_by_name", lambda: {"0": 7, "tp": 3})
    presence: Any = SimpleNamespace(gone={}, answers={}, unreached={}, ask=lambda ranks: None)
    presence.lost = lambda ranks: next((f"rank {r} is gone" for r in presence.gone), None)
    history = History(done={G: (5, 1)}, calls=3)
    return SimpleNamespace(presence=presence, history=history)


def answer(**said: Any) -> dict[str, Any]:
    idle = {"phase": "", "waits": [], "step": None, "done": {}, "number": 1, "raised": [0, ""]}
    place = {"at": "train.py:9 in main", "within": "", "group": None, "computes": False}
    return {**idle, **place, "issued": {"0": 7, "tp": 3}, **said}


def judged(board: Any, answers: dict[int, Any], missing: list[int], seconds: float = 0.8) -> str:
    """What rank 0 finds in so long a wait."""
    watch = Lookout(board, 0, "waits for a plan", place=2)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for rank, said in answers.items():
            board.presence.answers[rank] = time.monotonic(), said
        if (found := watch.hopeless(missing, [0, *missing])) is not None:
            return found
        time.sleep(0.02)
    return "late"


def test_a_rank_in_its_script_is_late(board: Any) -> None:
    assert judged(board, {1: answer()}, [1]) == "late"
    assert judged(board, {}, [1]) == "late"  # it does not answer at all


def test_a_rank_that_has_ended(board: Any) -> None:
    board.presence.gone[1] = ENDED
    assert judged(board, {}, [1]).startswith("rank 1 is gone; expected it to live")


def test_a_rank_that_waits_for_this_one_in_another_group(board: Any) -> None:
    other = answer(phase="waiting", waits=[0], step=["another", 0, 0])
    found = judged(board, {1: other}, [1])
    assert "rank 0 and rank 1 wait for each other at different steps" in found


def test_a_circle_of_three(board: Any) -> None:
    second = answer(phase="waiting", waits=[2], step=["another", 0, 0])
    third = answer(phase="waiting", waits=[0], step=["third", 0, 0])
    found = judged(board, {1: second, 2: third}, [1])
    assert "rank 0 and rank 1 and rank 2 wait for each other" in found


@pytest.mark.parametrize("step", [[G, 5, 1], [G, 5, 0], [G, 4, 9]])
def test_a_rank_that_has_not_yet_seen_this_ones_answer_is_late(board: Any, step: Any) -> None:
    """It may run seldom, on a busy machine."""
    assert judged(board, {1: answer(phase="waiting", waits=[0], step=step)}, [1]) == "late"


def test_a_rank_that_has_done_its_part_for_a_third(board: Any) -> None:
    second = answer(phase="waiting", waits=[2], step=["another", 0, 0])
    third = answer(phase="waiting", waits=[0], step=["third", 0, 0], done={"another": [0, 0]})
    assert "rank 2" not in judged(board, {1: second, 2: third}, [1])


def test_a_rank_that_raised_in_this_call_alone(board: Any) -> None:
    assert "rank 1 has raised ValueError: x" in judged(
        board, {1: answer(raised=[3, "ValueError: x"])}, [1]
    )
    assert judged(board, {1: answer(raised=[2, "ValueError: x"])}, [1]) == "late"
    planning = answer(raised=[3, "ValueError: x"], phase="tracing")  # it tries again
    assert judged(board, {1: planning}, [1]) == "late"


def test_a_collective_that_needs_this_rank(board: Any) -> None:
    barrier = answer(within="barrier", group="0", issued={"0": 8})
    assert "it waits in barrier of process group '0'" in judged(board, {1: barrier}, [1])
    graph = answer(computes=True, issued={"0": 7, "tp": 4})
    assert "it waits in a collective of process group 'tp'" in judged(board, {1: graph}, [1])


def test_a_collective_that_does_not(board: Any) -> None:
    for said in (
        answer(within="barrier", group="0", issued={"0": 7}),  # this rank has issued it, too
        answer(within="barrier", group="elsewhere", issued={"elsewhere": 8}),
        answer(within="recv", group=None, issued={"0": 8}),
        answer(computes=False, issued={"0": 8}),  # messages to one rank count as well, over gloo
        answer(computes=True, issued={"0": 6}),
    ):
        assert judged(board, {1: said}, [1]) == "late"


def test_a_place_that_changes_is_no_standstill(board: Any) -> None:
    watch = Lookout(board, 0, "waits for a plan", place=2)
    until, turn = time.monotonic() + 0.8, 0
    while time.monotonic() < until:
        turn += 1
        said = answer(computes=True, issued={"0": 7 + turn})
        board.presence.answers[1] = time.monotonic(), said
        assert watch.hopeless([1], [0, 1]) is None
        time.sleep(0.05)


def test_the_line_that_says_who_is_late(
    board: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lookout, "LATE_S", 0.2)
    watch = Lookout(board, 0, "is at the step 'plan' of planning")
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        board.presence.answers[1] = time.monotonic(), answer()
        watch.hopeless([1, 2], [0, 1, 2])
        time.sleep(0.02)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "waits for rank 1 (its script, train.py:9 in main), rank 2 (it has not used" in said
