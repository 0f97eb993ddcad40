"""Schedules: their text, what makes them legal, and closed forms of bubble and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from overlapc.core.errors import FileError, InvalidSchedule, OptionError
from overlapc.core.pipeline import StageCost, describe, simulate_pipeline
from overlapc.core.schedule import (
    Action,
    Schedule,
    check_schedule,
    format_schedule,
    from_csv,
    parse_schedule,
    steps_of,
    to_csv,
)
from overlapc.solvers.pipeline.schedules import (
    SCHEDULES,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)

SIZES = [(1, 1), (1, 4), (2, 2), (2, 6), (3, 3), (4, 4), (4, 12), (4, 8), (8, 16)]


def all_schedules():
    for ranks, microbatches in SIZES:
        for name in SCHEDULES:
            yield make_schedule(name, ranks, microbatches)
    for ranks, microbatches in [(2, 1), (4, 1), (4, 2), (4, 7)]:
        for name in SCHEDULES:
            if name != "interleaved":
                yield make_schedule(name, ranks, microbatches)


@pytest.mark.parametrize("schedule", list(all_schedules()), ids=lambda s: f"{s.name}-{len(s.rows)}")
def test_schedules_are_legal_and_their_texts_round_trip(schedule):
    check_schedule(schedule)
    assert parse_schedule(format_schedule(schedule)) == schedule
    assert from_csv(to_csv(schedule), schedule.name) == schedule


def with_merged_recompute(schedule: Schedule) -> Schedule:
    """R right before the backward, merged with the forward before it where there is one."""
    rows = []
    for row in schedule.rows:
        steps = []
        for (action,) in row:
            if action.kind in "BI":
                again = Action(action.stage, "R", action.microbatch)
                if steps and steps[-1][0].kind == "F" and len(steps[-1]) == 1:
                    mine = Action(action.stage, "F", action.microbatch)
                    if steps[-1][0] != mine:
                        steps[-1] = (*steps[-1], again)
                    else:
                        steps.append((again,))
                else:
                    steps.append((again,))
            steps.append((action,))
        rows.append(tuple(steps))
    return Schedule(schedule.name + "+R", tuple(rows))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "merged"])
def test_recompute_and_merged_steps(name):
    plain = make_schedule(name, 4, 8)
    schedule = with_merged_recompute(plain)
    check_schedule(schedule)
    assert "(" in format_schedule(schedule)
    assert parse_schedule(format_schedule(schedule)) == schedule
    assert from_csv(to_csv(schedule), name) == replace(plain, name=name)  # PyTorch knows no R


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_closed_forms_of_bubble_and_memory(ranks, microbatches):
    f, i, w, saved = 3, 4, 2, 10
    cost = StageCost(f, i, w, saved=saved)
    work = microbatches * (f + i + w)
    bubble = (ranks - 1) * (f + i + w)
    for schedule in (gpipe(ranks, microbatches), one_f_one_b(ranks, microbatches)):
        timeline = simulate_pipeline(schedule, [cost] * ranks)
        assert timeline.step_ns == work + bubble
        assert all(timeline.bubble_ns(r) == bubble for r in range(ranks))
    assert timeline.peak_bytes == tuple(min(microbatches, ranks - r) * saved for r in range(ranks))
    peaks = simulate_pipeline(gpipe(ranks, microbatches), [cost] * ranks).peak_bytes
    assert peaks == (microbatches * saved,) * ranks


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [
    (2, 2, 4), (4, 2, 8), (4, 3, 12), (2, 5, 2), (4, 4, 8), (4, 8, 16), (8, 3, 16)
])  # fmt: skip
def test_interleaving_divides_the_bubble(ranks, chunks, microbatches):
    f, b = 6, 12
    cost = StageCost(f, b, 0, saved=1)
    timeline = simulate_pipeline(interleaved(ranks, chunks, microbatches), [cost] * ranks * chunks)
    assert timeline.step_ns == microbatches * chunks * (f + b) + (ranks - 1) * (f + b)
    most = 2 * (ranks - 1) + (chunks - 1) * ranks + 1  # of the first rank, Megatron's count
    most = min(most, microbatches * chunks)
    assert timeline.peak_bytes[0] == most


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_zero_bubble_leaves_a_third_in_the_memory_of_1f1b(ranks, microbatches):
    """With equal parts, (p - 1)(F + I - W) of 1F1B's (p - 1)(F + I + W)."""
    cost = StageCost(1, 1, 1, saved=1, for_weights=1)
    timeline = simulate_pipeline(zero_bubble(ranks, microbatches), [cost] * ranks)
    assert timeline.step_ns == 3 * microbatches + (ranks - 1)
    assert max(timeline.peak_bytes) <= ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_the_v_is_quicker_in_the_same_memory(ranks, microbatches):
    cost = StageCost(1, 1, 1, saved=1, for_weights=1)
    h1 = simulate_pipeline(zero_bubble(ranks, microbatches), [cost] * ranks)
    v = simulate_pipeline(zero_bubble_v(ranks, microbatches), [cost] * 2 * ranks)
    assert v.step_ns <= 2 * h1.step_ns  # a stage of the V is half of one of H1
    assert max(v.peak_bytes) <= 2 * ranks


def test_transfers_take_their_lane_in_order():
    cost = StageCost(10, 10, 0, sent_ns=25)
    timeline = simulate_pipeline(gpipe(2, 3), [cost, cost])
    forward = [t for t in timeline.transfers if t.to == 1]
    assert [(t.start_ns, t.end_ns) for t in forward] == [(10, 35), (35, 60), (60, 85)]
    assert timeline.ran[1][0].start_ns == 35


def test_recompute_in_a_stall_costs_nothing():
    """Rank 0 of two waits for its gradient: what it recomputes meanwhile is free."""
    row0 = [Action(0, "F", 0), Action(0, "R", 0), Action(0, "B", 0)]
    row1 = [Action(1, "F", 0), Action(1, "B", 0)]
    early = Schedule("early", (steps_of(row0), steps_of(row1)))
    cost = StageCost(10, 20, 0, recompute_ns=9, saved=1, remade=5)
    first = simulate_pipeline(early, [cost, replace(cost, recompute_ns=0)])
    assert first.step_ns == 10 + 30 + 20
    assert first.peak_bytes == (6, 1)


def damaged(schedule: Schedule, rng: Random) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    row = rng.choice([r for r in rows if len(r) > 1])
    i, j = sorted(rng.sample(range(len(row)), 2))
    how = rng.choice(["drop", "twice", "swap"])
    if how == "drop":
        del row[i]
    elif how == "twice":
        row.insert(j, row[i])
    else:
        row[i], row[j] = row[j], row[i]
    return Schedule(schedule.name, tuple(map(tuple, rows)))


def runs_to_its_end(schedule: Schedule, rng: Random) -> bool:
    """By playing it, ranks in random turns."""
    at = [0] * len(schedule.rows)
    done = set()
    for _ in range(10_000):
        able = [
            r
            for r, row in enumerate(schedule.rows)
            if at[r] < len(row) and all(n in done for a in row[at[r]] for n in schedule.needs(a))
        ]
        if not able:
            break
        rank = rng.choice(able)
        done |= set(schedule.rows[rank][at[rank]])
        at[rank] += 1
    return all(a == len(row) for a, row in zip(at, schedule.rows, strict=True))


def test_damaged_schedules_are_refused_or_run():
    refused = 0
    for seed in range(2000):
        rng = Random(seed)
        schedule = damaged(make_schedule(rng.choice(SCHEDULES), 4, 4), rng)
        try:
            check_schedule(schedule)
        except InvalidSchedule:
            refused += 1
        else:
            assert runs_to_its_end(schedule, rng)
    assert refused > 1000


def test_a_deadlock_is_shown_where_it_stands():
    rows = (steps_of([Action(0, "B", 0), Action(0, "F", 0)]), steps_of([Action(1, "F", 0)]))
    with pytest.raises(InvalidSchedule, match="has F, expected F and either B"):
        check_schedule(Schedule("bad", rows))
    rows = (rows[0], steps_of([Action(1, "F", 0), Action(1, "B", 0)]))
    with pytest.raises(InvalidSchedule, match=r"rank 0 at 0B0 waits for 0F0(.|\n)*>0B0<"):
        check_schedule(Schedule("bad", rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing"),
        ("overlapc schedule 9\nname x\n", "expected 'overlapc schedule 1'"),
        ("overlapc schedule 1\n", "expected `name"),
        ("overlapc schedule 1\nname x\nrank 1: 0F0\n", "expected `rank 0:"),
        ("overlapc schedule 1\nname x\nrank 0: 0Q0\n", "found '0Q0'"),
        ("overlapc schedule 1\nname x\nrank 0: (0F0;)\n", r"found '\(0F0;\)'"),
    ],
)
def test_bad_texts_say_what_was_expected(text, message):
    with pytest.raises(FileError, match=message):
        parse_schedule(text)


def test_bad_sizes_are_refused():
    with pytest.raises(OptionError, match="at least 1"):
        gpipe(0, 4)
    with pytest.raises(OptionError, match="a multiple of 4"):
        interleaved(4, 2, 6)
    with pytest.raises(OptionError, match="expected one of gpipe"):
        make_schedule("magic", 2, 2)


def test_the_picture_has_all_ranks():
    timeline = simulate_pipeline(one_f_one_b(8, 64), [StageCost(1, 1, 1, sent_ns=1)] * 8)
    assert "rank 7" in describe(timeline)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (4, 4), (4, 12)])
def test_merged_steps_wait_for_nothing_in_the_steady_state(ranks, microbatches):
    """With equal stages every rank begins its n-th merged step when the one before ended."""
    schedule = make_schedule("merged", ranks, microbatches)
    timeline = simulate_pipeline(schedule, [StageCost(1, 1, 1)] * ranks, lambda step: 3)
    for row in timeline.ran:
        merged = [ran for ran in row if len(ran.step) == 2]
        assert all(a.end_ns == b.start_ns for a, b in pairwise(merged))
        assert len(merged) == max(0, microbatches - (2 * (ranks - 1 - row[0].rank) + 1))
    assert [schedule.lag(stage) for stage in range(ranks)] == [
        lag if (lag := 2 * (ranks - 1 - stage) + 1) < microbatches else 0 for stage in range(ranks)
    ]


def test_recompute_within_an_action_is_in_the_peak():
    """R on its own, or as a part of I or of B: the same is held."""
    cost = StageCost(
        1, 1, 1, recompute_ns=1, saved=10, remade=100, for_weights=5,
        working=(("F", 10), ("R", 100), ("I", 10), ("W", 7), ("B", 110)),
    )  # fmt: skip
    peaks = []
    for kinds in ("FRIW", "FIW", "FB", "FRB"):
        row = steps_of([Action(0, kind, 0) for kind in kinds])
        peaks.append(simulate_pipeline(Schedule("mine", (row,)), [cost]).peak_bytes)
    assert peaks == [(120,)] * 4
