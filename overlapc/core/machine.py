"""The machine decides when work begins and ends: lanes run tasks in order, and slow each other.

    task    so many nanoseconds of work on one lane; it begins when the task before it on that lane
            and all tasks that it comes *after* have ended
    lane    compute of a rank, traffic of a process group, or the link between two ranks

The launch of a collective is a task on each rank's compute lane. The collective is a task on its
group's lane, after the launches of all ranks. A wait is a task of a rank after the collective.
Compute and traffic that run at the same time slow each other by so many thousandths
(`ir.Slowdown`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice

from overlapc.core.ir import Slowdown


@dataclass(slots=True)
class Tasks:
    """The work of all lanes. Tasks are numbered lane by lane."""

    work_ns: Sequence[int]  # by task: how long it takes where nothing slows it
    first: Sequence[int]  # by lane: its first task; at the end, how many tasks there are
    after: Mapping[int, Sequence[int]]  # task -> tasks of other lanes that end before it begins
    computes: int = 0  # the first so many lanes compute; the others are traffic
    slowdown: Slowdown = Slowdown()  # noqa: RUF009 (frozen)


@dataclass(slots=True)
class Lane:
    """A lane that gets its tasks one by one; it agrees with `run` where nothing slows anything."""

    free_ns: int = 0  # when the last of them ends

    def put(self, work_ns: int, ready_ns: int = 0) -> int:
        """Append a task that may begin at `ready_ns`; return when it ends."""
        self.free_ns = max(self.free_ns, ready_ns) + work_ns
        return self.free_ns


def timed(tasks: Tasks) -> tuple[list[int], list[int], list[int]]:
    """Run the tasks; return when each begins and ends, and all in the order in which they end."""
    end_ns, ended = run(tasks, whole=True)
    begin_ns = [0, *end_ns]  # one too many, for lanes without tasks
    for task in tasks.first:
        begin_ns[task] = 0
    for task, needs in tasks.after.items():
        begin_ns[task] = max(begin_ns[task], *[end_ns[need] for need in needs])
    return begin_ns, end_ns, ended


def run(tasks: Tasks, whole: bool = False) -> tuple[list[int], list[int]]:
    """Run the tasks; return when each ends, and all tasks in the order of their ends (and lanes).

    A task that waits for something that never ends has the end -1 and is not in that order. Unless
    `whole`, tasks that are in no wait and not the last of their lane may be missing, too.
    """
    work_ns, first, after, slowdown = tasks.work_ns, tasks.first, tasks.after, tasks.slowdown
    steady = slowdown.compute_permille == slowdown.comm_permille == 1000
    lanes = len(first) - 1
    end_ns = [-1] * first[-1]
    ended: list[int] = []
    places = _places(tasks)
    head = list(first[:-1])  # by lane: the task that it runs or that is next
    left = [0] * lanes  # by lane: work of the task that it runs, where lanes slow each other
    waiting: dict[int, list[int]] = {}  # task -> lanes that wait for it
    running: list[int] = []  # lanes that slow each other, sorted
    ends: list[tuple[int, int]] = []  # a heap of (when its task ends, lane that nothing slows)
    due, again = list(range(lanes)), list[int]()  # heaps of lanes that go on now, the others later
    over = [False] * lanes  # has a lane that is due just run its head?
    now = 0
    while True:
        while due or again:
            if not due:
                due, again = again, due
            lane = heappop(due)
            task, last, ends_now = head[lane], first[lane + 1], over[lane]
            while True:
                if ends_now:
                    end_ns[task] = now
                    ended.append(task)
                    if task in waiting:
                        for other in waiting.pop(task):
                            heappush(due if other > lane else again, other)
                    task += 1
                over[lane] = ends_now = False
                if task == last:
                    break
                if task in after:
                    for need in after[task]:
                        if end_ns[need] < 0:
                            waiting.setdefault(need, []).append(lane)
                            break
                    else:
                        need = -1
                    if need >= 0:
                        break
                ends_now = True
                if not work_ns[task]:
                    continue
                if ends or running or due or again:
                    over[lane] = True
                    if steady:
                        heappush(ends, (now + work_ns[task], lane))
                    else:
                        left[lane] = work_ns[task]
                        insort(running, lane)
                    break
                # No other lane runs: this one goes on alone up to the next place that matters.
                stop = places[bisect_right(places, task)]
                if whole:
                    alone = accumulate(work_ns[task:stop], initial=now)
                    end_ns[task:stop] = islice(alone, 1, None)
                    ended += range(task, stop - 1)
                now += sum(work_ns[task:stop])
                task = stop - 1
            head[lane] = task
        if ends:
            now = ends[0][0]
            while ends and ends[0][0] == now:
                due.append(heappop(ends)[1])
        elif running:
            now += _progress(tasks, running, left)
            due = [lane for lane in running if left[lane] <= 0]
            for lane in due:
                running.remove(lane)
        else:
            return end_ns, ended


def _places(tasks: Tasks) -> list[int]:
    """The tasks before which a lane that runs alone must stop and look at other lanes, sorted: a
    task that waits, a task behind one that others wait for, a lane's first task."""
    places = {*tasks.first, *tasks.after}
    for needs in tasks.after.values():
        for need in needs:
            places.add(need + 1)
    return sorted(places)


def _progress(tasks: Tasks, running: Sequence[int], left: list[int]) -> int:
    """Run these lanes, sorted, until the first of them ends its task; returns the time that took.
    The work `left` of each lane stays a whole number, so each call rounds."""
    computes, slow, drag = tasks.computes, 1000, 1000
    if running[0] < computes <= running[-1]:
        slow, drag = tasks.slowdown.compute_permille, tasks.slowdown.comm_permille
    step = -1
    for lane in running:
        takes = -(-left[lane] * (slow if lane < computes else drag) // 1000)
        if takes < step or step < 0:
            step = takes
    for lane in running:
        left[lane] -= step * 1000 // (slow if lane < computes else drag)
    return step
