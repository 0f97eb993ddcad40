"""A slow link on one machine: two network namespaces, a veth pair between them, a token bucket
at each end. Real processes, real gloo, real bytes; only the bandwidth is chosen.

    python benchmarks/lab.py --rate 400,800,none -- benchmarks/link_bench.py --model gpt

runs the script as two ranks, one in each namespace and on a core of its own, once for each rate.
`none` leaves the link unshaped: the control, where overlap has little to win. Needs root and
iproute2; where that is not permitted the lab says so and ends with status 0.

    with ShapedPair(400) as pair:
        pair.run(["script.py"], {"SOME": "variable"})
        pair.set_rate(None)

Only addresses inside the namespaces it made are used, and the namespaces are always removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO, TypeVar

from overlapc.core.files import write_file

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
ADDRESSES = ("10.213.0.1", "10.213.0.2")
PORT = "29511"
# Bursts of 96-128k are right: smaller ones split packets and cost processor time.
TOKEN_BUCKET = ("burst", "96k", "limit", "4mb")
# TCP inside, whatever the machine's own is. With BBR, which now and then stops sending to probe the
# link, one all-reduce of 1 MB in ten took 30 to 86 ms at 400 Mbit/s instead of 22.
CONGESTION = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"


class NotPermitted(Exception):
    """This machine or user cannot make network namespaces; the message says what is missing."""


class ShapedPair:
    """Two namespaces joined by a link of `rate_mbit` (None: unshaped), as a context manager."""

    def __init__(self, rate_mbit: float | None) -> None:
        self.rate_mbit = rate_mbit
        self.names = tuple(f"overlapc-{os.getpid()}-{rank}" for rank in range(2))
        self.links = tuple(f"oc{os.getpid()}-{rank}" for rank in range(2))

    def __enter__(self) -> ShapedPair:
        # A SIGTERM then ends the program by an exception, and so through `close`.
        self._previous = signal.signal(signal.SIGTERM, _raise_exit)
        try:
            require_permission()
            for name in self.names:
                _command("ip", "netns", "add", name)
                _command("ip", "netns", "exec", name, "sh", "-c", CONGESTION)
            first, second = self.links
            made = ("type", "veth", "peer", "name", second, "netns", self.names[1])
            _command("ip", "link", "add", first, "netns", self.names[0], *made)
            for rank, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
                _command("ip", "-n", name, "addr", "add", f"{ADDRESSES[rank]}/24", "dev", link)
                _command("ip", "-n", name, "link", "set", link, "up")
                _command("ip", "-n", name, "link", "set", "lo", "up")
            self.set_rate(self.rate_mbit)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces, and with them the link; whatever is already gone stays gone."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        signal.signal(signal.SIGTERM, self._previous)

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the link's bandwidth, in both directions; None lets it run free."""
        for name, link in zip(self.names, self.links, strict=True):
            qdisc = ("tc", "-n", name, "qdisc")
            if rate_mbit is not None:
                rate = ("tbf", "rate", f"{rate_mbit:g}mbit", *TOKEN_BUCKET)
                _command(*qdisc, "replace", "dev", link, "root", *rate)
            elif self.rate_mbit is not None:
                # Fails where nothing was set before, which is what is wanted.
                command = [*qdisc, "del", "dev", link, "root"]
                subprocess.run(command, capture_output=True, check=False)
        self.rate_mbit = rate_mbit

    def run(
        self, script: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 1800
    ) -> None:
        """Run a Python script with its arguments as two ranks; raise if either of them fails.

        They get torchrun's variables and write to this process's stdout and stderr. When one
        ends badly, time runs out or this call is interrupted, all that is left of them is killed.
        """
        ranks = [self._start(rank, script, env or {}) for rank in range(2)]
        try:
            deadline = time.monotonic() + timeout_s
            while any(rank.poll() is None for rank in ranks):
                if any(rank.returncode for rank in ranks):
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{' '.join(script)} did not end in {timeout_s:g} s")
                time.sleep(0.05)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        failed = [f"rank {i} with {r.returncode}" for i, r in enumerate(ranks) if r.returncode]
        if failed:
            raise RuntimeError(f"{' '.join(script)} failed: {', '.join(failed)}")

    def _start(
        self, rank: int, script: Sequence[str], env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[rank % len(cores)])
        inside = ("ip", "netns", "exec", self.names[rank], "taskset", "-c", core)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": self.links[rank],
            "OMP_NUM_THREADS": "1",
            "OVERLAPC_LAB_MBIT": "none" if self.rate_mbit is None else f"{self.rate_mbit:g}",
        }
        return subprocess.Popen(
            [*inside, sys.executable, *script],
            env={**os.environ, **env, **variables},
            start_new_session=True,
        )


def require_permission() -> None:
    """Raise NotPermitted unless namespaces can be made, entered and shaped here."""
    for tool in ("ip", "tc", "taskset"):
        if shutil.which(tool) is None:
            raise NotPermitted(f"`{tool}` is not installed (iproute2 and util-linux have it)")
    if os.geteuid() != 0:
        raise NotPermitted("only root can make network namespaces; run it as root")
    name = f"overlapc-{os.getpid()}-try"
    try:
        _command("ip", "netns", "add", name)
        _command("ip", "netns", "exec", name, "sh", "-c", CONGESTION)
        limit = ("tbf", "rate", "400mbit", *TOKEN_BUCKET)
        _command("ip", "-n", name, "link", "add", "try0", "type", "veth", "peer", "name", "try1")
        _command("tc", "-n", name, "qdisc", "replace", "dev", "try0", "root", *limit)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode().strip()
        raise NotPermitted(f"`{' '.join(error.cmd)}` was refused: {said}") from error
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run_at_rates(
    script: Sequence[str], rates: Sequence[float | None], title: str, where: TextIO = sys.stdout
) -> None:
    """Run a script as two ranks at each rate, or say why that is not possible here."""
    quiet = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        with ShapedPair(None) as pair:
            for rate in rates:
                pair.set_rate(rate)
                named = "unshaped" if rate is None else f"{rate:g} Mbit/s"
                print(f"\n{title}link {named}", file=where, flush=True)
                pair.run(script, quiet)
    except NotPermitted as missing:
        print(f"skipped: the shaped link is not possible here: {missing}", file=where)


def as_two_ranks(
    rank_main: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    rates: Sequence[float | None],
    title: str = "",
) -> None:
    """Run `rank_main` if this process is a rank, else this program as two ranks at each rate."""
    if "RANK" in os.environ:
        rank_main(args)
    else:
        run_at_rates(sys.argv, rates, title)


def write_results(stem: str, document: Mapping[str, Any]) -> None:
    """What was measured, with its conditions, under benchmarks/results/."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{stem}.json"
    write_file(path, json.dumps(document, indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)


def ratio(slow: Sequence[float], fast: Sequence[float]) -> str:
    """How many times faster, of times taken in turn: median of the paired ratios, and range."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})"


def interleaved(variants: Sequence[T], repetitions: int) -> Iterator[T]:
    """Each variant once in every repetition, which begin with one after the other."""
    for repetition in range(repetitions):
        turn = repetition % len(variants)
        yield from (*variants[turn:], *variants[:turn])
        if os.environ.get("RANK", "0") == "0":
            print(f"repetition {repetition + 1} of {repetitions}", file=sys.stderr, flush=True)


def parse_rates(text: str) -> list[float | None]:
    """ "400,none" is [400.0, None]."""
    return [None if word == "none" else float(word) for word in text.split(",")]


def _command(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a script as two ranks over a slow link.")
    parser.add_argument("--rate", type=parse_rates, default=[400.0], help="in Mbit/s, or none")
    parser.add_argument("script", nargs="+", help="a Python script and its arguments, after --")
    args = parser.parse_args()
    run_at_rates(args.script, args.rate, "", sys.stderr)


if __name__ == "__main__":
    main()
