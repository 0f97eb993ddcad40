"""The program of the repeated block, whose size does not depend on the model's depth.

Equal blocks take equal choices. So the variables are counts: a storage of the block is kept in `n`
of the `L` blocks, and an op runs again in `m` of them. The program has the size of one block:

    n_s + m_maker >= L        for every storage that the block's backward reads
    n_s + m_maker >= m_o      for every storage that o reads
    memory    the blocks' kept storages for each microbatch in flight, and one block's all
    time      compute and recompute, and what is left of the windows when weight gradients and
              the recompute of all but one block have been put into them

The last n blocks keep the storage: their backward comes first, before there is a window to
recompute in. Recompute of one block may run in the windows of blocks whose backward comes before.

    Period      the classes of storages and ops, which the program counts
    Policy      the program
    Periodic    its solutions for one problem, remembered, and corrected by the peaks they have
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType

import highspy
import pulp

from overlapc.core.ir import Op, Plan, Problem
from overlapc.core.simulate import peak_bytes
from overlapc.solvers.choose.blocks import Repetition, repetition
from overlapc.solvers.choose.choice import Choice, Needs, on_demand
from overlapc.solvers.constants import EXPOSED, FEW, GAP, SECONDS, STEPS

# PuLP keeps the errors of solvers that are not there, and these the frames of its importer, with
# whatever model is in them.
for _module in [each for each in vars(pulp.apis).values() if isinstance(each, ModuleType)]:
    for _solver in [each for each in vars(_module).values() if isinstance(each, type)]:
        for _error in vars(_solver).values():
            if isinstance(_error, BaseException):
                _error.__traceback__ = _error.__context__ = None

_STEPS = 20  # steps of the search for the room with which a choice fits
# HiGHS's heuristics that solve programs of their own take half of the time.
_NEEDLESS = ("feasibility_jump", "rens", "rins")
_SOLVED = (
    highspy.HighsModelStatus.kOptimal,
    highspy.HighsModelStatus.kTimeLimit,
    highspy.HighsModelStatus.kIterationLimit,
)


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
    only the bytes that may be kept change. `quick`: it is solved less closely, and without
    heuristics that take half of the time. `reuses`: what is best of so many bytes, and takes fewer,
    is best of all between. With either another of nearly equal solutions may be found.
    """

    def __init__(
        self,
        problem: Problem,
        period: Period,
        totals: Totals,
        again: float = EXPOSED,
        quick: bool = False,
        reuses: bool = False,
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
        self._always = totals.bytes + period.bytes_of_block  # beside what is kept
        self._is_limited = problem.budget_bytes is not None
        self._bytes = [self._kept_bytes(problem, period, c) for c in range(len(keep))]
        self._all: float = sum(map(operator.mul, self._bytes, period.blocks))
        if self._is_limited:
            program += pulp.lpSum(map(operator.mul, self._bytes, keep)) <= 0
        self._reuses = reuses
        # least and most bytes -> what is best of them
        self._known: list[tuple[float, float, dict[int, int] | None]] = []
        engine = pulp.HiGHS(msg=False, threads=1, gapRel=GAP * (FEW if quick else 1))
        engine.createAndConfigureSolver(program)
        engine.buildSolverModel(program)
        self._highs = program.solverModel
        if quick:
            for heuristic in _NEEDLESS:
                self._highs.setOptionValue(f"mip_heuristic_run_{heuristic}", False)
        # A column in no row and without a cost is not in the program, and stays at zero.
        self._columns = [getattr(column, "index", None) for column in keep]

    def _kept_bytes(self, problem: Problem, period: Period, c: int) -> float:
        """What keeping a class in one block takes, for every microbatch in flight; the block at
        work has all of its storages, kept or not."""
        blocks = period.blocks[c]
        copies = problem.in_flight - (1 / blocks if blocks > 1 and c in period.wanted else 0)
        return period.bytes[c] / self._megabyte * copies

    def keep(self, most_bytes: int | None, steps: int = 0) -> dict[int, int] | None:
        """How many of each class to keep if all may take so many bytes; None if that is
        impossible. With `steps` bytes are rounded down to so many parts of what all take: then
        limits that are near each other have one solution."""
        limit = math.inf if most_bytes is None else (most_bytes - self._always) / self._megabyte
        if steps and self._all and math.isfinite(limit):
            limit = math.floor(limit / self._all * steps) * self._all / steps
        for least, most, known in self._known:
            if least <= limit <= most:
                return known
        found = self._solved(limit)
        least = limit
        if found is not None and self._reuses:
            least = sum(self._bytes[c] * count for c, count in found.items())
        self._known.append((least, limit, found))
        return found

    def step_of(self, most_bytes: int, steps: int) -> int:
        """The step that such a limit is rounded to."""
        share = (most_bytes - self._always) / self._megabyte / max(1, self._all)
        return max(-1, min(steps, math.floor(share * steps)))

    def bytes_of(self, step: int, steps: int) -> int:
        """A limit that is rounded to this step."""
        return math.ceil(self._always + (step + 1e-6) * self._all / steps * self._megabyte)

    def _solved(self, limit: float) -> dict[int, int] | None:
        highs = self._highs
        highs.clearSolver()  # so that a solution does not depend on earlier ones
        highs.setOptionValue("time_limit", highs.getRunTime() + SECONDS)
        if self._is_limited:
            highs.changeRowBounds(highs.getNumRow() - 1, -highspy.kHighsInf, limit)
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


class Periodic:
    """A problem's period, and what its programs said: whoever asks again need not solve again."""

    def __init__(
        self,
        problem: Problem,
        needs: Needs | None = None,
        period: Period | None = None,
        quick: bool = False,
        reuses: bool = False,
    ) -> None:
        self.problem, self.needs = problem, needs or Needs(problem.trace)
        self.period = period or Period(problem, self.needs, repeated_blocks(problem))
        totals, how = Totals.of(problem), {"quick": quick, "reuses": reuses}
        self._policy = cache(partial(Policy, problem, self.period, totals, **how))
        self.steps = 0
        self.least_room = cache(self._least_room)
        self.peak = cache(partial(_peak_on_demand, problem))  # of a choice

    def within(self, budget_bytes: int, steps: int = 0) -> Periodic:
        """The same with another limit, in so many steps, if any."""
        other = copy.copy(self)
        other.steps = steps
        other.problem = replace(self.problem, budget_bytes=budget_bytes)
        other.least_room = cache(other._least_room)
        return other

    @property
    def scans(self) -> bool:
        """Are rooms of whole steps tried in a row? Programs of gathered weights take so long that
        all limits have to share solutions."""
        return bool(self.steps and self.needs.gathered)

    def _least_room(self, again: float) -> int | None:
        """Correct the program's guess at memory: find the least room, maybe negative, with which
        its choice fits when recomputed on demand."""
        budget = self.problem.budget_bytes
        assert budget is not None

        def over(room: int) -> int | None:
            choice = self.choice_with(room, "", again)
            return None if choice is None else self.peak(choice) - budget

        least = most = -2 * self.period.bytes_of_block - budget // 20
        if self.scans:
            return self._scanned(self._policy(again), budget - least, over)
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

    def _scanned(
        self, policy: Policy, most_bytes: int, over: Callable[[int], int | None]
    ) -> int | None:
        """The same among rooms of whole steps: other limits have asked for most of them."""
        assert self.problem.budget_bytes is not None
        budget, fits = self.problem.budget_bytes, None
        coarse = min(self.steps, STEPS)
        for k in range(policy.step_of(most_bytes, coarse), -1, -1):
            room = budget - policy.bytes_of(k, coarse)
            excess = over(room)
            if excess is None:
                return None
            if excess <= 0:
                fits = room
                break
        if fits is None:
            return None
        finer = self.steps // coarse
        for i in range((k + 1) * finer - 1, k * finer, -1):
            room = budget - policy.bytes_of(i, self.steps)
            excess = over(room)
            if excess is not None and excess <= 0:
                return room
        return fits

    def choice_with(self, room: int, how: str = "", again: float = EXPOSED) -> Choice | None:
        """The best choice with which `room` bytes stay free; None if that is impossible."""
        budget = self.problem.budget_bytes
        most = None if budget is None else budget - room
        keep = self._policy(again).keep(most, self.steps)
        return None if keep is None else self.period.choice(self.needs, keep, how)


def repeated_blocks(problem: Problem) -> Repetition | None:
    """The repeated blocks of a problem, unless they are two: a program of both together is
    better."""
    repeated = repetition(problem.trace)
    return None if repeated is not None and repeated.count < FEW else repeated


def _peak_on_demand(problem: Problem, choice: Choice) -> int:
    """The peak of the choice when recomputed on demand."""
    return peak_bytes(problem, Plan("", "", choice.saved, on_demand(problem, choice)))
