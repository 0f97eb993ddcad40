"""`state_of` describes a module's Python state, on which its traced chunk depends.

Megatron's modules are traced without Dynamo, so nothing else guards the state that `forward` reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlapc.state.known import settled_by
from overlapc.state.module_state import (
    INTERNAL,
    SIMPLE,
    Describer,
    Members,
    attributes_of,
    hooks_of,
    members_of,
)
from overlapc.tools.shared_changes import replaced

# Set by Megatron for each microbatch; only kernels outside of traces read them.
EACH_TIME = {"current_microbatch", "is_first_microbatch", "input_tensor"}
# Functions in a config that Megatron's schedules call, and no `forward`.
_OF_SCHEDULES = {
    "grad_scale_func",
    "moe_grad_scale_func",
    "mtp_grad_scale_func",
    "experimental_attention_variant_loss_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "finalize_model_grads_func",
    "timers",
}
UNREAD = EACH_TIME | _OF_SCHEDULES

Places = list[tuple[dict[str, Any], str]]  # attribute dicts of modules, and names in them


class State(tuple[Any, ...]):
    """A long tuple that is hashed once."""

    def __hash__(self) -> int:
        if "hashed" not in vars(self):
            self.hashed = super().__hash__()
        return self.hashed


def unplanned(members: Members) -> str | None:
    """Why no plan can run the call of a module that is made now; None: a plan can."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return (
            "torch.autograd.graph.saved_tensors_hooks (or save_on_cpu, or a checkpoint without "
            "reentry) is around the model, and a plan saves tensors itself"
        )
    if any(not isinstance(each, nn.Parameter) for each in members.parameters):
        return "other tensors stand in the place of parameters (torch.func.functional_call)"
    return None


def modes_of(members: Members) -> Any:
    """Return the state that may change within a step: training modes, `requires_grad` flags,
    autocast."""
    training = tuple([each.training for each in members.modules])
    trained = tuple([each.requires_grad for each in members.parameters])
    return training, trained, torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")


@contextlib.contextmanager
def as_trained(parameters: Sequence[Tensor], modes: Any) -> Iterator[None]:
    """Set the `requires_grad` flags of these modes for the block."""
    flags = tuple(parameter.requires_grad for parameter in parameters)

    def set_to(trained: tuple[bool, ...]) -> None:
        for parameter, flag in zip(parameters, trained, strict=True):
            parameter.requires_grad_(flag)

    set_to(modes[1])
    try:
        yield
    finally:
        set_to(flags)


def state_of(members: Members, inputs: Sequence[Places]) -> tuple[State, Describer]:
    """Return modules, parameters, hooks and attributes as a key, and what described them. It keeps
    the objects whose ids are in the key: while these live, no other object has their ids. `inputs`
    are its `tensors_of`."""
    numbers = {id(owner[name]): i for i, [(owner, name), *_] in enumerate(inputs)}
    describer = Describer(UNREAD, numbers, [*members.lasting, *members.modules])
    hooks = hooks_of(members)
    ids = tuple(map(id, describer.held))
    of_tensors = tuple([(t.dtype, tuple(t.shape), str(t.device)) for t in members.lasting])
    attributes = tuple(attributes_of(members, describer).items())
    return State((ids, of_tensors, tuple(hooks), attributes)), describer


def changed_between(one: Any, other: Any) -> list[str]:
    """The attributes in which two states differ."""
    before, after = dict(one[-1]), dict(other[-1])
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


@contextlib.contextmanager
def forward_as(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """While the block runs, a module's own `forward` is this one; None: it has that of its class.
    (No attribute is set: who watches for changes is not told.)"""
    before = vars(module).get("forward")
    _put(module, forward)
    try:
        yield
    finally:
        _put(module, before)


def _put(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


@contextlib.contextmanager
def noticed(notices: Sequence[Callable[[nn.Module, str, Any], None]]) -> Iterator[None]:
    """While the block runs, each of `notices` is told which attributes of modules are set or
    deleted."""
    sets, deletes = nn.Module.__setattr__, nn.Module.__delattr__

    def notice(module: nn.Module, name: str, value: Any) -> None:
        for each in notices:
            each(module, name, value)

    def setting(self: nn.Module, name: str, value: Any) -> None:
        sets(self, name, value)
        notice(self, name, value)

    def deleting(self: nn.Module, name: str) -> None:
        deletes(self, name)
        notice(self, name, None)

    def registering(method: Callable[..., Any]) -> Callable[..., Any]:
        def register(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            made = method(self, *args, **kwargs)
            notice(self, "", None)
            return made

        return register

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "__setattr__", setting))
        stack.enter_context(replaced(nn.Module, "__delattr__", deleting))
        for name in ("register_buffer", "register_parameter", "add_module"):
            stack.enter_context(replaced(nn.Module, name, registering(vars(nn.Module)[name])))
        yield


def tensors_of(members: Members) -> list[Places]:
    """Find the tensors that modules have as plain attributes, each with its places."""
    found: dict[int, Places] = {}
    known = {id(tensor) for tensor in members.lasting}
    for each in members.modules:
        settled = settled_by(each)
        for name, value in vars(each).items():
            if name in INTERNAL or name in EACH_TIME or type(value) in SIMPLE or name in settled:
                continue
            if isinstance(value, Tensor) and id(value) not in known:
                found.setdefault(id(value), []).append((vars(each), name))
    return list(found.values())


def settle(module: nn.Module, device: torch.device) -> None:
    """Do what modules do in their first forward, which would be a change of the model while it is
    traced: rotary embeddings move their frequencies to the device, and routers make the bias of
    experts float32 again, which the model's cast to bf16 or fp16 was not to reach."""
    for each in members_of(module).modules:
        if _has(each, "_maintain_float32_expert_bias"):
            each._maintain_float32_expert_bias()
        if not _has(each, "get_emb"):
            continue
        for name in ("inv_freq", "inv_freq_extra", "inv_freq_inter"):
            own = vars(each).get(name)
            if isinstance(own, Tensor) and own.device != device:
                setattr(each, name, own.to(device))


def _has(module: nn.Module, name: str) -> bool:
    """`hasattr`, without asking its parameters and buffers, which takes long."""
    return name in vars(module) or hasattr(type(module), name)
