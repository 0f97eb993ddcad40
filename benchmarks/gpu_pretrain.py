"""Megatron-LM's own pretrain_gpt.py on one GPU, as it is and with overlapc in it.

    OVERLAPC_MEGATRON_LM=FOLDER python benchmarks/gpu_pretrain.py --out results.json

FOLDER is a checkout of Megatron-LM. Nothing stands in for anything: CUDA, NCCL, its own helpers
and fusions. Runs with and without overlapc alternate, each in a process of its own. Of every step
but the first ones the program notes time, greatest memory, loss and norm of the gradients. Loss
and norm must be equal to the last bit. Settings are what the script's arguments ask to recompute:

    none        nothing
    selective   core attention of every layer, Megatron's own choice
    full        every layer

overlapc's default budget is what the script's arguments would take. With `--trace` the last step is
profiled: how long kernels ran, how many, how often the host waited, and the GPU's clock behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlapc.core.files import write_file

SIZE = """
    --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --vocab-size 32000 --tokenizer-type NullTokenizer --mock-data
    --num-workers 1 --micro-batch-size 2 --global-batch-size 8 --lr 1e-4
    --eval-iters 1 --eval-interval 1000 --log-interval 1 --bf16 --transformer-impl local
    --attention-dropout 0 --hidden-dropout 0
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
"""
SETTINGS = {
    "none": "",
    "selective": "--recompute-granularity selective --recompute-modules core_attn",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
VARIANTS = ("megatron", "overlapc")
SCRIPT = "pretrain_gpt.py"
FIRST = 5  # the first step plans, and the next ones fill the allocator's pools
LIMIT_S = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--overlapc", default="--solver overlap", help="options of overlapc")
    parser.add_argument("--script", default="", help="more arguments of pretrain_gpt.py")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked, script = parser.parse_known_args()
    if not (Path(os.environ.get("OVERLAPC_MEGATRON_LM", "")) / SCRIPT).is_file():
        parser.error(
            f"found no {SCRIPT} where OVERLAPC_MEGATRON_LM says, expected Megatron-LM there"
        )
    if asked.steps < FIRST + 2:
        parser.error(f"--steps {asked.steps}: expected {FIRST + 2} or more; the first are left out")
    if asked.inside:
        inside(asked.inside, asked.overlapc, script, asked.steps if asked.trace else 0)
        return
    rows = []
    for rep in range(asked.reps):
        for setting in asked.settings.split(","):
            for variant in asked.variants.split(","):
                rows.append(run(setting, variant, asked) | {"rep": rep})
                print(shown(rows[-1]), flush=True)
    told = {setting: compare(rows, setting) for setting in asked.settings.split(",")}
    print(json.dumps(told, indent=1))
    if asked.out:
        write_file(asked.out, json.dumps({"rows": rows, "compared": told}, indent=1))
    if any("failed" in row for row in rows) or not all(c.get("equal", True) for c in told.values()):
        sys.exit("a run failed, or losses or norms differ: see above")


def run(setting: str, variant: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One run of the script in a process of its own: what it noted, or the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        noted, log = Path(folder) / "noted.json", Path(folder) / "log"
        options = asked.overlapc if variant == "overlapc" else ""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=1", __file__, f"--inside={noted}", f"--overlapc={options}"]
        command += [f"--steps={asked.steps}", *["--trace"] * asked.trace]
        command += [*SIZE.split(), f"--train-iters={asked.steps}"]
        command += [*SETTINGS[setting].split(), *asked.script.split()]
        environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        begun = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun then ends its rank
                process.wait(40)
        row = {"setting": setting, "variant": variant, "took_s": time.monotonic() - begun}
        if noted.is_file():
            return row | json.loads(noted.read_text())
        return row | {"failed": log.read_text()[-6000:]}


def inside(noted: Path, options: str, script: list[str], traced: int) -> None:
    """Run the script, as torchrun would, and write what is noted of its steps; profile the step of
    this number."""
    path = str(Path(os.environ["OVERLAPC_MEGATRON_LM"]) / SCRIPT)
    sys.path.insert(0, str(Path(path).parent))  # Megatron's own packages go before this program's
    steps = watch(traced)
    explained = ""
    if options:
        from overlapc.megatron.__main__ import main as overlapped

        overlapped([*shlex.split(options), path, *script])
        import overlapc.megatron

        explained = overlapc.megatron.explain()
    else:
        sys.argv = [path, *script]
        runpy.run_path(path, run_name="__main__")
    noted.write_text(json.dumps({"steps": steps, "explained": explained}))


def watch(traced: int) -> list[dict[str, Any]]:
    """Note every step from now on."""
    import megatron.training.training as training
    import torch
    from torch.profiler import profile

    step, steps = training.train_step, []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        profiler = profile() if len(steps) + 1 == traced else contextlib.nullcontext()
        with profiler as found:
            begun = time.perf_counter()
            result = step(*args, **kwargs)
            torch.cuda.synchronize()
        took_ms = (time.perf_counter() - begun) * 1e3
        losses = {name: float(loss).hex() for name, loss in result[0].items()}
        norm = None if result[5] is None else float(result[5]).hex()
        peak = torch.cuda.max_memory_allocated()
        steps.append({"ms": took_ms, "peak": peak, "losses": losses, "norm": norm})
        if found is not None:
            steps[-1]["traced"] = summed_up(found)
        return result

    training.train_step = train_step
    return steps


def summed_up(found: Any) -> dict[str, Any]:
    """What a profiled step says: microseconds and number of runs by kernel, and by what the host
    did itself in each call (the calls that it makes not counted)."""
    from torch.autograd import DeviceType

    kernels, host, runs = Counter[str](), Counter[str](), Counter[str]()
    for event in found.events():
        name = event.name[:80]
        if event.device_type == DeviceType.CUDA:
            if event.is_user_annotation:  # a span of kernels, which are counted by themselves
                continue
            kernels[name] += event.time_range.elapsed_us()
        else:
            host[name] += event.self_cpu_time_total
        runs[name] += 1
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv"]
    state = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    told: dict[str, Any] = {"state": state}
    for which, spent in (("gpu", kernels), ("host", host)):
        told[f"{which}_ms"] = sum(spent.values()) / 1e3
        told[f"{which}_runs"] = sum(runs[name] for name in spent)
        told[f"{which}_most"] = {n: (runs[n], round(us)) for n, us in spent.most_common(30)}
    return told


def compare(rows: list[dict[str, Any]], setting: str) -> dict[str, Any]:
    """overlapc beside Megatron alone: ratios of times, of neighbours in time, and of peaks."""
    pairs = []
    found = [row for row in rows if row["setting"] == setting and "steps" in row]
    for rep in sorted({row["rep"] for row in found}):
        both = {row["variant"]: row for row in found if row["rep"] == rep}
        if len(both) == len(VARIANTS):
            pairs.append([both[variant] for variant in VARIANTS])
    if not pairs:
        return {}
    speed = [step_ms(alone) / step_ms(ours) for alone, ours in pairs]
    return {
        "equal": all(learned(alone) == learned(ours) for alone, ours in pairs),
        "megatron_ms": [round(step_ms(alone), 2) for alone, _ in pairs],
        "overlapc_ms": [round(step_ms(ours), 2) for _, ours in pairs],
        "times_as_fast": round(statistics.median(speed), 3),
        "spread": [round(min(speed), 3), round(max(speed), 3)],
        "peak_ratio": round(max(peak(ours) / peak(alone) for alone, ours in pairs), 3),
    }


def step_ms(row: dict[str, Any]) -> float:
    return statistics.median(s["ms"] for s in row["steps"][FIRST:] if "traced" not in s)


def peak(row: dict[str, Any]) -> int:
    return max(step["peak"] for step in row["steps"][FIRST:])


def learned(row: dict[str, Any]) -> list[Any]:
    return [(step["losses"], step["norm"]) for step in row["steps"]]


def shown(row: dict[str, Any]) -> str:
    begin = f"{row['setting']:10s} {row['variant']:9s} {row['took_s']:5.0f} s"
    if "steps" not in row:
        return f"{begin}  failed:\n{row['failed']}"
    traced = json.dumps(row["steps"][-1].get("traced", ""), indent=1)
    figures = f"{step_ms(row):7.2f} ms  {peak(row) / 1e9:6.2f} GB"
    return f"{begin}  {figures}\n{row['explained']}\n{traced}"


if __name__ == "__main__":
    main()
