"""What stands in for CUDA so that megatron-core trains on CPU and gloo: for tests alone.

Call `use(version)` before anything imports megatron, in a process of its own: torch is changed.
Where there is a GPU nothing stands in for it: all ranks share the first one, over gloo.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import logging
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def folder(version: str) -> Path | None:
    """Where this version of megatron-core lies: in the folder that OVERLAPC_MEGATRON names, or
    where the Makefile puts it."""
    places = [os.environ.get("OVERLAPC_MEGATRON"), ROOT / ".venv" / "megatron"]
    found = [Path(place) / version for place in places if place]
    return next((path for path in found if (path / "megatron" / "core").is_dir()), None)


def need(version: str) -> None:
    """Skip the test where this version of megatron-core is not installed."""
    if folder(version) is None:
        pytest.skip(f"megatron-core {version} is not installed: see the Makefile")


def use(version: str, fused: bool = False, te: str = "") -> Any:
    """Import megatron.core of this version, on CPU; what it fuses by `torch.compile` may be
    compiled, to kernels that give other numbers than its ops. `te`: with a stand-in for this
    release of Transformer Engine, and one for DeepEP."""
    path = folder(version)
    assert path is not None, f"megatron-core {version} is not installed"
    sys.path.insert(0, str(path))
    if te:
        os.environ["OVERLAPC_TE"] = te
        for name in ("te_stand_in", "stand_ins"):
            sys.path.insert(0, str(Path(__file__).parent / name))
    return stand_in(fused)


def stand_in(fused: bool = False) -> Any:
    """Import the megatron.core that is found, on CPU, or on the GPU that all ranks share."""
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        share_gpu()
    else:
        _devices()
        _streams()
        _types()
    _triton()
    _fused_kernel()
    real_compile = torch.compile
    # megatron.core.jit fuses by torch.compile when it is imported.
    compiled = functools.partial(real_compile, backend=kernels)
    make = compiled if fused else (lambda function: function)
    torch.compile = lambda model=None, **_: make if model is None else make(model)
    try:
        import megatron.core
    finally:
        torch.compile = real_compile
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        _random()
    _experts()
    _recompute()
    _norm()
    _shards()
    return megatron.core


def kernels(graph: Any, _: Any) -> Any:
    """A backend of torch.compile, for kernels that round otherwise than the ops of the graph do, by
    more than is lost later: what runs without them is seen."""

    def run(*args: Any) -> Any:
        return tuple(
            out * (1 + 2**-10) if isinstance(out, torch.Tensor) and out.is_floating_point() else out
            for out in graph(*args)
        )

    return run


def device() -> torch.device:
    """Where models and batches are."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else CPU


def share_gpu() -> None:
    """All ranks use the first GPU; its kernels are the deterministic ones."""
    torch.cuda.set_device(0)
    chosen = torch.cuda.set_device
    torch.cuda.set_device = lambda *_: chosen(0)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist._coalescing_manager = _one_by_one
    _through_host()


@contextlib.contextmanager
def _one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
    """gloo coalesces nothing on a GPU: each collective runs at the end, alone."""
    group = group or c10d._get_default_group()
    c10d._world.pg_coalesce_state.setdefault(group, [])
    manager = c10d._CoalescingManager()
    yield manager
    for each in c10d._world.pg_coalesce_state.pop(group):
        given = [each.tensor] if each.dst_tensor is None else [each.dst_tensor, each.tensor]
        named = {} if each.redop is None else {"op": each.redop}
        each.op(*given, group=group, **named)


def _through_host() -> None:
    """gloo sends and receives nothing on a GPU."""
    send, receive = c10d.isend, c10d.irecv

    def isend(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return send(tensor.cpu(), *args, **kwargs)

    def irecv(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_cuda:
            return receive(tensor, *args, **kwargs)
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Arriving(receive(host, *args, **kwargs), host, tensor)

    for module in (c10d, dist):  # a P2POp's op is compared with c10d's own
        module.isend, module.irecv = isend, irecv


class _Arriving:
    """A message that comes to the host first."""

    def __init__(self, work: Any, host: Any, target: Any) -> None:
        self.work, self.host, self.target = work, host, target

    def wait(self, *_: Any) -> bool:
        self.work.wait()
        self.target.copy_(self.host)
        return True


def _devices() -> None:
    torch.cuda.current_device = lambda: CPU

    def on_cpu(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device == "cuda" or getattr(device, "type", None) == "cuda":
                kwargs["device"] = CPU
            return make(*args, **kwargs)

        return made

    for name in ("zeros", "ones", "empty", "tensor", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_, **__: None


class _Stream:
    """A stream, or an event of one: all work is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


def _streams() -> None:
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_, **__: 0
    torch.cuda.nvtx.range = contextlib.nullcontext


def _types() -> None:
    """Optimizers compare `parameter.type()` with "torch.cuda.FloatTensor"."""
    real = torch.Tensor.type

    def kind(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        plain = isinstance(found, str) and "cuda" not in found
        return found.replace("torch.", "torch.cuda.") if plain else found

    torch.Tensor.type = kind


def _triton() -> None:
    """From 0.18 on schedules.py imports kernels of triton, which is not declared. A stand-in for
    triton itself would make other modules believe that it is there."""
    if importlib.util.find_spec("triton") is not None:
        return
    moe = "megatron.core.transformer.moe"
    kernels: Any = types.ModuleType(f"{moe}.ops.paged_stash")
    kernels.GLOBAL_BLOCK_SIZE = 1024
    kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
    sys.modules[kernels.__name__] = kernels
    spec = importlib.util.find_spec("megatron")
    roots = [Path(root) / "core/transformer/moe" for root in spec.submodule_search_locations or ()]
    for root in roots:
        if (root / "paged_stash.py").exists() and not (root / "ops/paged_stash.py").exists():
            stash: Any = types.ModuleType(f"{moe}.paged_stash")  # as 0.18 has it
            for name in ("reset", "init_chunk_handler", "group_commit", "group_start"):
                setattr(stash, f"paged_stash_{name}", lambda *a, **_: a[0] if a else None)
            stash.get_paged_stash_context = lambda *_, **__: contextlib.nullcontext()
            sys.modules[stash.__name__] = stash


def _fused_kernel() -> None:
    """apex's kernel, which multiplies and adds in float32."""

    def add(given: Any, grad_output: Any, main_grad: Any) -> None:
        main_grad.add_(grad_output.t().float() @ given.float())

    kernels: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    kernels.wgrad_gemm_accum_fp32 = kernels.wgrad_gemm_accum_fp16 = add
    sys.modules[kernels.__name__] = kernels


def _random() -> None:
    import megatron.core.tensor_parallel.random as random

    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    # Without CUDA it puts the state off until there is one.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _experts() -> None:
    import megatron.core.transformer.moe.moe_utils as utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    if not hasattr(utils, "te_general_gemm"):  # 0.16: it is read where it was not imported
        utils.te_general_gemm = None
    if torch.cuda.is_available():
        return

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = moved


def _recompute() -> None:
    import megatron.core.tensor_parallel as package
    import megatron.core.tensor_parallel.random as random

    real = random.CheckpointWithoutOutput.__init__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.fp8 = False  # it takes `fp8=False` for True

    random.CheckpointWithoutOutput.__init__ = begin
    checkpoint = random.checkpoint

    def checkpointed(function: Any, distribute: bool, *args: Any) -> Any:
        """A function that returns a parameter itself would recurse for ever in the backward."""

        def call(*given: Any) -> Any:
            found = function(*given)
            if isinstance(found, tuple):
                return tuple(map(_alias, found))
            return _alias(found)

        return checkpoint(call, distribute, *args)

    random.checkpoint = package.checkpoint = checkpointed


def _alias(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.nn.Parameter) else value


def _norm() -> None:
    """WrappedTorchNorm refuses sequence parallelism, for which it lacks a mark alone."""
    import megatron.core.transformer.torch_norm as torch_norm

    real = torch_norm.WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, *a: Any, **k: Any) -> Any:
        if not config.sequence_parallel:
            return real(cls, config, hidden_size, eps, *a, **k)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = real(cls, plain, hidden_size, eps, *a, **k)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    torch_norm.WrappedTorchNorm.__new__ = new


def _shards() -> None:
    """0.12 cannot quantise no parameters without Transformer Engine."""
    from megatron.core import fp8_utils

    real = fp8_utils._quantize_param_shard_impl

    def quantize(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if parameters:
            real(parameters, *args, **kwargs)

    fp8_utils._quantize_param_shard_impl = quantize
