"""Megatron-Bridge's own `train()` on CPU and gloo: loop and callbacks are Bridge's; what else they
import of it (checkpoints, logs, profiling) does nothing here."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.megatron.models import STEPS, Trained, batches

FOLDER = Path(os.environ.get("OVERLAPC_MEGATRON_BRIDGE", "nowhere")) / "src/megatron/bridge"
ITS_OWN = ("megatron.bridge.training.train", "megatron.bridge.training.callbacks")
_ABSENT = ("megatron.bridge", "modelopt")


def train(trained: Trained, steps: int, callbacks: list[Any] | None) -> None:
    """Train by Bridge's loop, with the optimizer of `trained`."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import rerun_state_machine as rerun
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        find_also(ITS_OWN)
    loop, own = map(importlib.import_module, ITS_OWN)
    layout, groups = trained.layout, ProcessGroupCollection.use_mpu_process_groups()
    replicas = groups.dp.size()
    calculator.destroy_num_microbatches_calculator()
    samples = layout.batch * layout.microbatches * replicas
    calculator.init_num_microbatches_calculator(0, None, samples, layout.batch, replicas)
    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.DISABLED)
    shape = layout.batch, trained.sequence
    each = [batches(number, layout.microbatches, shape) for number in range(steps)]
    data = iter([*itertools.chain.from_iterable(each)])
    loop.train(
        functools.partial(STEPS[layout.model], layout.tokens),
        trained.models,
        trained.optimizer,
        _Off(step=lambda increment: None),
        data,
        None,
        _state(trained, steps, replicas),
        _Off(finalize_async_saves=lambda **_: None),
        groups,
        callback_manager=own.normalize_callbacks(callbacks),
    )


class _Off(SimpleNamespace):
    """Settings, of which all that are not given are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _state(trained: Trained, steps: int, replicas: int) -> Any:
    layout = trained.layout
    ddp = _Off(**(layout.ddp or {}))
    config = _Off(
        model=_Off(
            seq_length=trained.sequence, virtual_pipeline_model_parallel_size=layout.vpp or None
        ),
        train=_Off(
            train_iters=steps,
            iterations_to_skip=(),
            micro_batch_size=layout.batch,
            empty_unused_memory_level=0,
        ),
        optimizer=ddp,
        ddp=ddp,
        logger=_Off(skip_train_metrics_log=True),
        **{name: _Off() for name in ("validation", "dataset", "dist", "checkpoint", "rerun")},
        data_parallel_size=replicas,
    )
    timer = SimpleNamespace(start=lambda **_: None, stop=lambda: None)
    done = _Off(
        step=0,
        floating_point_operations_so_far=0,
        consumed_train_samples=0,
        skipped_train_samples=0,
    )
    return _Off(cfg=config, train_state=done, timers=lambda *_, **__: timer)


def find_also(names: Iterable[str]) -> None:
    """Bridge's own modules of these names are imported as they are."""
    sys.meta_path.insert(0, _Finder(names))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules of Bridge's. In others each name is a function that does nothing."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = {*names}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in self.names:
            file = FOLDER.joinpath(*name.split(".")[2:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.startswith(_ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


_GIVEN: dict[str, Any] = {
    "prepare_forward_step_func": lambda step, _: step,
    "resolve_global_flops_runtime_stats": lambda *_, **__: [0] * 5,
    "num_floating_point_operations": lambda *_, **__: 0,
    "logit_dtype_kwarg": lambda *_: {},
}


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _GIVEN.get(name) or _Nothing()


class _Nothing:
    """A function, or a module of functions."""

    def __call__(self, *_: Any, **__: Any) -> None: ...

    __getattr__ = _Empty.__getattr__
