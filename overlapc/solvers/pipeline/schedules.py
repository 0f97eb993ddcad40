"""Known schedules of pipelines, for any number of ranks and microbatches.

gpipe             all forwards, then all backwards
one_f_one_b       as many forwards as ranks follow, then forward and backward in turn
interleaved       the same with several stages on every rank, dealt round (Megatron's)
zero_bubble       backward in two: weight gradients fill what would be bubbles, in no more memory
                  than 1F1B's first rank has (ZB-H1)
merged            1F1B with more microbatches under way, so that each forward can be merged with a
                  backward: neither waits for the other on any rank
zero_bubble_v     zero_bubble with two stages on a rank, placed as a V, so that the last stage is on
                  the first rank

`zero_bubble_v` is made by going through time with unit costs: a rank takes input gradients if it
can, else a forward if memory allows, else a weight gradient that waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlapc.core.errors import OptionError
from overlapc.core.schedule import Action, Schedule, Step, steps_of


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    _positive(ranks, microbatches)
    rows = [
        [Action(r, kind, m) for kind in "FB" for m in range(microbatches)] for r in range(ranks)
    ]
    return Schedule("gpipe", tuple(map(steps_of, rows)))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """As many forwards as ranks follow, then one forward and one backward in turn."""
    _positive(ranks, microbatches)
    rows = []
    for r in range(ranks):
        order = [Action(r, "F", m) for m in range(microbatches)]
        back = [Action(r, "B", m) for m in range(microbatches)]
        rows.append(_in_turn(order, back, warmup=ranks - 1 - r))
    return Schedule("1f1b", tuple(map(steps_of, rows)))


def interleaved(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Stage c * ranks + r is chunk c of rank r. Microbatches come in groups of `ranks`."""
    _positive(ranks, chunks, microbatches)
    if chunks > 1 and microbatches % ranks:
        raise OptionError(
            f"interleaved 1F1B: {microbatches} microbatches on {ranks} ranks; expected a multiple "
            f"of {ranks}"
        )
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    rows = []
    for r in range(ranks):
        order, back = [], []
        for k in range(microbatches * chunks):
            group, within = divmod(k, ranks * chunks)
            chunk, place = divmod(within, ranks)
            microbatch = group * ranks + place
            order.append(Action(chunk * ranks + r, "F", microbatch))
            back.append(Action((chunks - 1 - chunk) * ranks + r, "B", microbatch))
        warmup = 2 * (ranks - 1 - r) + (chunks - 1) * ranks
        rows.append(_in_turn(order, back, warmup))
    return Schedule("interleaved", tuple(map(steps_of, rows)))


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs its weight gradients r microbatches late, so that input gradients, for which
    earlier ranks wait, come early."""
    _positive(ranks, microbatches)
    rows = []
    for r in range(ranks):
        row: list[Action] = []
        late = 0
        for action in one_f_one_b(ranks, microbatches).rows[r]:
            (one,) = action
            if one.kind == "F":
                row.append(one)
                continue
            row.append(Action(r, "I", one.microbatch))
            if one.microbatch >= r:
                row.append(Action(r, "W", late))
                late += 1
        rows.append(row + [Action(r, "W", m) for m in range(late, microbatches)])
    return Schedule("zero-bubble", tuple(map(steps_of, rows)))


def zero_bubble_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages on each rank in a V: the last stage is on the first rank."""
    _positive(ranks, microbatches)
    placement = {stage: min(stage, 2 * ranks - 1 - stage) for stage in range(2 * ranks)}
    return _through_time("zero-bubble-v", placement, microbatches, limit=2 * ranks)


def merged(ranks: int, microbatches: int) -> Schedule:
    """A microbatch takes one step on every rank on its way forward, and one on its way back."""
    _positive(ranks, microbatches)
    rows = []
    for r in range(ranks):
        lag = min(microbatches, 2 * (ranks - 1 - r) + 1)
        row: list[Step] = [(Action(r, "F", m),) for m in range(lag)]
        row += [(Action(r, "F", m), Action(r, "B", m - lag)) for m in range(lag, microbatches)]
        row += [(Action(r, "B", m),) for m in range(microbatches - lag, microbatches)]
        rows.append(tuple(row))
    return Schedule("merged", tuple(rows))


def in_pairs(microbatches: int) -> Schedule:
    """One rank, on which the first two forwards run as one, the last two backwards as well, and
    each other forward with the backward of the microbatch two before."""
    _positive(1, microbatches - 1)
    forwards, backwards = ([Action(0, kind, m) for m in range(microbatches)] for kind in "FB")
    row: list[Step] = [tuple(forwards[:2])]
    row += zip(forwards[2:], backwards, strict=False)
    row.append(tuple(backwards[-2:]))
    return Schedule("in pairs", (tuple(row),))


def _in_turn(order: Sequence[Action], back: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then what is left."""
    warmup = min(warmup, len(order))
    row = list(order[:warmup])
    for forward, backward in zip(order[warmup:], back, strict=False):
        row += [forward, backward]
    return row + list(back[len(order) - warmup :])


def _through_time(
    name: str, placement: Mapping[int, int], microbatches: int, limit: int
) -> Schedule:
    """Make rows in rounds, where every action takes one unit. A rank holds at most `limit`
    microbatches of each of its stages until their weight gradients are done; forwards that could
    block later stages wait."""
    stages, ranks = len(placement), max(placement.values()) + 1
    mine = [[s for s in placement if placement[s] == r] for r in range(ranks)]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done = _Done(stages, microbatches)
    while sum(map(len, rows)) < 3 * stages * microbatches:
        chosen = [done.next_of(mine[r], limit) for r in range(ranks)]
        if not any(chosen):
            raise OptionError(f"{name}: {limit} microbatches are too few to be held at a time")
        for row, action in zip(rows, chosen, strict=True):
            if action is not None:
                if action.kind == "I":
                    done.inputs_at[action.stage].append(len(row))
                row.append(action)
                done.count[action.kind][action.stage] += 1
    return Schedule(name, tuple(map(steps_of, rows)))


class _Done:
    """How many microbatches of each stage are done, by kind; every kind takes them in order."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self.stages, self.microbatches = stages, microbatches
        self.count = {kind: [0] * stages for kind in "FIW"}
        self.inputs_at: list[list[int]] = [[] for _ in range(stages)]  # place in its row of each I

    def next_of(self, mine: Sequence[int], limit: int) -> Action | None:
        """What a rank runs now: input gradients of its last stage first, then forwards of its last
        stage, then the weight gradient that has waited longest."""
        forwards, inputs, weights = (self.count[kind] for kind in "FIW")
        for stage in reversed(mine):
            m = inputs[stage]
            last = stage == self.stages - 1
            if m < forwards[stage] and (last or m < inputs[stage + 1]):
                return Action(stage, "I", m)
        held = sum(forwards[s] - weights[s] for s in mine)
        for stage in reversed(mine):
            m = forwards[stage]
            # A later stage of this rank needs room for the microbatches in flight in an earlier
            # one.
            others = [s for s in mine if s > stage]
            later = sum(m - forwards[s] for s in others)
            ready = m < (self.microbatches if stage == 0 else forwards[stage - 1])
            if ready and held + later + bool(others) < limit:
                return Action(stage, "F", m)
        waiting = [s for s in mine if weights[s] < inputs[s]]
        if not waiting:
            return None
        stage = min(waiting, key=lambda s: self.inputs_at[s][weights[s]])
        return Action(stage, "W", weights[stage])


def _positive(*numbers: int) -> None:
    if min(numbers) < 1:
        raise OptionError(f"a pipeline of {numbers}: expected numbers of at least 1")


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "merged")


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Make a schedule by its name."""
    if name == "gpipe":
        return gpipe(ranks, microbatches)
    if name == "1f1b":
        return one_f_one_b(ranks, microbatches)
    if name == "interleaved":
        return interleaved(ranks, chunks, microbatches)
    if name == "zero-bubble":
        return zero_bubble(ranks, microbatches)
    if name == "zero-bubble-v":
        return zero_bubble_v(ranks, microbatches)
    if name == "merged":
        return merged(ranks, microbatches)
    raise OptionError(f"schedule={name!r}: expected one of {', '.join(SCHEDULES)}")
