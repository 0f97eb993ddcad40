"""Code that all examples share: starting ranks, the link between them, text, and fair comparison.

A comparison trains several copies of one model, *variants*, in the same processes. Every step runs
each variant once on the same batch with the same random state, so machine noise affects all
equally, and ratios of times are taken step by step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overlapc
from overlapc.emulate import Link, init_link, now_ns, virtual_clock
from overlapc.profiler.memory import measure_peak

LINK_LATENCY_S = 100e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes to start without torchrun")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=2, help="sequences in a microbatch")
    add("--microbatches", type=int, default=1, help="microbatches in a step")
    add("--seq", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--dropout", type=float, default=0.0)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add(
        "--link",
        choices=["emulated", "virtual", "none"],
        default="emulated",
        help="link between the ranks: emulated, the same in virtual time (for more ranks than "
        "cores, or busy ones), or as it is",
    )
    add("--link-mbit", type=float, default=400.0, help="bandwidth of an emulated link")
    add("--memory-budget", type=budget, help='bytes, "8GB", or a fraction of eager\'s activations')
    add("--solver", default="overlap", help="overlap, heu, opt, or a baseline")
    add("--backend", choices=["eager", "inductor"], default="eager")
    add("--variants", default="overlapc", help="some of eager,checkpoint,overlapc")
    everything = {"action": "store_const", "const": "eager,checkpoint,overlapc"}
    add("--compare", dest="variants", help="all variants, side by side", **everything)


def budget(text: str) -> int | float | str:
    """Parse a memory budget for `overlapc.optimize`: "9000" bytes, "0.5", "8GB"."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def launch(ranks: int) -> None:
    """Return in a process that is one rank of a job; outside of one, start it and exit.

    `torchrun train.py` arrives as a rank; `python train.py` becomes torchrun for `ranks` ranks.
    """
    if "RANK" in os.environ:
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports each start
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    os.execv(sys.executable, [*torchrun, f"--nproc-per-node={ranks}", *sys.argv])


def connect(link: str, mbit: float, device: str) -> dist.ProcessGroup:
    """Join the other ranks; `link` is "none" (as fast as it goes), "emulated" (`mbit`) or "virtual"
    (the same in virtual time)."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if link != "none":
        clock = "virtual" if link == "virtual" else "machine"
        init_link(Link(alpha_s=LINK_LATENCY_S, bytes_per_s=mbit * 1e6 / 8), clock)
    else:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return dist.group.WORLD


def leave() -> None:
    """End this rank, all together and at once.

    Gloo's threads free tensors a little after the wait for a collective. If that happens while the
    interpreter shuts down, it aborts the process (pytorch/pytorch#179291).
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_if(same: bool) -> None:
    """Say whether losses and parameters are the same; end this rank, with 1 if they differ on
    any."""
    say("losses and parameters are bitwise the same" if same else "THEY DIFFER")
    differ = torch.tensor(int(not same))
    dist.all_reduce(differ)
    if differ.item():
        sys.exit(1)
    leave()


def say(text: str) -> None:
    """Print a message to stderr, on one rank only."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


class Text:
    """The source code of the installed Python's library, as bytes: some text on any machine."""

    def __init__(self, size: int = 1 << 21) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        raw = b"".join(file.read_bytes() for file in files)[:size]
        self.tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def batch(self, step: int, stream: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
        """Inputs and next-byte targets; the same arguments always give the same batch."""
        generator = torch.Generator().manual_seed(1_000_003 * stream + step)
        starts = torch.randint(len(self.tokens) - seq - 1, (batch, 1), generator=generator)
        window = self.tokens[starts + torch.arange(seq + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class Checkpointed(nn.Module):
    """A block whose activations are recomputed in the backward, by PyTorch itself."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """`torch.utils.checkpoint` around each of `model.blocks`."""
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


Batch = tuple[Tensor, Tensor]


def accumulate(model: nn.Module, microbatches: list[Batch]) -> list[Tensor]:
    """Add up the gradients of all microbatches, one after the other; return the losses."""
    losses = []
    for microbatch in microbatches:
        loss = model(*microbatch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def optimized(
    model: nn.Module, args: argparse.Namespace
) -> tuple[nn.Module, Callable[[nn.Module, list[Batch]], list[Tensor]]]:
    """The model as overlapc trains it, and the function that adds up its gradients: merged, or in
    slices."""
    options = {"memory_budget": args.memory_budget, "solver": args.solver}
    if args.microbatches > 1 or args.slices > 1:
        step = overlapc.TrainStep(model, slices=args.slices, **options)
        return model, lambda model, microbatches: step(microbatches)
    return overlapc.optimize(model, backend=args.backend, **options), accumulate


@dataclass
class Variant:
    """One way to run the training step, and its measurements."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    after_backward: Callable[[nn.Module], None] = lambda model: None
    add_up: Callable[[nn.Module, list[Batch]], list[Tensor]] = accumulate
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    exposed_seconds: float = 0.0

    def forward_backward(self, batch: list[Batch], seed: int) -> Tensor:
        """Compute the gradients of one batch, from cleared gradients and a fixed random state;
        return the mean of the microbatches' losses."""
        self.optimizer.zero_grad()
        torch.manual_seed(seed)
        return torch.stack(self.add_up(self.model, batch)).mean()

    def step(self, batch: list[Batch], seed: int) -> None:
        _synchronize(batch[0][0].device)
        dist.barrier()
        start_ns = now_ns()
        loss = self.forward_backward(batch, seed)
        self.after_backward(self.model)
        self.optimizer.step()
        self.losses.append(loss.item())
        _synchronize(batch[0][0].device)
        self.seconds.append((now_ns() - start_ns) / 1e9)

    def gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def inspect(variant: Variant, batch: list[Batch], seed: int) -> None:
    """Measure peak memory and the time spent in waits for communication, in separate untimed
    steps."""
    device = batch[0][0].device
    run = lambda: variant.forward_backward(batch, seed)  # noqa: E731
    peaks = []
    for _ in range(3):  # one measurement can be too high by a buffer, never too low
        variant.optimizer.zero_grad()
        peaks.append(measure_peak(run, device))
    exposed = statistics.median(measure_exposed(run) for _ in range(3))
    seen = torch.tensor([float(min(peaks)), exposed], dtype=torch.float64, device=device)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    variant.peak_bytes, variant.exposed_seconds = int(seen[0]), seen[1].item()


def measure_exposed(fn: Callable[[], object]) -> float:
    """Seconds that `fn` spends in waits for collectives. (On CUDA, waits only order streams.)"""
    dist.barrier()
    if (clock := virtual_clock()) is not None:
        before_ns = clock.stood_ns
        fn()
        return (clock.stood_ns - before_ns) / 1e9
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        fn()
    waits = [e for e in profiler.key_averages() if e.key == "_c10d_functional::wait_tensor"]
    return sum(event.self_cpu_time_total for event in waits) / 1e6


def train(variants: list[Variant], batches: Callable[[int], list[Batch]], steps: int) -> None:
    """Train all variants side by side; the first untimed step compiles and is not counted."""
    every = max(1, steps // 10)
    for step in range(-1, steps):
        if step < 0:
            for variant in variants:
                say(f"preparing {variant.name} …")
                variant.forward_backward(batches(0), seed=0)
            continue
        for variant in variants[step % len(variants) :] + variants[: step % len(variants)]:
            variant.step(batches(step), seed=step)
        if step % every == 0 or step == steps - 1:
            seen = "   ".join(
                f"{v.name}: loss {v.losses[-1]:.6f} {v.seconds[-1] * 1e3:.0f} ms" for v in variants
            )
            say(f"step {step:3d}   {seen}")


def same(reference: list[Tensor], other: list[Tensor]) -> bool:
    """Bitwise equality, on every rank."""
    equal = len(reference) == len(other) and all(map(torch.equal, reference, other))
    verdict = torch.tensor(float(equal), device=reference[0].device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict)


def apart(reference: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference on any rank, relative to the largest number of the reference."""
    most = max(float((a - b).abs().max()) for a, b in zip(reference, other, strict=True))
    most /= max(float(a.abs().max()) for a in reference)
    seen = torch.tensor(most, dtype=torch.float64, device=reference[0].device)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return seen.item()


def verdict(reference: list[Tensor], other: list[Tensor]) -> str:
    """Say how two results compare. Slices sum in another order, so they may differ by rounding."""
    if same(reference, other):
        return "equal"
    off = apart(reference, other)
    return f"{'within' if off < 1e-5 else 'DIFFER'} {off:.0e}"


def report(variants: list[Variant], batch: list[Batch]) -> None:
    """Print the comparison; the others must equal the first variant."""
    for variant in variants:
        inspect(variant, batch, seed=0)
    first = variants[0]
    rows = [("", "step ms", "speed-up (min..max)", "peak MB", "exposed ms", "gradients", "losses")]
    for variant in variants:
        ratios = [a / b for a, b in zip(first.seconds, variant.seconds, strict=True)]
        spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}..{max(ratios):.2f})"
        equal = verdict(first.gradients(), variant.gradients())
        device = batch[0][0].device
        losses = verdict(*([torch.tensor(v.losses, device=device)] for v in (first, variant)))
        rows.append(
            (
                variant.name,
                f"{statistics.median(variant.seconds) * 1e3:.1f}",
                "-" if variant is first else spread,
                f"{variant.peak_bytes / 1e6:.1f}",
                f"{variant.exposed_seconds * 1e3:.1f}",
                "reference" if variant is first else equal,
                losses,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if dist.get_rank() == 0:
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip(), flush=True)
        print(
            f"\n{dist.get_world_size()} ranks, {len(first.losses)} interleaved steps; times are "
            "medians, the speed-up is the median of step-by-step ratios; peak is measured memory "
            "above the model's own,\nexposed is measured waiting for communication; gradients "
            "and losses are compared bit by bit; those of --slices, which are added up slice by "
            "slice, to rounding."
        )
