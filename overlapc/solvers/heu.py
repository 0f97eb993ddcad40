"""HEU: one integer program for the repeated block, whose size does not depend on the model's depth.

Equal blocks take equal choices. So the variables are counts: a storage of the block is kept in `n`
of the `L` blocks, and an op runs again in `m` of them. The program has the size of one block:

    n_s + m_maker >= L        for every storage that the block's backward reads
    n_s + m_maker >= m_o      for every storage that o reads
    memory    the blocks' kept storages for each microbatch in flight, and one block's all
    time      compute and recompute, and what is left of the windows when weight gradients and
              the recompute of all but one block have been put into them

The last n blocks keep the storage: their backward comes first, before there is a window to
recompute in. Recompute of one block may run in the windows of blocks whose backward comes before.
List scheduling then orders the whole trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import highspy
import pulp

from overlapc.ir import Op, Plan, Problem
from overlapc.simulate import peak_bytes, step_ns
from overlapc.solvers.blocks import Repetition, repetition
from overlapc.solvers.choice import Choice, Needs, choice_of, on_demand, plan_of
from overlapc.solvers.constants import EXPOSED, FEW, GAP, LARGE, OVERSHOOT, ROOM, SECONDS
from overlapc.solvers.filling import PASSES, Taste, filled
from overlapc.solvers.listing import Style, list_schedule
from overlapc.solvers.overlap import steady_plans
from overlapc.solvers.work import NEVER, backward_work

_STYLES = (Style(OVERSHOOT**2, False), Style(OVERSHOOT, True))
_STEPS = 20  # steps of the search for the room with which a choice fits
_AGAIN = (EXPOSED, EXPOSED / 5)  # assumed shares of recomputed collectives that stay exposed
_ROOMS = (0.0, 0.015, ROOM**2)  # shares of the budget that are left to the schedule
_MUCH_ROOM = (ROOM / 2, ROOM, 2 * ROOM)  # the same where nothing would be recomputed
_PASSES = (PASSES[0], PASSES[3])
_SOLVED = (
    highspy.HighsModelStatus.kOptimal,
    highspy.HighsModelStatus.kTimeLimit,
    highspy.HighsModelStatus.kIterationLimit,
)
_RECOMPUTE_ONLY = ((Taste(True, True, "R"),), (Taste(True, False, "R"),))


class Period:
    """The classes of storages and ops that a trace's program has. Each storage and op outside of
    the repeated blocks is a class of its own, of one block."""

    def __init__(
        self, problem: Problem, needs: Needs, repeated: Repetition | None, blocks: int = 1
    ) -> None:
        trace = problem.trace
        self.name = "whole" if repeated is None else f"period of {blocks}"
        self.class_of: dict[str, int] = {}  # storage -> its class
        self.block_of: dict[str, int] = {}  # storage -> which block of its class it is in
        self.blocks: list[int] = []  # by class: how many blocks have it
        self.bytes: list[int] = []
        self.maker: dict[int, Op] = {}  # class -> its maker, if that may run again
        size = {value.storage: value.bytes for value in trace.values}
        numbers: dict[tuple[int, int], int] = {}  # op of the first block, output -> class
        members: list[Op] = []
        for i, op in enumerate(trace.ops):
            if not op.is_forward:
                continue
            block, kind, count = _place(i, repeated)
            # The last block but one stands for all blocks, since both its neighbours equal it.
            stands = block == max(0, count - 2)
            if stands:
                members.append(op)
            for k, name in enumerate(op.outputs):
                storage = trace.value[name].storage
                if storage in trace.resident or storage in self.class_of:
                    continue
                number = numbers.setdefault((kind, k), len(numbers))
                if number == len(self.blocks):
                    self.blocks.append(count)
                    self.bytes.append(size[storage])
                self.class_of[storage], self.block_of[storage] = number, block
                if stands and needs.may_rerun(op):
                    self.maker[number] = op
        wanted = {trace.value[name].storage for name in needs.read_by_backward}
        self.wanted = sorted({self.class_of[s] for s in wanted if s in self.class_of})
        self.reads: dict[str, list[int]] = {}  # op that stands for its class -> classes it reads
        for op in members:
            read = {trace.value[name].storage for name in op.inputs}
            self.reads[op.name] = sorted({self.class_of[s] for s in read if s in self.class_of})

    @property
    def bytes_of_block(self) -> int:
        """Bytes that the backward of one block reads."""
        return sum(self.bytes[c] for c in self.wanted if self.blocks[c] > 1)

    def choice(self, needs: Needs, keep: dict[int, int], how: str = "") -> Choice:
        kept = (
            storage
            for storage, number in self.class_of.items()
            if self.block_of[storage] >= self.blocks[number] - keep.get(number, 0)
        )
        return needs.complete(frozenset(kept), self.name + how)


def _place(i: int, repeated: Repetition | None) -> tuple[int, int, int]:
    """(block, the same op of the first block, number of blocks) of a forward op."""
    if repeated is None or not repeated.first <= i < repeated.end:
        return 0, i, 1
    block, kind = divmod(i - repeated.first, repeated.length)
    return block, repeated.first + kind, repeated.count


@dataclass(frozen=True)
class Totals:
    """Times of the backward, and bytes that no choice changes."""

    compute: int
    comm: int
    weights: int
    bytes: int

    @staticmethod
    def of(problem: Problem) -> Totals:
        trace = problem.trace
        compute = comm = weights = 0
        for op in trace.ops:
            if not op.is_forward:
                cost = problem.cost(op.name)
                compute += cost.compute_ns
                comm += cost.comm_ns
                weights += cost.compute_ns if op.role == "weight_grad" else 0
        size = {value.storage: value.bytes for value in trace.values}
        made = {
            trace.value[name].storage for op in trace.ops if op.is_forward for name in op.outputs
        }
        lasting = {trace.value[name].storage for name in trace.outputs} & made - trace.resident
        there = sum(size[s] for s in lasting) + problem.resident_bytes
        return Totals(compute, comm, weights, there)


class Policy:
    """The program of one period: in how many of its blocks to keep each class of storage.

    `again` is the assumed share of a recomputed collective that stays exposed. Between solutions
    only the bytes that must stay free change.
    """

    def __init__(
        self, problem: Problem, period: Period, totals: Totals, again: float = EXPOSED
    ) -> None:
        unit = max(1, totals.compute) / 1000
        program = pulp.LpProblem("period", pulp.LpMinimize)
        keep = [
            program.add_variable(f"keep{c}", 0, blocks, pulp.LpInteger)
            for c, blocks in enumerate(period.blocks)
        ]
        run = {
            op.name: program.add_variable(f"run{c}", 0, period.blocks[c], pulp.LpInteger)
            for c, op in period.maker.items()
        }
        idle = program.add_variable("idle", 0)
        compute, hidden, comm = [], [], []
        for c, op in {op.name: (c, op) for c, op in period.maker.items()}.values():
            cost, blocks = problem.cost(op.name), period.blocks[c]
            compute.append(cost.compute_ns / unit * run[op.name])
            comm.append(cost.comm_ns / unit * run[op.name])
            # Recompute of the last block has no window before it.
            hidden.append(cost.compute_ns / unit * (blocks - 1) / blocks * run[op.name])
        # Between equals, prefer less recompute and fewer recomputed collectives.
        program += pulp.lpSum(compute) * 1.02 + pulp.lpSum(comm) * again + idle
        gap = (totals.comm - totals.weights) / unit
        program += idle + pulp.lpSum(hidden) - 2 * again * pulp.lpSum(comm) >= gap
        for c in period.wanted:
            terms = keep[c] + run[period.maker[c].name] if c in period.maker else keep[c] + 0
            program += terms >= period.blocks[c]
        for c, op in period.maker.items():
            for given in period.reads[op.name]:
                alike = period.blocks[given] == period.blocks[c]
                if alike and given in period.maker and period.maker[given].name != op.name:
                    program += keep[given] + run[period.maker[given].name] >= run[op.name]
        self._megabyte = max([1, *period.bytes]) / 100
        self._left: int | None = None  # bytes of the budget that are left to kept storages
        if problem.budget_bytes is not None:
            self._left = problem.budget_bytes - totals.bytes - period.bytes_of_block
            program += pulp.lpSum(self._kept(problem, period, keep)) <= 0
        engine = pulp.HiGHS(msg=False, threads=1, gapRel=GAP)
        engine.createAndConfigureSolver(program)
        engine.buildSolverModel(program)
        self._highs = program.solverModel
        # A column in no row and without a cost is not in the program, and stays at zero.
        self._columns = [getattr(column, "index", None) for column in keep]

    def _kept(self, problem: Problem, period: Period, keep: list[Any]) -> Iterator[Any]:
        """Bytes that are kept, for every microbatch in flight; the block at work has all of its
        storages, kept or not."""
        for c, column in enumerate(keep):
            blocks = period.blocks[c]
            copies = problem.in_flight - (1 / blocks if blocks > 1 and c in period.wanted else 0)
            yield period.bytes[c] / self._megabyte * copies * column

    def keep(self, room: int) -> dict[int, int] | None:
        """How many of each class to keep if `room` bytes must stay free; None if that is
        impossible."""
        highs = self._highs
        highs.clearSolver()  # so that a solution does not depend on earlier ones
        highs.setOptionValue("time_limit", highs.getRunTime() + SECONDS)
        if self._left is not None:
            row = highs.getNumRow() - 1
            highs.changeRowBounds(row, -highspy.kHighsInf, (self._left - room) / self._megabyte)
        highs.run()
        if not math.isfinite(highs.getInfo().objective_function_value):
            return None
        if highs.getModelStatus() not in _SOLVED:
            return None
        columns = highs.getSolution().col_value
        return {
            c: 0 if index is None else round(columns[index])
            for c, index in enumerate(self._columns)
        }


def heu_plans(
    problem: Problem,
    needs: Needs | None = None,
    defer: bool = True,
    thorough: bool = True,
    grouped: bool | None = None,
    hopeful: bool = True,
    worth: Callable[[Choice], bool] = lambda _: True,
) -> Iterator[Plan]:
    """Plans of the choice that just fits when recomputed on demand.

    `thorough` adds choices that leave the schedule more room and, where even blocks' inputs are
    recomputed, choices of periods of several blocks; `grouped` adds the latter always (True) or
    never (False). Without `defer` weight gradients keep their place. Without `hopeful` no simple
    plan fits: then many periods are tried only if a choice that ignores blocks fits. Choices that
    are not `worth` it are not scheduled.
    """
    needs = needs or Needs(problem.trace)
    if len(problem.phases) != 2:
        return
    repeated = _repeated(problem)
    totals = Totals.of(problem)
    period = Period(problem, needs, repeated)
    budget = problem.budget_bytes
    if budget is None:
        choice = period.choice(needs, Policy(problem, period, totals).keep(0) or {})
        if worth(choice):
            yield from schedules(problem, choice, None, defer)
        return
    tried: list[Choice] = []
    for choice in _fitting(problem, period, needs, totals, budget, thorough, _AGAIN):
        if choice not in tried:
            tried.append(choice)
            if worth(choice):
                yield from schedules(problem, choice, budget, defer)
    scarce = not tried or not _keeps_borders(problem, tried[0], repeated)
    if not (thorough and scarce if grouped is None else grouped):
        return
    others = _steady(problem, needs, budget)
    if not hopeful and not tried and not others:
        return
    for several in _groups(problem, needs, repeated, whole=not tried):
        for choice in _fitting(problem, several, needs, totals, budget, thorough, _AGAIN[:1]):
            if choice not in tried:
                tried.append(choice)
                others.append(choice)
    yield from _most_promising(problem, others, budget, defer, worth)


def thrifty(problem: Problem, needs: Needs, leaving: Sequence[float]) -> Iterator[Choice]:
    """The period's choices that leave these shares of the budget to other microbatches or slices
    held at the same time."""
    budget = problem.budget_bytes
    if budget is None:
        return
    period = Period(problem, needs, _repeated(problem))
    program = cache(Policy(problem, period, Totals.of(problem)).keep)
    room = _least_room(problem, period, needs, program, budget)
    if room is None:
        return
    for share in leaving:
        for _ in range(FEW):
            if (keep := program(room)) is None:
                return
            choice = period.choice(needs, keep, f" leaving {share:g}")
            over = _peak(problem, choice) - int(budget * (1 - share))
            if over <= 0:
                yield choice
                break
            room += over


def _repeated(problem: Problem) -> Repetition | None:
    """The repeated blocks of a problem, unless they are two: a program of both together is
    better."""
    repeated = repetition(problem.trace)
    return None if repeated is not None and repeated.count < FEW else repeated


def _groups(
    problem: Problem, needs: Needs, repeated: Repetition | None, whole: bool
) -> Iterator[Period]:
    """Periods of several blocks, and the whole trace as one if that is not too long or `whole`."""
    for blocks in range(2, FEW + 2):
        if repeated is not None and 2 * blocks <= repeated.count:
            yield Period(problem, needs, repeated.grouped(blocks), blocks)
    if repeated is not None and (whole or len(problem.trace.ops) <= LARGE):
        yield Period(problem, needs, None)


def _fitting(
    problem: Problem,
    period: Period,
    needs: Needs,
    totals: Totals,
    budget: int,
    thorough: bool,
    shares: Sequence[float],
) -> Iterator[Choice]:
    """The period's choices that just fit, and if `thorough` choices that leave more room, for each
    assumed share of exposed recomputed collectives."""
    exposed = any(problem.cost(op.name).comm_ns for op in period.maker.values())
    for again in shares if thorough and exposed else shares[:1]:
        program = cache(Policy(problem, period, totals, again).keep)
        room = _least_room(problem, period, needs, program, budget)
        if room is None:
            return
        rooms = list(_ROOMS if thorough else _ROOMS[:1])
        for i, more in enumerate(rooms):
            if (keep := program(room + int(budget * more))) is None:
                continue
            choice = period.choice(needs, keep, f" exposing {again:g} room {more:g}")
            yield choice
            if thorough and i == 0 and not choice.recomputed:
                rooms += _MUCH_ROOM  # recompute then hides what late weight gradients cannot


def _most_promising(
    problem: Problem,
    choices: Sequence[Choice],
    budget: int,
    defer: bool,
    worth: Callable[[Choice], bool],
) -> Iterator[Plan]:
    """All schedules of the few choices whose first schedules are fastest."""
    found: list[tuple[int, int, Iterator[Plan]]] = []
    for choice in choices:
        more = schedules(problem, choice, budget, defer)
        first = list(islice(more, 2))
        yield from first
        found.append((min(step_ns(problem, plan) for plan in first), len(found), more))
    for _, i, more in sorted(found)[: 2 * FEW]:
        if worth(choices[i]):
            yield from more


def _keeps_borders(problem: Problem, choice: Choice, repeated: Repetition | None) -> bool:
    """Does every block's recompute begin with what the block before passes on?"""
    if repeated is None:
        return False
    saved = {problem.trace.value[name].storage for name in choice.saved}
    return saved.issuperset(frozenset().union(*repeated.handed_on))


def _steady(problem: Problem, needs: Needs, budget: int) -> list[Choice]:
    """The fastest that fit among choices that ignore blocks and times."""
    fitting: list[tuple[int, int, Choice]] = []
    for plan in steady_plans(problem):
        if peak_bytes(problem, plan) <= budget:
            fitting.append((step_ns(problem, plan), len(fitting), choice_of(problem, plan)))
    return [choice for *_, choice in sorted(fitting)[:FEW]]


def _least_room(
    problem: Problem,
    period: Period,
    needs: Needs,
    program: Callable[[int], dict[int, int] | None],
    budget: int,
) -> int | None:
    """Correct the program's guess at memory: find the least room, maybe negative, with which its
    choice fits when recomputed on demand."""

    def over(room: int) -> int | None:
        if (keep := program(room)) is None:
            return None
        return _peak(problem, period.choice(needs, keep)) - budget

    least = most = -2 * period.bytes_of_block - budget // 20
    for _ in range(_STEPS):
        excess = over(most)
        if excess is None or excess <= 0:
            break
        least, most = most, most + max(excess // 2, budget // 50)
    found = None if excess is None or excess > 0 else most
    for _ in range(FEW if least < most else 0):
        middle = (least + most) // 2
        excess = over(middle)
        if excess is not None and excess > 0:
            least = middle
        else:  # it fits, or no choice leaves so much room
            most = middle
            found = found if excess is None else middle
    return found


def _peak(problem: Problem, choice: Choice) -> int:
    """The peak of the choice when recomputed on demand."""
    return peak_bytes(problem, Plan("", "", choice.saved, on_demand(problem, choice)))


def ordered(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Plans that keep what this one keeps, in several orders."""
    if problem.trace.lanes and len(problem.phases) == 2:
        yield from schedules(problem, choice_of(problem, plan), problem.budget_bytes)


def schedules(
    problem: Problem, choice: Choice, budget: int | None, defer: bool = True
) -> Iterator[Plan]:
    """Plans of one choice in several orders; some may exceed the budget."""
    plain = tuple(op.name for op in problem.trace.ops if op.is_forward)
    plan = plan_of(problem, choice, "heu")
    yield plan
    large = len(problem.trace.ops) > LARGE
    limit = NEVER if budget is None else budget
    if peak_bytes(problem, plan) <= limit:
        work = backward_work(problem, choice)
        for passes in _PASSES if defer else _RECOMPUTE_ONLY:
            yield filled(plan, work, limit, passes)
    for late in (True, False) if defer else ():
        work = backward_work(problem, choice, late)
        for permille in (1000,) if large else (1000, 930):
            for style in _STYLES[:1] if large else _STYLES:
                backward = list_schedule(work, limit * permille // 1000, style)
                how = str(style) if late else f"{style}, in place"
                yield plan_of(problem, choice, "heu", plain + backward, how)
