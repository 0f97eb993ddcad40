"""`state_of` describes a module's Python state, on which its traced chunk depends.

Megatron's modules are traced without Dynamo, so nothing else guards the state that `forward` reads.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_INTERNAL = set(vars(nn.Module())) - {"training"}
# Set by Megatron for each microbatch; only kernels outside of traces read them.
_EACH_TIME = {"current_microbatch", "is_first_microbatch", "input_tensor"}
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


def modes_of(module: nn.Module) -> Any:
    """Return the state that may change within a step: training modes, `requires_grad` flags,
    autocast."""
    training = tuple(each.training for each in module.modules())
    trained = tuple(each.requires_grad for each in module.parameters())
    return training, trained, torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")


def state_of(module: nn.Module) -> tuple[Any, list[Any]]:
    """Return modules, parameters, hooks and attributes as a key, and the objects whose ids are in
    the key: while these live, no other object has their ids."""
    held: list[Any] = [*module.parameters(), *module.buffers(), *module.modules()]
    hooks = [len(each) for each in hooks_of_all().values()]
    hooks += [len(getattr(each, kind)) for each in module.modules() for kind in _HOOKS]
    for parameter in module.parameters():
        hooks += [len(getattr(parameter, kind, None) or ()) for kind in _OF_PARAMETERS]
    ids = tuple(map(id, held))
    inputs = {id(owner[name]): i for i, [(owner, name), *_] in enumerate(tensors_of(module))}
    return (ids, tuple(hooks), tuple(attributes_of(module, held, inputs).items())), held


def hooks_of_all() -> dict[str, Mapping[int, Any]]:
    """The hooks on every module there is, by kind."""
    return {f"_global{kind}": getattr(torch.nn.modules.module, f"_global{kind}") for kind in _HOOKS}


def attributes_of(
    module: nn.Module, held: list[Any], inputs: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """Return attributes of modules and of their classes under their names: plain ones by value,
    tensors and functions by id. Objects given by id are added to `held`, except tensors that have a
    number among the `inputs`."""
    found = _of_classes(module, held)
    configs: dict[int, str] = {}
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if name in _INTERNAL or name in _EACH_TIME:
                continue
            key = f"{path}.{name}" if path else name
            if is_dataclass(value) and not isinstance(value, type):
                if id(value) not in configs:
                    configs[id(value)] = repr(_of_config(value, held))
                found[key] = configs[id(value)]
            elif is_plain(value):
                found[key] = repr(value)
            elif id(value) in (inputs or {}):
                found[key] = "input", (inputs or {})[id(value)]
            elif isinstance(value, Tensor) or (
                callable(value) and not isinstance(value, nn.Module)
            ):
                held.append(value)
                found[key] = id(value)
    return found


def _of_config(config: Any, held: list[Any]) -> dict[str, Any]:
    """What a dataclass holds, declared or not: plain values, and functions by id."""
    found: dict[str, Any] = {}
    declared = {field.name: getattr(config, field.name, None) for field in fields(config)}
    for name, value in (declared | getattr(config, "__dict__", {})).items():
        if is_plain(value):
            found[name] = value
        elif callable(value) and name not in _OF_SCHEDULES:
            held.append(value)
            found[name] = id(value)
    return found


def classes_of(module: nn.Module) -> list[type]:
    """The classes of all modules, and those that they inherit from."""
    kinds = {type(each): None for each in module.modules()}
    found = dict.fromkeys(kind for one in kinds for kind in one.__mro__ if kind is not object)
    return list(found)


def _of_classes(module: nn.Module, held: list[Any]) -> dict[str, Any]:
    """What classes hold: plain values, and methods by id. (Two classes may have one name.)"""
    found: dict[str, Any] = {}
    for kind in classes_of(module):
        for name, value in vars(kind).items():
            key = f"{kind.__qualname__}.{name}"
            if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                held.append(value)
                found[key] = (*found.get(key, ()), id(value))
            elif is_plain(value) and not name.startswith("__"):
                found[key] = (*found.get(key, ()), repr(value))
    return found


def tensors_of(module: nn.Module) -> list[Places]:
    """Find the tensors that modules have as plain attributes, each with its places."""
    found: dict[int, Places] = {}
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for each in module.modules():
        for name, value in vars(each).items():
            if isinstance(value, Tensor) and name not in _EACH_TIME and id(value) not in known:
                found.setdefault(id(value), []).append((vars(each), name))
    return list(found.values())


def is_plain(value: Any) -> bool:
    """Can `repr` tell this value from another?"""
    if isinstance(value, Mapping):
        return all(is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)
