"""overlapc against eager and checkpointing with real GPU kernels on an emulated fabric.

    python benchmarks/gpu_fabric.py --out results     all configurations, under 8 minutes
    python benchmarks/gpu_fabric.py --selftest        gradients against eager, on this device
    python benchmarks/gpu_fabric.py --device cpu --quick

One process with one GPU believes it is rank 0 of 8. It runs forward and backward of its shard of
a GPT (tensor parallel) or of an MoE (expert parallel), in bf16; only the link is modelled, in the
three ways of `Fabric`. Every repetition runs every variant once, in turn, so that ratios are taken
between neighbours in time. The variants share one set of parameters; the optimizer is left out.

    eager       PyTorch as it is              overlapc@eager    overlapc with eager's peak
    checkpoint  with every block recomputed   overlapc@1.1      with 1.1 times checkpoint's peak
    slices 2    overlapc with eager's peak, each batch cut in two (`--slices`): its gradients are
                compared with eager's of the two, added up

Kernels are PyTorch's deterministic ones, for all variants: else flash attention alone would make
eager differ from eager. Exposed communication is measured as the step's time minus that of the
same variant on a free link, so it includes what communication takes from the compute beside it.
"""

from __future__ import annotations

import os

# Before CUDA starts: deterministic cuBLAS, and a hardware queue for every stream, since streams
# that share one wait for each other.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import argparse
import contextlib
import faulthandler
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlapc
from benchmarks.measuring import gradients, twin
from examples.common import Text, checkpoint_blocks
from examples.gpt.model import GPT, GPTConfig
from examples.moe.model import MoEConfig, MoEGPT
from overlapc.core.errors import Infeasible
from overlapc.emulate import Fabric, Link, init_fabric
from overlapc.profiler.clock import Clock
from overlapc.profiler.memory import measure_peak

RESULTS = Path(__file__).parent / "results"
RANKS = 8
DTYPE = torch.bfloat16
FREE = Link(alpha_s=0.0, bytes_per_s=1e30)
MODES = ("ideal", "copy_engine", "contending")
ALPHA_S = 10e-6


@dataclass(frozen=True)
class Case:
    """A model's size and what it is trained on."""

    config: GPTConfig | MoEConfig
    batch: int
    seq: int


@dataclass(frozen=True)
class Run:
    """One configuration: a model, a link in GB/s and what the link does to compute."""

    model: str
    gbytes_per_s: float
    mode: str


# One step takes about 100 ms on an H100: few layers, since planning takes a second for each.
CASES = {
    "gpt": Case(GPTConfig(layers=6, width=8192, heads=64, max_seq=2048), 6, 2048),
    "moe": Case(
        MoEConfig(
            layers=3, width=4096, heads=32, experts=8, top_k=2, expert_width=14336, max_seq=2048
        ),
        4,
        2048,
    ),
}
TINY = {
    "gpt": Case(GPTConfig(layers=2, width=64, heads=8, max_seq=64), 2, 64),
    "moe": Case(
        MoEConfig(layers=2, width=64, heads=4, experts=8, expert_width=128, max_seq=64), 2, 64
    ),
}
# Tensor parallelism lives on NVLink (450 GB/s; 200 as on older ones), expert parallelism also on
# PCIe and a network card. The most telling come first, in case time runs out.
RUNS = (
    Run("gpt", 450, "contending"),
    Run("moe", 50, "contending"),
    Run("gpt", 450, "ideal"),
    Run("moe", 50, "ideal"),
    Run("moe", 50, "copy_engine"),
    Run("gpt", 200, "contending"),
    Run("moe", 25, "contending"),
    Run("gpt", 450, "copy_engine"),  # in truth at the speed of the bus to the host
)


@dataclass
class Variant:
    """One way to run the step, what was measured and what was predicted."""

    name: str
    model: Callable[..., Tensor]
    budget_bytes: int | None = None
    plan_s: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    free_ms: list[float] = field(default_factory=list)  # the step on a link that takes no time
    peak_bytes: int = 0
    bitwise_equal: bool | None = None
    predicted: dict[str, float] | None = None
    slices: int = 1

    @property
    def exposed_ms(self) -> float:
        return statistics.median(self.step_ms) - statistics.median(self.free_ms)


class Bench:
    """A model, its batch and its parameters, which every variant shares."""

    def __init__(self, name: str, case: Case, device: torch.device) -> None:
        group = dist.group.WORLD
        self.device = device
        self.model = make_model(case.config, group, device).to(DTYPE)
        tokens, targets = Text().batch(0, stream=0, batch=case.batch, seq=case.seq)
        self.batch = tokens.to(device), targets.to(device)
        self.clock = Clock(device)

    def twin(self) -> nn.Module:
        return twin(self.model)

    def run(self, variant: Variant) -> None:
        self.model.zero_grad()
        torch.manual_seed(0)
        variant.model(*self.batch).backward()

    def timed_ms(self, variant: Variant) -> float:
        self.model.zero_grad()
        self.clock.wait()
        begin = self.clock.mark()
        self.run(variant)
        return self.clock.read([begin, self.clock.mark()])[1] / 1e6

    def peak(self, variant: Variant) -> int:
        self.model.zero_grad()
        return measure_peak(lambda: self.run(variant), self.device)

    def gradients(self, variant: Variant) -> list[Tensor]:
        self.run(variant)
        return gradients(self.model)

    def accumulated(self, eager: Variant, slices: int) -> list[Tensor]:
        """Eager's gradients of each slice of the batch, added up."""
        self.model.zero_grad()
        torch.manual_seed(0)
        for part in zip(*(given.chunk(slices) for given in self.batch), strict=True):
            (eager.model(*part) / slices).backward()
        return gradients(self.model)


def make_model(config: GPTConfig | MoEConfig, group: Any, device: torch.device) -> nn.Module:
    with torch.device(device):  # the weights are drawn there: quick, however large
        if isinstance(config, GPTConfig):
            return GPT(config, group)
        model = MoEGPT(config, group)
    for block in model.blocks:
        block.moe.router = BalancedRouter(block.moe.router, config.top_k)
    return model


class BalancedRouter(nn.Module):
    """A router that sends every expert equally many rows, its gradients still its own.

    The fabric's ranks hold the same data, so an all-to-all there must have equal splits.
    """

    def __init__(self, router: nn.Linear, top_k: int) -> None:
        super().__init__()
        self.router, self.top_k = router, top_k

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.router(tokens)
        row = torch.arange(logits.shape[0], device=logits.device)
        expert = torch.arange(logits.shape[1], device=logits.device)
        is_next = (expert - self.top_k * row[:, None]) % logits.shape[1] < self.top_k
        return torch.where(is_next, logits + 24, logits)


# --------------------------------------------------------------------------- one configuration


def measure_run(run: Run, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """All variants of one configuration; the table goes to stdout."""
    link = Link(ALPHA_S, run.gbytes_per_s * 1e9 / (1000 if args.quick else 1))
    with fabric(Fabric(link, mode=run.mode, high_priority=args.high_priority)):
        bench = Bench(run.model, case, args.device)
        eager = Variant("eager", bench.twin())
        checkpoint = Variant("checkpoint", checkpoint_blocks(bench.twin()))
        variants, failed = [eager, checkpoint], {}
        for variant in variants:
            bench.run(variant)
            bench.run(variant)
            variant.peak_bytes = bench.peak(variant)
            say(f"  {variant.name}: {bench.timed_ms(variant):.1f} ms, {mib(variant.peak_bytes)}")
        for level in args.levels:
            peak = eager.peak_bytes if level == "eager" else checkpoint.peak_bytes * float(level)
            with attempt(f"overlapc@{level}", failed):
                variants.append(overlapc_variant(bench, f"overlapc@{level}", int(peak), eager))
        for count in args.slices:
            with attempt(name := f"slices {count}", failed):
                variants.append(overlapc_variant(bench, name, eager.peak_bytes, eager, count))

        finite = True
        for variant in list(variants):
            before = set(failed)
            with attempt(variant.name, failed):
                whole = variant.slices == 1
                expected = (
                    bench.gradients(eager) if whole else bench.accumulated(eager, variant.slices)
                )
                finite = finite and all(bool(each.isfinite().all()) for each in expected)
                found = bench.gradients(variant)
                variant.bitwise_equal = all(map(torch.equal, expected, found))
                del found, expected
                variant.peak_bytes = bench.peak(variant)
            if set(failed) != before:
                variants.remove(variant)

        for repetition in range(args.reps):
            turn = repetition % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                variant.step_ms.append(bench.timed_ms(variant))
        dist.group.WORLD.link = FREE
        for _ in range(max(3, args.reps // 2)):
            for variant in variants:
                variant.free_ms.append(bench.timed_ms(variant))
        print_table(run, variants, finite)
        return {
            **asdict(run),
            "case": asdict(case),
            "link": {"alpha_s": link.alpha_s, "bytes_per_s": link.bytes_per_s},
            "gradients_finite": finite,
            "variants": [as_row(variant) for variant in variants],
            "failed": failed,
        }


def overlapc_variant(
    bench: Bench, name: str, budget_bytes: int, eager: Variant, slices: int = 1
) -> Variant:
    """Plan within the budget; `eager` gets what its own steps are predicted to take."""
    model = overlapc.optimize(bench.twin(), memory_budget=budget_bytes, slices=slices)
    variant = Variant(name, model, budget_bytes, slices=slices)
    begin = time.perf_counter()
    bench.run(variant)
    bench.clock.wait()
    variant.plan_s = time.perf_counter() - begin
    bench.run(variant)
    if model.fallbacks:
        raise RuntimeError("not optimized: " + "; ".join(model.fallbacks))
    reports = model.graphs
    variant.predicted = prediction([r.timeline for r in reports])
    variant.predicted["bound_ms"] = sum(r.bound_ns for r in reports) / 1e6
    variant.predicted["graphs"] = len(reports)
    slowdown = reports[0].problem.profile.slowdown
    variant.predicted["slowdown_compute"] = slowdown.compute_permille / 1000
    variant.predicted["slowdown_comm"] = slowdown.comm_permille / 1000
    if slices == 1:
        eager.predicted = eager.predicted or prediction([r.eager for r in reports])
    say(
        f"  {variant.name}: planned in {variant.plan_s:.1f} s, predicted "
        f"{variant.predicted['step_ms']:.1f} ms, {mib(variant.predicted['peak_bytes'])}"
    )
    return variant


def prediction(timelines: list[Any]) -> dict[str, float]:
    return {
        "step_ms": sum(t.step_ns for t in timelines) / 1e6,
        "peak_bytes": max(t.peak_bytes for t in timelines),
        "comm_ms": sum(t.comm_ns for t in timelines) / 1e6,
        "exposed_ms": sum(t.exposed_ns for t in timelines) / 1e6,
        "recompute_ms": sum(t.recompute_ns for t in timelines) / 1e6,
    }


def ratios(slow: Variant, fast: Variant) -> list[float]:
    return [a / b for a, b in zip(slow.step_ms, fast.step_ms, strict=True)]


def print_table(run: Run, variants: list[Variant], finite: bool) -> None:
    eager, checkpoint = variants[0], variants[1]
    free = statistics.median(eager.free_ms)
    comm = eager.predicted["comm_ms"] if eager.predicted else float("nan")
    print(
        f"\n{run.model}, {run.gbytes_per_s:g} GB/s, {run.mode}: eager computes {free:.1f} ms, "
        f"communication takes {comm:.1f} ms ({100 * comm / free:.0f}%)"
        f"{'' if finite else '; GRADIENTS NOT FINITE'}"
    )
    head = ("variant", "step ms", "vs eager", "vs checkpoint", "MiB", "exposed", "grads")
    rows = [(*head, "| predicted ms", "error", "MiB", "error", "comm", "exposed", "bound")]
    for v in variants:
        step, p = statistics.median(v.step_ms), v.predicted
        seen = (f"{step:.1f}", spread(ratios(eager, v)), spread(ratios(checkpoint, v)))
        seen += (mib(v.peak_bytes), f"{v.exposed_ms:.1f}", "equal" if v.bitwise_equal else "DIFFER")
        foreseen: tuple[str, ...] = ("| -", *["-"] * 6)
        if p:
            foreseen = (
                f"| {p['step_ms']:.1f}",
                f"{100 * (p['step_ms'] / step - 1):+.1f}%",
                mib(p["peak_bytes"]),
                f"{100 * (p['peak_bytes'] / max(1, v.peak_bytes) - 1):+.1f}%",
                f"{p['comm_ms']:.1f}",
                f"{p['exposed_ms']:.1f}",
                f"{p['bound_ms']:.1f}" if "bound_ms" in p else "-",
            )
        rows.append((v.name, *seen, *foreseen))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    sys.stdout.flush()


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.2f}..{max(values):.2f})"


def mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def as_row(variant: Variant) -> dict[str, Any]:
    row = {key: value for key, value in vars(variant).items() if key != "model"}
    return row | {"exposed_ms": variant.exposed_ms}


def bench_main(args: argparse.Namespace) -> int:
    cases = TINY if args.quick else CASES
    longest: dict[str, float] = {}  # seconds that a configuration of a model took
    failed: dict[str, str] = {}
    runs = [r for r in RUNS if r.model in args.models and r.mode in args.modes]
    document = {
        "what": "forward and backward, emulated fabric of 8 ranks, real kernels; times measured",
        "conditions": conditions(args),
        "runs": [],
    }
    begin = time.monotonic()
    for number, run in enumerate(runs, 1):
        now = time.monotonic()
        name = f"{run.model}, {run.gbytes_per_s:g} GB/s, {run.mode}"
        if now - begin + longest.get(run.model, 0.0) > args.limit_s:
            print(f"\nskipped for want of time: {name}", flush=True)
            continue
        say(f"[{now - begin:.0f} s] {number} of {len(runs)}: {name}")
        with attempt(name, failed):
            document["runs"].append(measure_run(run, cases[run.model], args))
        clean_up()
        longest[run.model] = max(longest.get(run.model, 0.0), time.monotonic() - now)
        save(document | {"failed": failed}, args)
    say(f"done in {time.monotonic() - begin:.0f} s")
    return int(bool(failed or any(run["failed"] for run in document["runs"])))


def save(document: dict[str, Any], args: argparse.Namespace) -> None:
    """Everything measured so far, with its conditions."""
    args.out.mkdir(parents=True, exist_ok=True)
    tiny = args.quick or args.device.type == "cpu"
    path = args.out / ("gpu_fabric_tiny.json" if tiny else "gpu_fabric.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    say(f"written: {path}")


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(args.device) if cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": str(DTYPE),
        "ranks": RANKS,
        "repetitions": args.reps,
        "clock": "CUDA events" if cuda else "host",
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "contending_blocks": Fabric(FREE).blocks,
        "high_priority": args.high_priority,
        "connections": os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
        "date": time.strftime("%Y-%m-%d"),
    }


# --------------------------------------------------------------------------- selftest


def selftest_main(args: argparse.Namespace) -> int:
    """overlapc's gradients against eager's, on small models with dropout."""
    tiny = args.device.type == "cpu"
    size = {"layers": 2, "width": 64} if tiny else {"layers": 4, "width": 512}
    gpt = Case(GPTConfig(heads=8, max_seq=256, dropout=0.1, **size), 4, 32 if tiny else 256)
    moe = Case(
        MoEConfig(heads=8, experts=8, expert_width=128, max_seq=256, dropout=0.1, **size),
        gpt.batch,
        gpt.seq,
    )
    link = Link(ALPHA_S, 50e9)
    failed: dict[str, str] = {}
    begin = time.monotonic()
    # In bf16 on a CPU, torch.compile's own dropout has other gradients than eager's.
    plain, mixed = ("fp32", []) if tiny else ("bf16", ["autocast"])
    budgets = (None, 0.5, "min")
    checks: list[tuple[Case, str | None, str, str, Any]] = [
        *((gpt, None, precision, "eager", b) for precision in (plain, *mixed) for b in budgets),
        *((gpt, "contending", plain, "eager", b) for b in budgets),
        (gpt, "ideal", plain, "eager", 0.5),
        (gpt, "copy_engine", plain, "eager", 0.5),
        *((moe, "contending", plain, "eager", b) for b in budgets),
        (gpt, None, plain, "inductor", 0.5),
        (gpt, "ideal", plain, "inductor", 0.5),
    ]
    for case, mode, precision, backend, budget in checks:
        kind = "gpt" if case is gpt else "moe"
        name = f"{kind} {mode or 'no fabric'} {precision} {backend} budget {budget}"
        if time.monotonic() - begin > args.limit_s:
            print(f"SKIP  {name}: no time left", flush=True)
            continue
        now = time.monotonic()
        around = fabric(Fabric(link, mode=mode)) if mode else contextlib.nullcontext()
        with attempt(name, failed), around:
            group = dist.group.WORLD if mode else None
            model = make_model(case.config, group, args.device)
            model = model.to(DTYPE) if precision == "bf16" else model
            trainee = Trainee(model, case, args.device, precision == "autocast")
            said = selftest(trainee, backend, budget)
            print(f"ok    {name}: {said}, {time.monotonic() - now:.1f} s", flush=True)
        model = trainee = None
        clean_up()
    print(f"{len(failed)} of {len(checks)} failed: {', '.join(failed) or 'none'}", flush=True)
    return int(bool(failed))


class Trainee:
    """A model and what gives it gradients."""

    def __init__(self, model: nn.Module, case: Case, device: torch.device, autocast: bool) -> None:
        self.model, self.device, self.autocast = model, device, autocast
        tokens, targets = Text().batch(0, stream=0, batch=case.batch, seq=case.seq)
        self.batch = tokens.to(device), targets.to(device)

    def run(self, model: Callable[..., Tensor]) -> Tensor:
        self.model.zero_grad()
        torch.manual_seed(7)
        with torch.autocast(self.device.type, DTYPE, enabled=self.autocast):
            loss = model(*self.batch)
        loss.backward()
        return loss.detach()

    def results(self, model: Callable[..., Tensor]) -> list[Tensor]:
        loss = self.run(model)
        return [loss, *(p.grad.clone() for p in self.model.parameters())]

    def peak(self, model: Callable[..., Tensor]) -> int:
        self.model.zero_grad()
        return measure_peak(lambda: self.run(model), self.device)


def selftest(trainee: Trainee, backend: str, budget: Any) -> str:
    """One check; what was seen, or an AssertionError."""
    eager = trainee.results(trainee.model)
    again = trainee.results(trainee.model)
    repeats = all(map(torch.equal, eager, again))
    assert all(bool(t.isfinite().all()) for t in eager), "eager's gradients are not finite"
    tested, results = optimized(trainee, backend, budget)
    assert not tested.fallbacks, f"not optimized: {tested.fallbacks}"
    for _ in range(2):  # twice: the first call plans
        if backend == "eager":
            unequal = sum(not torch.equal(a, b) for a, b in zip(eager, results, strict=True))
            if unequal:
                traced = trainee.results(torch.compile(trainee.model, backend="aot_eager"))
                raise AssertionError(
                    f"{unequal} of {len(eager)} results differ from eager's, by up to "
                    f"{distance(results, eager):.1e}. Does eager equal itself? {repeats}. "
                    f"aot_eager equal eager? {all(map(torch.equal, eager, traced))}. "
                    f"overlapc equal aot_eager? {all(map(torch.equal, results, traced))}"
                )
        results = trainee.results(tested)
    timeline = tested.timeline
    said = f"peak {mib(trainee.peak(tested))} of eager's {mib(trainee.peak(trainee.model))} MiB"
    said += f" (predicted {mib(timeline.peak_bytes)})"
    if backend == "eager":
        return f"bitwise equal, {said}"
    own = distance(compiled_by_torch(trainee), eager)
    ours = distance(results, eager)
    assert ours <= max(1e-2, 2 * own), f"{ours:.1e} off eager; torch.compile is {own:.1e} off"
    return f"{ours:.1e} off eager (torch.compile {own:.1e}), {said}"


def optimized(trainee: Trainee, backend: str, budget: Any) -> tuple[Any, list[Tensor]]:
    """The optimized model and its first results. Of an infeasible budget, the least that is not."""
    bytes_or_fraction: Any = 1 if budget == "min" else budget
    for _ in range(5):  # each try measures anew, so the least that is feasible may change
        tested = overlapc.optimize(
            trainee.model, memory_budget=bytes_or_fraction, backend=backend, profile="measure"
        )
        try:
            with inductor_draws_as_eager(backend):
                return tested, trainee.results(tested)
        except Infeasible as error:
            say(f"  {error.budget_bytes:,} bytes are too few: now {error.smallest_bytes:,}")
            bytes_or_fraction = error.smallest_bytes
    raise AssertionError("the budget that Infeasible named was infeasible, again and again")


def compiled_by_torch(trainee: Trainee) -> list[Tensor]:
    with inductor_draws_as_eager("inductor"):
        return trainee.results(torch.compile(trainee.model))


def inductor_draws_as_eager(backend: str) -> contextlib.AbstractContextManager[Any]:
    """Inductor's own dropout draws other numbers than eager's."""
    if backend != "inductor":
        return contextlib.nullcontext()
    from torch._inductor import config

    return config.patch(fallback_random=True)


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of any tensor, by its norm."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)
        errors.append(error.item())
    return max(errors)


# --------------------------------------------------------------------------- common


@contextlib.contextmanager
def fabric(settings: Fabric) -> Iterator[None]:
    init_fabric(settings, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def attempt(name: str, failed: dict[str, str]) -> Iterator[None]:
    """An exception is shown and noted in `failed`; what follows goes on."""
    try:
        yield
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
        print(f"FAIL  {name}", flush=True)
        traceback.print_exc()
        sys.stderr.flush()
        # Frames keep models alive.
        traceback.clear_frames(error.__traceback__)


def clean_up() -> None:
    """Forget compiled code and give memory back, so that configurations do not meet."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prepare(device: torch.device, deterministic: bool = True) -> None:
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would only cost time
        torch.backends.cuda.enable_cudnn_sdp(False)
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, name):  # one function, many variants of it
            setattr(torch._dynamo.config, name, 1024)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
    else:
        torch.set_num_threads(1)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    words = {"type": lambda text: text.split(",")}
    add("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    add("--models", **words, default=["gpt", "moe"])
    add("--modes", **words, default=list(MODES))
    add("--levels", **words, default=["eager", "1.0", "1.1"], help="overlapc's peaks")
    add("--slices", type=lambda text: [int(word) for word in text.split(",")], default=[])
    add("--reps", type=int, default=12)
    add("--high-priority", action="store_true", help="the fabric's streams have it")
    add("--quick", action="store_true", help="tiny models, and links as much slower")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--nondeterministic", action="store_true", help="PyTorch's usual kernels")
    add("--limit-s", type=float, default=420.0, help="start nothing that would end later")
    add("--selftest", action="store_true", help="compare gradients with eager's, and end")
    args = parser.parse_args()
    args.device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; try --device cpu --quick")
    if args.device.type == "cpu" and not args.selftest and not args.quick:
        parser.error("--device cpu runs tiny models only: add --quick")
    # If something hangs: show where, and end. What was measured is written.
    faulthandler.dump_traceback_later(args.limit_s + 60, exit=True)
    prepare(args.device, not args.nondeterministic)
    sys.exit(selftest_main(args) if args.selftest else bench_main(args))


if __name__ == "__main__":
    main()
