"""Train torchtitan's small llama3 on CPUs, sharded by FSDP2: by its plain trainer, by its graph
trainer with its own passes, and by its graph trainer planned.

python examples/torchtitan/train.py --ranks 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import common
from examples.torchtitan import on_cpu


def train(config: Any, steps: int) -> tuple[list[float], list[Tensor], float]:
    """Losses, parameters, and the median seconds of a step behind the first."""
    trainer = on_cpu.Titan(config, dist.get_world_size())
    on_cpu.sum_alone(trainer.model)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
    losses, times = [], []
    for number in range(steps):
        began = time.monotonic()
        losses.append(trainer.step(dist.get_rank(), number).item())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.monotonic() - began)
    kept: Any = [p.detach() for p in trainer.model.parameters()]
    return losses, [p.to_local().clone() for p in kept], statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory-budget", type=common.budget)
    args = parser.parse_args()
    if not on_cpu.is_there():
        sys.exit("torchtitan: found none, expected torchtitan 0.3.0: pip install torchtitan==0.3.0")
    common.launch(args.ranks)
    common.connect("none", 0, "cpu")
    torch.set_num_threads(1)
    on_cpu.load()
    import overlapc.torchtitan

    def config() -> Any:
        return on_cpu.config_of("llama3", args.layers)

    losses, expected, plain_s = train(on_cpu.eager_of(config()), args.steps)
    _, _, theirs_s = train(config(), args.steps)
    planned = overlapc.torchtitan.planned(
        config(), memory_budget=args.memory_budget
    )  # the one line
    found, parameters, ours_s = train(planned, args.steps)
    same = found == losses and all(map(torch.equal, expected, parameters))
    common.say(overlapc.torchtitan.explain())
    common.say(f"losses {losses[0]:.4f} … {losses[-1]:.4f}")
    common.say(
        f"a step takes {plain_s * 1e3:.0f} ms by the plain trainer, {theirs_s * 1e3:.0f} ms by "
        f"the graph trainer, {ours_s * 1e3:.0f} ms planned (measured)"
    )
    common.leave_if(same)


if __name__ == "__main__":
    main()
