"""Which storages to give up first: a path from saving everything down to saving the least.

Greedy by recompute time per byte freed. Giving up a storage may bring in a smaller one from
which it is made again (the input of a cast, of a gather, of a gelu).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from overlapc.ir import Op, Problem
from overlapc.solvers.choice import Needs

_CHAIN = 24  # how many ops of a recompute chain are looked at for something smaller to keep


@dataclass(frozen=True)
class _Move:
    """Give up `drop`, keep `instead` (or nothing), recompute `ops`."""

    ns: int
    bytes: int
    drop: str
    instead: str | None
    ops: frozenset[str]

    @property
    def price(self) -> float:
        return self.ns / self.bytes


def keep_path(problem: Problem, needs: Needs) -> list[frozenset[str]]:
    """Sets of kept storages, each a little smaller in bytes than the one before."""
    trace = problem.trace
    size = {value.storage: value.bytes for value in trace.values}
    kept = set(needs.storages)
    running: set[str] = set()  # ops recomputed so far
    readable: dict[str, list[str]] = {}
    for name in needs.read_by_backward:
        readable.setdefault(trace.value[name].storage, []).append(name)

    def cost(op: Op) -> int:
        found = problem.cost(op.name)
        return found.compute_ns + found.comm_ns

    def held(name: str, without: str, extra: str | None) -> bool:
        storage = trace.value[name].storage
        if storage in trace.resident:
            return True
        return storage == extra or (storage in kept and storage != without)

    def chain(storage: str, extra: str | None) -> set[str] | None:
        """The ops to run again if the storage goes, or None if one of them may not."""
        found: set[str] = set()
        front = list(readable.get(storage, ()))
        # What is already recomputed from this storage will need it, too.
        front += [
            name
            for value in by_storage[storage]
            for name in (value,)
            if any(user.name in running for user in trace.users[value])
        ]
        while front:
            name = front.pop()
            producer = trace.value[name].producer
            if not producer or producer in running or producer in found:
                continue
            op = trace.op[producer]
            if held(name, storage, extra) and op.role != "start":
                continue
            if not needs.may_rerun(op):
                if size[trace.value[name].storage] and trace.value[name].storage == storage:
                    return None
                continue  # saved whatever we choose
            found.add(producer)
            front += op.inputs
        return found

    by_storage: dict[str, list[str]] = {}
    for value in trace.values:
        by_storage.setdefault(value.storage, []).append(value.name)

    def best_move(storage: str) -> _Move | None:
        whole = chain(storage, None)
        if whole is None:
            return None
        moves = [
            _Move(
                sum(cost(trace.op[o]) for o in whole),
                size[storage],
                storage,
                None,
                frozenset(whole),
            )
        ]
        links = sorted(whole, key=lambda o: needs.position[o], reverse=True)[:_CHAIN]
        for name in links:
            for output in trace.op[name].outputs:
                other = trace.value[output].storage
                if other == storage or other in kept or trace.op[name].role == "start":
                    continue
                if 0 < size[other] < size[storage]:
                    part = chain(storage, other)
                    if part is not None and len(part) < len(whole):
                        ns = sum(cost(trace.op[o]) for o in part)
                        moves.append(
                            _Move(ns, size[storage] - size[other], storage, other, frozenset(part))
                        )
        return min(moves, key=lambda m: (m.price, m.drop))

    path = [frozenset(kept)]
    heap: list[tuple[float, int, str]] = []

    def push(storage: str) -> None:
        if size[storage] > 0:
            move = best_move(storage)
            if move is not None:
                first = min(needs.position[trace.value[n].producer] for n in by_storage[storage])
                heapq.heappush(heap, (move.price, first, storage))

    for storage in sorted(kept):
        push(storage)
    while heap:
        price, _, storage = heapq.heappop(heap)
        if storage not in kept:
            continue
        move = best_move(storage)
        if move is None:
            continue
        if move.price > price and heap and move.price > heap[0][0]:
            push(storage)
            continue
        kept.discard(storage)
        running |= move.ops
        if move.instead is not None:
            kept.add(move.instead)
            push(move.instead)
        path.append(frozenset(kept))
    return path
