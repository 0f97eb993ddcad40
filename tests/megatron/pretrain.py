"""This program runs Megatron-LM's own pretrain_gpt.py on CPU and gloo, and writes what came of it.
Where there is a GPU all ranks share it, and nothing stands in for CUDA.

    OVERLAPC_MEGATRON_LM=FOLDER torchrun --nproc_per_node 2 tests/megatron/pretrain.py \
        --out DIR [--overlapc "--solver heu"] ARGUMENTS OF pretrain_gpt.py

FOLDER is a checkout of Megatron-LM. Each rank writes DIR/RANK.json: losses, gradient norms, loss
scales and digests of the gradients of every step; digests of weights, buffers, optimizer and random
states after the last; and, with --overlapc (options of `python -m overlapc.megatron`), what it said
of the run. Two runs are equal if their files are, but for "overlapc".
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import runpy
import shlex
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCRIPT = "pretrain_gpt.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overlapc")
    ours, script_arguments = parser.parse_known_args()
    lab = Path(os.environ["OVERLAPC_MEGATRON_LM"])
    sys.path[0] = str(lab)  # as `python pretrain_gpt.py` has it
    sys.path.append(str(Path(__file__).parent))  # cpu.py: Megatron has a package tests, too
    script = str(lab / SCRIPT)
    stand_in()
    seen = Seen()
    seen.watch()
    if ours.overlapc is None:
        sys.argv = [script, *script_arguments]
        runpy.run_path(script, run_name="__main__")
    else:
        from overlapc.megatron.__main__ import main as overlapped

        overlapped([*shlex.split(ours.overlapc), script, *script_arguments])
        import overlapc.megatron

        chunks = overlapc.megatron._steps.chunks.values()
        ran = [{**chunk.ran, "why": chunk.why_plain} for chunk in chunks]
        seen.told["overlapc"] = {"ran": ran, "explained": overlapc.megatron.explain()}
    seen.write(ours.out)
    # Gloo's threads now and then abort a process whose interpreter shuts down (pytorch#179291),
    # also one of Megatron alone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def stand_in() -> None:
    """Leave out what needs a compiler; without a GPU, make megatron.training believe that this CPU
    is one."""
    import cpu
    import torch

    torch.set_num_threads(1)
    if not hasattr(typing, "override"):  # 0.19 asks Python 3.12 for it
        typing.override = lambda function: function  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = "0"  # they share the first GPU
    else:
        pretend()
    helpers: Any = types.ModuleType("megatron.core.datasets.helpers_cpp")  # it is made of C++
    helpers.build_sample_idx_int32 = helpers.build_sample_idx_int64 = sample_index
    sys.modules[helpers.__name__] = helpers
    cpu.stand_in(fused=True)  # as its arguments have it by default

    import megatron.core.datasets.utils as datasets
    import megatron.training.initialize as initialize
    import megatron.training.training as training
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    datasets.compile_helpers = lambda: None
    MockGPTLowLevelDataset.size = 64
    initialize.set_jit_fusion_options = training.set_jit_fusion_options = lambda **_: None
    if hasattr(initialize, "fused_kernels"):  # up to 0.16
        initialize.fused_kernels.load = lambda _: None
    if not torch.cuda.is_available():
        without = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
        initialize.initialize_megatron = training.initialize_megatron = without


def pretend() -> None:
    """Answer for a GPU."""
    import torch

    device = types.SimpleNamespace(
        total_memory=1 << 34, major=8, minor=0, multi_processor_count=1, name="CPU"
    )
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: device
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None
    cuda.memory_stats = lambda *_, **__: {}
    cuda.reset_peak_memory_stats = lambda *_, **__: None
    for name in ("memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
        setattr(cuda, f"max_{name}", lambda *_, **__: 0)
    for name in ("Float", "Double", "Int", "Long", "Half", "BFloat16", "Byte"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    kernels: Any = types.ModuleType(
        "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    )
    kernels.enable_batch_invariant_mode = lambda: None  # it is made of triton
    sys.modules[kernels.__name__] = kernels


def sample_index(
    sizes: Any, documents: Any, length: int, epochs: int, tokens: int, drop_last: bool, extra: int
) -> Any:
    """Where each sample of `length` tokens begins: the document's number, and how far in it."""
    import numpy as np

    lengths = np.asarray(sizes)[np.asarray(documents)]
    ends = np.cumsum(lengths)
    begins = np.arange((epochs * tokens - extra) // length + 1) * length
    at = np.searchsorted(ends, begins, side="right")
    return np.stack([at, begins - (ends - lengths)[at]], axis=1).astype(np.int32)


class Seen:
    """What is seen of a training run from outside."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"steps": []}
        self.model: list[Any] = []
        self.optimizer: Any = None

    def watch(self) -> None:
        import megatron.training.training as training

        setup, step = training.setup_model_and_optimizer, training.train_step

        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            made = setup(*args, **kwargs)
            self.model, self.optimizer = made[0], made[1]
            return made

        def train_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            gradients = (p.main_grad for p in self.parameters() if hasattr(p, "main_grad"))
            self.told["steps"].append(
                {
                    "losses": {name: float(loss).hex() for name, loss in result[0].items()},
                    "skipped": result[1],
                    "grad_norm": None if result[5] is None else float(result[5]).hex(),
                    "loss_scale": float(self.optimizer.get_loss_scale()),
                    "gradients": digest(gradients),
                }
            )
            return result

        training.setup_model_and_optimizer, training.train_step = (
            setup_model_and_optimizer,
            train_step,
        )

    def parameters(self) -> Iterable[Any]:
        return (p for chunk in self.model for p in chunk.parameters())

    def write(self, folder: Path) -> None:
        import torch
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        streams = get_cuda_rng_tracker().get_states()
        modules = [chunk.module for chunk in self.model]  # DDP keeps a list named buffers
        states = [torch.get_rng_state()]
        states += [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        self.told |= {
            "weights": digest(self.parameters()),
            "buffers": digest(b for module in modules for b in module.buffers()),
            "optimizer": digest(tensors(self.optimizer.state_dict())),
            "random": digest([*states, *(streams[name] for name in sorted(streams))]),
        }
        path = folder / f"{torch.distributed.get_rank()}.json"
        path.write_text(json.dumps(self.told, indent=1))


def tensors(state: Any) -> Iterable[Any]:
    """All tensors of a nested state, in a fixed order."""
    import torch

    if torch.is_tensor(state):
        yield state
    elif isinstance(state, dict):
        for name in sorted(state, key=str):
            yield from tensors(state[name])
    elif isinstance(state, (list, tuple)):
        for each in state:
            yield from tensors(each)


def digest(values: Iterable[Any]) -> str:
    import torch

    found = hashlib.sha256()
    for value in values:
        whole = value.detach().contiguous().reshape(-1)
        found.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        found.update(whole.view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    main()
