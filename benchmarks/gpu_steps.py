"""Whole steps of models on one GPU, eager, beside what `overlapc.predict` predicts of them.

    python benchmarks/gpu_steps.py --out steps.json        measure, on a GPU
    python benchmarks/gpu_steps.py --of steps.json         predict, anywhere: --hardware h100-sxm

A step is a forward and a backward in bf16, everything saved. Its time is between two CUDA events,
the median of 15 after three; the host's is how long it takes to launch a step. The peak is what a
step allocates above what was there before it, gradients included.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlapc
from benchmarks.gpu_fabric import conditions
from examples.gpt.model import GPT, GPTConfig

RESULTS = Path(__file__).parent / "results" / "gpu_steps_h100.json"
REPETITIONS = 15


@dataclass(frozen=True)
class Case:
    layers: int
    width: int
    heads: int
    seq: int
    batch: int
    vocab: int = 32000
    llama_wide: int = 0  # width of a Llama's gated MLP; 0: a GPT
    kv_heads: int = 8

    def __str__(self) -> str:
        kind = "llama" if self.llama_wide else "gpt"
        return f"{kind} {self.layers} x {self.width}, {self.batch} x {self.seq} tokens"

    def make(self, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        with torch.device(device):
            model = (self._llama() if self.llama_wide else self._gpt()).to(torch.bfloat16)
        words = torch.randint(0, self.vocab, (self.batch, self.seq + 1), device=device)
        if self.llama_wide:
            return model, (words[:, 1:].contiguous(),)
        return model, (words[:, :-1].contiguous(), words[:, 1:].contiguous())

    def _gpt(self) -> nn.Module:
        return GPT(GPTConfig(self.vocab, self.layers, self.width, self.heads, self.seq))

    def _llama(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=self.llama_wide,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.seq,
            attn_implementation="sdpa",
        )
        return _Loss(LlamaForCausalLM(config))


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        loss: Tensor = self.model(words, labels=words, use_cache=False).loss
        return loss


CASES = (
    Case(4, 1024, 16, 2048, 8),
    Case(4, 2048, 16, 2048, 4),
    Case(2, 4096, 32, 2048, 4),
    Case(2, 4096, 32, 8192, 1),
    Case(2, 8192, 64, 2048, 2),
    Case(1, 12288, 96, 2048, 1),
    Case(2, 4096, 32, 4096, 1, llama_wide=14336),
    Case(12, 768, 12, 1024, 8),
    Case(8, 512, 8, 512, 4),
    Case(24, 256, 4, 128, 2, vocab=1024),
)


def measure(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    model, given = case.make("cuda")
    took = [_timed(model, given) for _ in range(3 + REPETITIONS)][3:]
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(*given).backward()
    torch.cuda.synchronize()
    device_ms, host_ms = zip(*took, strict=True)
    return {
        "case": str(case),
        "ms": statistics.median(device_ms),
        "least_ms": min(device_ms),
        "most_ms": max(device_ms),
        "host_ms": statistics.median(host_ms),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }


def _timed(model: nn.Module, given: tuple[Tensor, ...]) -> tuple[float, float]:
    """Milliseconds of the device and of the host."""
    model.zero_grad()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    begin.record()
    model(*given).backward()
    end.record()
    host_ms = (time.perf_counter() - began) * 1000
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host_ms


def measure_all(args: argparse.Namespace) -> int:
    rows = []
    for case in CASES:
        rows.append(measure(case))
        print(rows[-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    kept = ("device", "torch", "cuda", "date")
    said = {key: text for key, text in conditions(args).items() if key in kept}
    args.out.write_text(json.dumps({"conditions": said, "steps": rows}, indent=1) + "\n")
    return 0


def predict_all(args: argparse.Namespace) -> int:
    rows = {row["case"]: row for row in json.loads(args.of.read_text())["steps"]}
    print(f"{'':36} measured ms (range; host)    predicted ms       peak MB  predicted")
    for case in CASES:
        row = rows.get(str(case))
        if row is None:
            continue
        model, given = case.make("meta")
        report = overlapc.predict(model, *given, hardware=args.hardware, solver="none")
        ms, peak = report.timeline.step_ns / 1e6, report.timeline.peak_bytes
        print(
            f"{case!s:36} {row['ms']:7.2f} ({row['least_ms']:.1f}..{row['most_ms']:.1f}; "
            f"{row['host_ms']:.1f})  {ms:7.2f} {100 * (ms / row['ms'] - 1):+6.1f}%  "
            f"{row['peak_bytes'] / 1e6:8.0f} {peak / 1e6:8.0f} "
            f"{100 * (peak / row['peak_bytes'] - 1):+5.1f}%",
            flush=True,
        )
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="where measured steps go")
    parser.add_argument("--of", type=Path, help="predict these measured steps instead")
    parser.add_argument("--hardware", default="h100-sxm")
    args = parser.parse_args()
    args.device, args.reps, args.high_priority = torch.device("cuda"), REPETITIONS, False
    warnings.simplefilter("ignore")
    if args.of is None and not torch.cuda.is_available():
        parser.error("no CUDA device here; --of predicts measured steps anywhere")
    sys.exit(measure_all(args) if args.of is None else predict_all(args))


if __name__ == "__main__":
    main()
