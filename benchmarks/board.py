"""How long 1,024 ranks take to agree on a plan of 1 MB, and to learn that some of them have died.

    PYTHONPATH=. python benchmarks/board.py [--ranks 1024] [--processes 512]

Each process but the leader's stands for a few ranks, each with its own connections and threads,
over loopback and one store, as on a cluster. Prints seconds (*measured*; all ranks share the
machine's cores): of each of three plans, since a process that was just forked copies its memory as
it runs for the first time. With many ranks in a process one measures Python's lock: in 16 processes
the same takes 40 s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

MEGABYTE = 1 << 20
LIMIT_S = 300.0
ROUNDS = 3


def stands_for(pipe: Connection, port: int, ranks: int, mine: range) -> None:
    import torch.distributed as dist

    from overlapc.ranks.board import board_of
    from overlapc.ranks.exchange import Exchange

    every = range(ranks)
    # In a prefix, as the store of a process group is, and cloned, as a board clones it.
    first = dist.PrefixStore("of", dist.TCPStore("127.0.0.1", port))
    stores = {rank: first.clone() for rank in mine}

    def on_all(work: Any) -> list[Any]:
        found: dict[int, Any] = {}

        def one(rank: int) -> None:
            found[rank] = work(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in mine]

    def agree(rank: int) -> int:
        text = "x" * MEGABYTE
        with Exchange(every, store=stores[rank], rank=rank) as exchange:
            exchange.agree("trace", "8c1f", "use one model")
            return len(exchange.broadcast("plan", lambda: text))

    def learn(rank: int) -> float:
        presence, until = board_of(stores[rank], rank, every).presence, time.monotonic() + LIMIT_S
        while presence.lost(every) is None and time.monotonic() < until:
            time.sleep(0.25)
        return time.monotonic()

    on_all(lambda rank: board_of(stores[rank], rank, every).presence.begin(LIMIT_S))
    pipe.send("here")
    for _ in range(ROUNDS):
        assert pipe.recv() == "agree"
        assert on_all(agree) == [MEGABYTE] * len(mine)
        pipe.send(time.monotonic())
    assert pipe.recv() == "learn"
    pipe.send(max(on_all(learn)))
    pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=512)
    args = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a warning would look up the name of each client
    import torch.distributed as dist

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    share = -(-(args.ranks - 1) // args.processes)
    begins = [0, *range(1, args.ranks, share), args.ranks]
    context, pipes, processes = multiprocessing.get_context("forkserver"), [], []
    context.set_forkserver_preload(["overlapc.ranks.exchange"])
    for first, behind in pairwise(begins):
        ours, theirs = context.Pipe()
        mine = range(first, behind)
        job = context.Process(target=stands_for, args=(theirs, store.port, args.ranks, mine))
        job.start()
        pipes.append(ours)
        processes.append(job)
    try:
        for pipe in pipes:
            assert pipe.recv() == "here"
        agreed_s = []
        for _ in range(ROUNDS):
            began = time.monotonic()
            for pipe in pipes:
                pipe.send("agree")
            agreed_s.append(round(max(pipe.recv() for pipe in pipes) - began, 2))
        for pipe in pipes:
            pipe.send("learn")
        time.sleep(1.0)
        killed = time.monotonic()
        os.kill(processes[-1].pid or 0, signal.SIGKILL)
        known_s = max(pipe.recv() for pipe in pipes[:-1]) - killed
    finally:
        for job in processes:
            job.kill()
            job.join()
    said = {"ranks": args.ranks, "processes": args.processes, "cores": os.cpu_count()}
    print(json.dumps({**said, "agreed_s": agreed_s, "death_known_s": round(known_s, 2)}))


if __name__ == "__main__":
    main()
