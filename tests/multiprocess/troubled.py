"""A short training run of a few ranks to which one trouble comes: a rank is late, is killed, is
stopped for a while, leaves out a call, or raises. `run` says what each rank made of it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import overlapc
from examples.gpt.model import GPT, GPTConfig
from tests.multiprocess.mortal import caught
from tests.multiprocess.spawn import free_port, processes_that_know_torch

DOORS = ("optimize", "TrainStep", "Pipeline")
TROUBLES = ("late", "killed", "stopped", "in a barrier", "raises")
STEPS = 4  # the third brings another shape, which `optimize` and `TrainStep` plan anew
GROUP_S = 300.0  # the process group's own timeout
HANG_S = 480.0  # a rank that says nothing for so long hangs


@dataclass(frozen=True)
class Trouble:
    """What comes to which rank: before a step, or, for a kill, so many seconds into it."""

    kind: str
    door: str
    ranks: int
    victim: int
    step: int
    seconds: float = 0.0

    @staticmethod
    def drawn(kind: str, seed: int, longest_s: float = 30.0) -> Trouble:
        random = Random(f"{kind} {seed}")
        ranks = random.choices((2, 4, 8), (6, 3, 1))[0]
        seconds = random.uniform(*((0.0, 6.0) if kind == "killed" else (8.0, longest_s)))
        door, victim, step = random.choice(DOORS), random.randrange(ranks), random.randrange(STEPS)
        if kind == "in a barrier" and door != "Pipeline":
            step -= step % 2  # one that is planned: else the collectives are PyTorch's to watch
        return Trouble(kind, door, ranks, victim, step, seconds)


@dataclass(frozen=True)
class Outcome:
    """What a rank raised, if anything, how long after the trouble, and a sum of its gradients."""

    kind: str
    text: str
    seconds: float
    gradients: float


def run(trouble: Trouble) -> list[Outcome | None]:
    """The outcome on each rank; None for a killed one. No process is left behind."""
    server = processes_that_know_torch()
    folder = Path(tempfile.mkdtemp())
    port, pipes, processes = free_port(), [], []
    for rank in range(trouble.ranks):
        ours, theirs = server.Pipe(duplex=False)
        args = (theirs, port, trouble, rank, folder / "began")
        processes.append(server.Process(target=_main, args=args, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        if trouble.kind in ("killed", "stopped"):
            _strike(trouble, folder / "began", processes[trouble.victim].pid or 0)
        found = [_answer(pipe, rank, trouble) for rank, pipe in enumerate(pipes)]
        struck = float((folder / "began").read_text())
        if trouble.kind == "killed":
            struck += trouble.seconds
        return [None if f is None else Outcome(f[0], f[1], f[3] - struck, f[4]) for f in found]
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder)


def _answer(pipe: Connection, rank: int, trouble: Trouble) -> Any:
    assert wait([pipe], HANG_S), f"rank {rank} hangs: {trouble}"
    try:
        return pipe.recv()
    except EOFError:
        assert (trouble.kind, trouble.victim) == ("killed", rank), f"rank {rank} ended: {trouble}"
        return None


def _strike(trouble: Trouble, began: Path, process: int) -> None:
    until = time.monotonic() + HANG_S
    while not began.exists():
        assert time.monotonic() < until, f"the run does not begin: {trouble}"
        time.sleep(0.02)
    if trouble.kind == "killed":
        time.sleep(max(0.0, float(began.read_text()) + trouble.seconds - time.monotonic()))
        os.kill(process, signal.SIGKILL)
    else:
        os.kill(process, signal.SIGSTOP)
        time.sleep(trouble.seconds)
        os.kill(process, signal.SIGCONT)


def _main(pipe: Connection, port: int, trouble: Trouble, rank: int, began: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=trouble.ranks,
        timeout=timedelta(seconds=GROUP_S),
    )
    torch.manual_seed(0)
    step, parameters = {
        "optimize": _optimized,
        "TrainStep": _train_step,
        "Pipeline": _pipeline,
    }[trouble.door](rank, trouble.ranks)
    dist.barrier()

    def go() -> None:
        until = time.monotonic() + HANG_S / 2
        for number in range(STEPS if trouble.kind != "killed" else 1_000_000):
            if number == trouble.step and rank == trouble.victim:
                _trouble(trouble, began)
            step(min(number, STEPS - 1))
            assert time.monotonic() < until, "the kill does not come, or is not noticed"
        # A rank that is killed or raises between the last call and here.
        dist.barrier()

    kind, text, took_s, when = caught(go)
    total = sum(float(p.grad.double().sum()) for p in parameters() if p.grad is not None)
    pipe.send((kind, text, took_s, when, total))
    pipe.close()  # and this process ends, as a script does that raises


def _trouble(trouble: Trouble, began: Path) -> None:
    half = began.with_suffix(".half")
    half.write_text(str(time.monotonic()))
    half.rename(began)
    if trouble.kind == "late":
        time.sleep(trouble.seconds)
    elif trouble.kind == "in a barrier":
        dist.barrier()
    elif trouble.kind == "raises":
        raise ValueError("no such batch")


Made = tuple[Callable[[int], Any], Callable[[], Any]]


def _tokens(number: int) -> Any:
    return torch.zeros(1 + number // 2, 16, dtype=torch.long)


def _gpt(ranks: int) -> GPT:
    return GPT(GPTConfig(layers=1, width=32, heads=8, max_seq=16), dist.group.WORLD)


def _optimized(_rank: int, ranks: int) -> Made:
    model: Any = overlapc.optimize(_gpt(ranks), profile=_profile(ranks), solver="heu")
    return (lambda n: model(_tokens(n), _tokens(n)).backward()), model.parameters


def _train_step(_rank: int, ranks: int) -> Made:
    step = overlapc.TrainStep(_gpt(ranks), profile=_profile(ranks), solver="heu")
    return (lambda n: step([(_tokens(n), _tokens(n))] * 3)), step.model.parameters


def _pipeline(rank: int, ranks: int) -> Made:
    stage, last = _stage(rank), rank == ranks - 1
    pipeline = overlapc.Pipeline(
        {rank: stage}, "1f1b", 4, loss=_square if last else None, profile=_profile(ranks)
    )
    batch = [torch.ones(2, 8)] * 4
    return (lambda _: pipeline([] if rank else batch, batch if last else [])), stage.parameters


def _stage(rank: int) -> Any:
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))


def _square(result: Any, target: Any) -> Any:
    return (result - target).square().mean()


def _profile(ranks: int) -> str:
    return "measure" if ranks == 2 else "estimate"
