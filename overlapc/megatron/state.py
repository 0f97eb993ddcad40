"""`state_of` describes a module's Python state, on which its traced chunk depends.

Megatron's modules are traced without Dynamo, so nothing else guards the state that `forward` reads.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from overlapc.passes.shared_changes import replaced

PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DEEPEST = 4  # containers in containers that are looked into
_INTERNAL = set(vars(nn.Module())) - {"training"}
# Set by Megatron for each microbatch; only kernels outside of traces read them.
EACH_TIME = {"current_microbatch", "is_first_microbatch", "input_tensor"}
_UNREAD = _INTERNAL | EACH_TIME
# They make modules, and say nothing of what one computes; the first torch.compile of a process
# replaces those of nn.Module.
_MAKERS = {"__init__", "__setstate__"}
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

Places = list[tuple[dict[str, Any], str]]  # attribute dicts of modules, and names in them
_SIMPLE = {type(None), bool, int, float, str}


class State(tuple[Any, ...]):
    """A long tuple that is hashed once."""

    def __hash__(self) -> int:
        if "hashed" not in vars(self):
            self.hashed = super().__hash__()
        return self.hashed


class Members(NamedTuple):
    """A module's parts, each once, in the order of PyTorch's own walks, which take ten times as
    long and are many: a step looks at all of them for each microbatch."""

    modules: list[nn.Module]
    paths: list[str]  # of the modules
    parameters: list[Tensor]
    buffers: list[Tensor]

    @property
    def lasting(self) -> list[Tensor]:
        return [*self.parameters, *self.buffers]


def members_of(module: nn.Module) -> Members:
    modules: dict[int, nn.Module] = {}
    paths = []
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    left = [("", module)]
    while left:
        path, each = left.pop()
        if id(each) in modules:
            continue
        modules[id(each)] = each
        paths.append(path)
        for found, named in ((parameters, each._parameters), (buffers, each._buffers)):
            for tensor in named.values():
                if tensor is not None and id(tensor) not in found:
                    found[id(tensor)] = tensor
        if each._modules:
            begin = f"{path}." if path else ""
            children = reversed(each._modules.items())
            left += [(begin + name, child) for name, child in children if child is not None]
    return Members([*modules.values()], paths, [*parameters.values()], [*buffers.values()])


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


def state_of(members: Members, inputs: Sequence[Places]) -> tuple[State, list[Any]]:
    """Return modules, parameters, hooks and attributes as a key, and the objects whose ids are in
    the key: while these live, no other object has their ids. `inputs` are its `tensors_of`."""
    held: list[Any] = [*members.lasting, *members.modules]
    hooks = [len(each) for each in hooks_of_all().values()]
    hooks += [len(getattr(each, kind)) for each in members.modules for kind in _HOOKS]
    for parameter in members.parameters:
        hooks += [len(getattr(parameter, kind, None) or ()) for kind in _OF_PARAMETERS]
    ids = tuple(map(id, held))
    of_tensors = tuple([(t.dtype, tuple(t.shape), str(t.device)) for t in members.lasting])
    numbers = {id(owner[name]): i for i, [(owner, name), *_] in enumerate(inputs)}
    attributes = tuple(attributes_of(members, held, numbers).items())
    return State((ids, of_tensors, tuple(hooks), attributes)), held


def changed_between(one: Any, other: Any) -> list[str]:
    """The attributes in which two states differ."""
    before, after = dict(one[-1]), dict(other[-1])
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def hooks_of_all() -> dict[str, Mapping[int, Any]]:
    """The hooks on every module there is, by kind."""
    return {f"_global{kind}": getattr(torch.nn.modules.module, f"_global{kind}") for kind in _HOOKS}


def attributes_of(
    members: Members, held: list[Any], inputs: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """Return attributes of modules and of their classes under their names: plain ones by value,
    tensors and functions by id. Objects given by id are added to `held`, except tensors that have a
    number among the `inputs`."""
    found = _of_classes(members, held)
    configs: dict[int, str] = {}
    for path, each in zip(members.paths, members.modules, strict=True):
        begin = f"{path}." if path else ""
        for name, value in vars(each).items():
            if name in _UNREAD:
                continue
            if type(value) in _SIMPLE:
                found[begin + name] = repr(value)
            elif id(value) in (inputs or {}):
                found[begin + name] = "input", (inputs or {})[id(value)]
            elif is_dataclass(value) and not isinstance(value, type):
                if id(value) not in configs:
                    configs[id(value)] = repr(_described(value, held))
                found[begin + name] = configs[id(value)]
            elif (said := _described(value, held)) is not None:
                found[begin + name] = said
    return found


def _described(value: Any, held: list[Any], depth: int = 0) -> Any:
    """What a plain value is, what containers and dataclasses hold, declared or not, and which
    object a tensor or function is; None of other objects."""
    if isinstance(value, nn.Module) or depth > _DEEPEST:
        return None
    if type(value) in _SIMPLE:
        return repr(value)
    if is_plain(value) or isinstance(value, (np.generic, slice, range)):
        return repr(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return str(value.dtype), value.shape, hash(value.tobytes())
    if isinstance(value, Tensor) or callable(value):
        held.append(value)
        return id(value)
    if is_dataclass(value):
        declared = {field.name: getattr(value, field.name, None) for field in fields(value)}
        value = {
            name: each
            for name, each in (declared | getattr(value, "__dict__", {})).items()
            if not (callable(each) and name in _OF_SCHEDULES)
        }
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(_described(each, held, depth + 1) for each in value)
    return None


@contextlib.contextmanager
def noticed(notice: Callable[[nn.Module, str, Any], None]) -> Iterator[None]:
    """While the block runs, `notice` is told which attributes of modules are set or deleted."""
    sets, deletes = nn.Module.__setattr__, nn.Module.__delattr__

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


def classes_of(members: Members) -> list[type]:
    """The classes of all modules, and those that they inherit from."""
    kinds = {type(each): None for each in members.modules}
    found = dict.fromkeys(kind for one in kinds for kind in one.__mro__ if kind is not object)
    return list(found)


def _of_classes(members: Members, held: list[Any]) -> dict[str, Any]:
    """What classes hold: plain values, and methods by id. (Two classes may have one name.)"""
    found: dict[str, Any] = {}
    for kind in classes_of(members):
        for name, value in vars(kind).items():
            if name in _MAKERS:
                continue
            key = f"{kind.__qualname__}.{name}"
            if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                held.append(value)
                found[key] = (*found.get(key, ()), id(value))
            elif not name.startswith("__") and (said := _described(value, held)) is not None:
                found[key] = (*found.get(key, ()), said)
    return found


def tensors_of(members: Members) -> list[Places]:
    """Find the tensors that modules have as plain attributes, each with its places."""
    found: dict[int, Places] = {}
    known = {id(tensor) for tensor in members.lasting}
    for each in members.modules:
        for name, value in vars(each).items():
            if name in _UNREAD or type(value) in _SIMPLE:
                continue
            if isinstance(value, Tensor) and id(value) not in known:
                found.setdefault(id(value), []).append((vars(each), name))
    return list(found.values())


def is_plain(value: Any, depth: int = 0) -> bool:
    """Can `repr` tell this value from another?"""
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, frozenset)):
        return depth <= _DEEPEST and all(is_plain(each, depth + 1) for each in value)
    return isinstance(value, PLAIN)
