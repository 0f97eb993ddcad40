"""How far estimated products of matrices are from those of transformers measured on an A100.

    git clone https://github.com/EleutherAI/cookbook
    git -C cookbook show 27dff48:sizing/results/transformer_data/h_sweep.out > 64-heads.out
    git -C cookbook show fb3e361:sizing/results/transformer_data/h_sweep.out > 128-heads.out
    git -C cookbook show 27dff48:sizing/results/transformer_data/vocab_v_sweep.out > words.out
    git -C cookbook show 27dff48:sizing/results/transformer_data/vocab_h_sweep.out > widths.out
    python benchmarks/products.py 64-heads.out 128-heads.out words.out widths.out

The first two files have the products of a layer of 64 or 128 heads, four sequences of 2,048 tokens,
on 1 to 8 tensor-parallel ranks, with widths in steps of 128: layers' (one product), scores'
(queries by keys, a batch of products) and values' (scores by values). The others have products of
words' scores, with numbers of words and widths in steps of 1. They calibrate `[kernels]` of A100
SXM beside SimuMax's kernels of A100 PCIe; so this is no test.

No product takes less than 50 us in these files, however small it is: the host waits for each, and
the script that is published with them keeps the slowest of 200. So much is taken off, and products
of less than 100 us are left out. Bandwidths reach 1.39 TB/s, which is the card of 40 GB.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlapc.profiler.hardware import load_hardware
from overlapc.profiler.work import OpWork, Product, work_ns

_ROW = re.compile(
    r"Throughput \(in TFLOP/s\) for (?:\w+ \()?(\d+)x(\d+)x(\d+)(x|, b=)(\d+)\)?: (\S+)"
)
_CLOCK_US, _LEAST_US = 50, 100


def products(path: Path) -> Iterator[tuple[str, Product, float]]:
    """What it is, the product, and how many microseconds it took."""
    for found in _ROW.finditer(path.read_text()):
        first, second, third, last = (int(found[i]) for i in (1, 2, 3, 5))
        if found[4] == "x":  # batch, m, k, n
            what = "values" if second == third != last else "scores"
            product = Product(second, last, third, "nn", first)
        else:  # m, k, n; all sequences are one matrix
            what = "layers" if last > 1 else "words"
            product = Product(first * last, third, second, "nn")
        if float(found[6]) > 0:
            flops = 2 * product.batch * product.m * product.n * product.k
            yield what, product, flops / float(found[6]) / 1e6 - _CLOCK_US


def main(paths: list[str]) -> None:
    if not paths:
        sys.exit(__doc__)
    machine = load_hardware("a100-sxm-40")
    ratios = defaultdict(list)
    for path in map(Path, paths):
        for what, product, took_us in products(path):
            if took_us < _LEAST_US:
                continue
            m, n, k, batch = product.m, product.n, product.k, product.batch
            moved = 2 * batch * (m * k + k * n + m * n)
            flops = 2 * batch * m * n * k
            work = OpWork("matmul", flops, "float16", moved, min(m, n, k), product)
            aligned = math.gcd(2 * k, 2 * n, 16)
            ratios[what, aligned].append(work_ns(machine, work) / 1e3 / took_us)
    print("predicted over measured, by products and by how many bytes rows are a multiple of")
    for (what, aligned), found in sorted(ratios.items()):
        tenths = quantiles(found, n=10) if len(found) > 1 else found
        print(
            f"{what:7} {aligned:3} B {len(found):5} products: {median(found):.3f} "
            f"({tenths[0]:.3f}..{tenths[-1]:.3f})"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
