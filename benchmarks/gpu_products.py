"""Products of matrices whose shapes are awkward, on one GPU, beside what is estimated of them.

    python benchmarks/gpu_products.py --out rows.csv       measure, on a GPU
    python benchmarks/gpu_products.py --of rows.csv        predict, anywhere: --hardware h100-sxm

    rows       rows of a multiple of 2, 4, 8 or 16 bytes: odd numbers of words and widths
    weights    gradients of small weights over many tokens: few tiles, and long sums
    writes     short sums, whose results take as long to write as to make: scores of attention
    thin       few columns: heads of classes, routers, low-rank adapters

Times are medians of runs that wait in the GPU's queue for each other, so the host is not in them.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlapc.profiler.hardware import load_hardware
from overlapc.profiler.work import OpWork, Product, work_ns

LAYOUTS = ("tn", "nn", "nt")
FIELDS = ("what", "dtype", "layout", "batch", "m", "n", "k", "us")


def cases() -> Iterator[tuple[str, str, Product]]:
    """What a product stands for, its dtype, and the product."""
    for dtype in ("bfloat16", "tf32"):
        for layout in LAYOUTS:
            for extra in (0, 1, 2, 4, 8):
                yield "rows", dtype, Product(4096, 4096 + extra, 4096, layout)
                yield "rows", dtype, Product(4096, 4096, 4096 + extra, layout)
    for layout in LAYOUTS:
        for n in (50256, 50257, 50258, 50260, 50304):
            yield "rows", "bfloat16", Product(4096, n, 2048, layout)
    for width in (64, 128, 256, 512, 1024):
        for tokens in (4096, 16384, 65536):
            yield "weights", "bfloat16", Product(width, width, tokens, "nt")
            yield "weights", "bfloat16", Product(width, 4 * width, tokens, "nt")
    for width in (64, 80, 128):
        for tokens in (1024, 2048):
            yield "writes", "bfloat16", Product(tokens, tokens, width, "tn", 64)
            yield "writes", "bfloat16", Product(tokens, width, tokens, "nn", 64)
            yield "writes", "bfloat16", Product(width, tokens, tokens, "nt", 64)
    for k in (32, 64, 128, 256):
        yield "writes", "bfloat16", Product(8192, 8192, k, "tn")
    for n in (2, 3, 8, 16, 64, 100):
        for layout in ("tn", "nn"):
            size = (16384, n, 4096) if layout == "tn" else (16384, 4096, n)
            yield "thin", "bfloat16", Product(*size, layout)
        yield "thin", "bfloat16", Product(n, 4096, 16384, "nt")


def operands(product: Product, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As BLAS sees them: TN is x @ w.T, NN is g @ w, NT is g.T @ x."""
    m, n, k = product.m, product.n, product.k

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(product.batch, rows, columns, dtype=dtype, device="cuda")

    if product.layout == "tn":
        left, right = matrix(m, k), matrix(n, k).mT
    elif product.layout == "nn":
        left, right = matrix(m, k), matrix(k, n)
    else:
        left, right = matrix(k, m).mT, matrix(k, n)
    return (left, right) if product.batch > 1 else (left[0], right[0])


def took_us(product: Product, dtype: str, repetitions: int = 7) -> float:
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    left, right = operands(product, torch.float32 if dtype == "tf32" else torch.bfloat16)
    into = left @ right
    flops = 2 * product.batch * product.m * product.n * product.k
    count = max(3, min(50, int(2e-3 / (flops / 2e14 + 1e-5))))
    found = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000 * count)  # 10 us for each launch
        begin.record()
        for _ in range(count):
            torch.matmul(left, right, out=into)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / count)
    return median(found[1:])


def measure(out: Path) -> None:
    with out.open("w", newline="") as file:
        file.write(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for what, dtype, product in cases():
            row = {key: getattr(product, key) for key in ("layout", "batch", "m", "n", "k")}
            us = round(took_us(product, dtype), 2)
            writer.writerow(row | {"what": what, "dtype": dtype, "us": us})


def predict(of: Path, name: str) -> None:
    machine = load_hardware(name)
    ratios = defaultdict(list)
    with of.open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(line for line in file if line[0] != "#"))
    for row in rows:
        batch, m, n, k = (int(row[key]) for key in ("batch", "m", "n", "k"))
        width = 4 if row["dtype"] == "tf32" else 2
        product = Product(m, n, k, row["layout"], batch)
        moved = width * batch * (m * k + k * n + m * n)
        work = OpWork("matmul", 2 * batch * m * n * k, row["dtype"], moved, min(m, n, k), product)
        us, ratio = float(row["us"]), work_ns(machine, work) / 1e3 / float(row["us"])
        key = str(math.gcd((m if row["layout"] == "nt" else k) * width, n * width, 16))
        ratios[row["what"], key if row["what"] == "rows" else row["layout"]].append(ratio)
        print(f"{row['what']:8}{row['dtype']:9} {row['layout']} {batch:3} x {m} {n} {k}", end=" ")
        print(f"{us:.1f} us, predicted / measured {ratio:.2f}")
    for (what, key), found in sorted(ratios.items()):
        print(f"{what:8} {key:3} median {median(found):.2f} ({min(found):.2f}..{max(found):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where measured products go")
    parser.add_argument("--of", type=Path, help="predict these measured products instead")
    parser.add_argument("--hardware", default="h100-sxm")
    args = parser.parse_args()
    if args.of is not None:
        predict(args.of, args.hardware)
    elif args.out is None or not torch.cuda.is_available():
        parser.error("--out FILE measures, on a CUDA device; --of FILE predicts anywhere")
    else:
        measure(args.out)


if __name__ == "__main__":
    main()
