"""Writes docs/models.md: what becomes of each public architecture, in each way of training.

python -m tests.zoo_public.table             all of them
python -m tests.zoo_public.table llama unet  those with these words in their names, to stdout
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import warnings
from pathlib import Path

# Nothing is fetched: read when the libraries are first imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from tests.vision_ops import declare
from tests.zoo_public.models import ZOO
from tests.zoo_public.outcome import BITWISE, NAMED, PLAIN, Outcome, optimized, stepped

declare()  # most of these libraries import torchvision
LIBRARIES = ("transformers", "timm", "diffusers", "peft")
WAYS = {
    "optimize": lambda name, device: optimized(name, None, device),
    "optimize, half the activations": lambda name, device: optimized(name, 0.5, device),
    "TrainStep, 2 microbatches": stepped,
}
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def outcome(name: str, way: str, device: str = "cpu") -> Outcome:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    return WAYS[way](name, device)


def main(words: list[str]) -> None:
    warnings.simplefilter("ignore")
    names = [name for name in ZOO if not words or any(word in name for word in words)]
    found: dict[str, list[Outcome]] = {}
    for name in names:
        found[name] = []
        for way in WAYS:
            try:
                found[name].append(outcome(name, way))
            except Exception as error:
                found[name].append(Outcome("ERROR", f"{type(error).__name__}: {error}"))
            last = found[name][-1]
            print(f"{name} | {way} | {last.verdict} | {last.detail}", file=sys.stderr, flush=True)
    if words:
        print(page(found))
    else:
        PAGE.write_text(page(found))


def page(found: dict[str, list[Outcome]]) -> str:
    every = [each for outcomes in found.values() for each in outcomes]
    counts = ", ".join(
        f"{sum(each.verdict == verdict for each in every)} {verdict}"
        for verdict in (BITWISE, NAMED, PLAIN)
    )
    others = [each for each in every if each.verdict not in (BITWISE, NAMED, PLAIN)]
    versions = ", ".join(f"{lib} {importlib.metadata.version(lib)}" for lib in LIBRARIES)
    notes: list[str] = []
    rows = [
        f"| {name} | " + " | ".join(_cell(each, notes) for each in outcomes) + " |"
        for name, outcomes in found.items()
    ]
    return "\n".join(
        [
            "# Models",
            "",
            f"{len(found)} public architectures at toy sizes. Each is trained as its library "
            "writes it and compared bit by bit with eager PyTorch in the same process: results, "
            "gradients, buffers and random state (`python -m tests.zoo_public.table`; torch "
            f"{torch.__version__.split('+')[0]}, {versions}, CPU). “Named”: PyTorch's tracing "
            "makes a difference, in a line that the report names. The report may name more lines "
            "than differ; `optimize(..., verify=True)` says which op differs. “Plain PyTorch”: the "
            "model ran unchanged, with a warning that says why.",
            "",
            f"Of {len(every)} trainings: {counts}, {len(others)} anything else.",
            "",
            f"| model | {' | '.join(WAYS)} |",
            "|---" * (1 + len(WAYS)) + "|",
            *rows,
            "",
            *[f"{i}. {note}" for i, note in enumerate(notes, 1)],
            "",
        ]
    )


def _cell(each: Outcome, notes: list[str]) -> str:
    if not each.detail:
        return each.verdict
    if each.detail not in notes:
        notes.append(each.detail)
    return f"{each.verdict} ({notes.index(each.detail) + 1})"


if __name__ == "__main__":
    main(sys.argv[1:])
