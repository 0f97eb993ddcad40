"""A rank is killed or stopped at a random moment: the others get an error in time.

    python -c "from tests.multiprocess.test_mortality import main; main(100)"

makes so many attempts and says how long they took. While ranks trace, measure, solve or place rows
a `RankError` is promised within 10 s; that a rank is missing which was struck before it began is
told 7 s after the others began to wait for it. During a step the process group speaks: of a killed
rank at once, of a stopped one when its own timeout has passed.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlapc
from examples.gpt.model import GPT, GPTConfig
from overlapc.errors import RankError
from tests.multiprocess import test_pipeline
from tests.multiprocess.mortal import caught
from tests.multiprocess.spawn import free_port, processes_that_know_torch

pytestmark = pytest.mark.multiprocess

PROMISED_S = 10.0
GROUP_S = 8.0  # the process group's own timeout, which rules while a step runs
TRACING_S = 10.0  # that a rank takes at most before it waits for another
PATIENCE_S = 60.0
# In names of files that run only while ranks plan: tracing, measuring, solving, agreeing.
PLANNING = ("_dynamo/convert_frame", "overlapc/planning/", "overlapc/profiler/", "/exchange.py")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


def _gpt() -> GPT:
    return GPT(GPTConfig(layers=2, width=16, heads=2, max_seq=16), dist.group.WORLD)


def _optimized(_rank: int) -> Callable[[], Any]:
    model: Any = overlapc.optimize(_gpt())
    tokens = torch.zeros(1, 16, dtype=torch.long)
    return lambda: model(tokens, tokens).backward()


def _train_step(_rank: int) -> Callable[[], Any]:
    step = overlapc.TrainStep(_gpt())
    tokens = torch.zeros(1, 16, dtype=torch.long)
    return lambda: step([(tokens, tokens)] * 3)


def _pipeline(rank: int) -> Callable[[], Any]:
    pipeline = overlapc.Pipeline(
        {rank: test_pipeline.make(rank, 1, 0.0)},
        "1f1b",
        4,
        loss=test_pipeline.loss if rank else None,
    )
    inputs, targets = test_pipeline.batches(4)
    return lambda: pipeline([] if rank else inputs, targets if rank else [])


DOORS = {"optimize": _optimized, "TrainStep": _train_step, "Pipeline": _pipeline}


def _main(pipe: Connection, port: int, door: str, rank: int, stderr: Path) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=GROUP_S),
    )
    dist.all_reduce(torch.ones(1))
    step = DOORS[door](rank)
    pipe.send("planning")

    def go() -> None:
        try:
            step()
        except Exception as error:
            if not _of_planning(error):
                pipe.send("stepping")
            raise
        pipe.send("stepping")
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            step()

    pipe.send(caught(go))


def _of_planning(error: BaseException) -> bool:
    """Was the error raised while a plan was made, not while the first step ran by it?"""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(part in file for file in files for part in PLANNING)


@dataclasses.dataclass
class Outcome:
    """What became of the rank that was left."""

    door: str
    how: str
    victim: int
    moment: str  # planning, stepping, or not begun
    kind: str
    text: str
    seconds: float


def attempt(door: str, seed: int) -> Outcome:
    """Strike one of two ranks once; how the other one took it. No process is left behind."""
    random = Random(seed)
    victim, how = random.randrange(2), random.choice(SIGNALS)
    after_s, while_planning = random.random(), random.random() < 0.7
    server = processes_that_know_torch()
    port, pipes, processes = free_port(), [], []
    folder = Path(tempfile.mkdtemp())
    stderrs = [folder / str(rank) for rank in range(2)]
    for rank in range(2):
        ours, theirs = server.Pipe(duplex=False)
        args = (theirs, port, door, rank, stderrs[rank])
        processes.append(server.Process(target=_main, args=args))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        said = [_next(pipe) for pipe in pipes]
        assert said == ["planning"] * 2, said
        if while_planning:
            wait([pipes[victim]], timeout=6.0 * after_s)
        else:
            assert _next(pipes[victim]) == "stepping"
            time.sleep(after_s)
        os.kill(processes[victim].pid or 0, how)
        struck = time.monotonic()
        moment = "planning"
        answer: Any = _next(pipes[1 - victim])
        if answer == "stepping":
            moment = "stepping"
            answer = _next(pipes[1 - victim])
        kind, text, _, when = answer
        if "has not begun" in text:
            moment = "not begun"
        processes[1 - victim].join(10)
        assert processes[1 - victim].exitcode is not None, "the survivor does not end"
        return Outcome(door, how.name, victim, moment, kind, text, when - struck)
    except EOFError:
        processes[1 - victim].join(10)
        code = processes[1 - victim].exitcode
        last = stderrs[1 - victim].read_text()[-5000:]
        raise AssertionError(f"the survivor ended with {code} and no word:\n{last}") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
            assert not Path(f"/proc/{process.pid}").exists()
        shutil.rmtree(folder)


def _next(pipe: Connection) -> Any:
    assert pipe.poll(2 * PATIENCE_S), "a hang"
    return pipe.recv()


def assert_kept(outcome: Outcome) -> None:
    """What is promised: always an error, and in time."""
    assert outcome.kind, outcome
    if outcome.moment != "stepping":
        assert outcome.kind == RankError.__name__, outcome
    own_s = {"planning": 0.0, "not begun": TRACING_S, "stepping": GROUP_S}[outcome.moment]
    assert outcome.seconds <= PROMISED_S + own_s, outcome


@pytest.mark.parametrize("door", DOORS)
def test_a_rank_is_struck_at_a_random_moment(door: str) -> None:
    assert_kept(attempt(door, seed=len(door)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_a_rank_is_struck_at_any_moment(seed: int) -> None:
    assert_kept(attempt(sorted(DOORS)[seed % 3], seed))


def main(count: int, first: int = 0) -> None:
    found: list[Outcome] = []
    for seed in range(first, first + count):
        outcome = attempt(sorted(DOORS)[seed % 3], seed)
        found.append(outcome)
        print(outcome, flush=True)
    for moment in ("planning", "not begun", "stepping"):
        for how in ("SIGKILL", "SIGSTOP"):
            mine = [o for o in found if (o.moment, o.how) == (moment, how)]
            if mine:
                seconds = sorted(o.seconds for o in mine)
                kinds = dict(Counter(o.kind for o in mine))
                print(
                    f"{moment}, {how}: {len(mine)} attempts, median "
                    f"{statistics.median(seconds):.1f} s, longest {seconds[-1]:.1f} s, {kinds}"
                )
