"""`Lowered` stands in for FSDP2's hooks while a call of a sharded model is traced or runs planned.

    lowered = Lowered(model)
    with lowered.aside():             # hooks gather in the graph, modules read full parameters
        loss = planned(batch)
    loss.backward()                   # gradients arrive in the sharded parameters

Nothing is wrapped: outside of the block the model is FSDP2's own, and its parameters stay the
DTensors that optimizers, clipping and checkpoints know. Within it

- the functions of FSDP2's hooks are replaced where they are, so their order stays;
- modules read a full parameter through a property, while `_parameters` keeps the shard.

Full parameters live from their group's first use to the end of the root's forward: a module that is
called twice is gathered and reduced once, as in FSDP2. Whether they are kept for the backward or
gathered again is the plan's choice, and changes no bit.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from overlapc.core.errors import CaptureError

_SLOTS = "_overlapc_slots"  # in a module's __dict__: name -> (group, index)
_WRAPPER = "CheckpointWrapper"
_SIDE_EFFECT = "Unsafe side effect"  # Dynamo's words for a hook that gathers in a checkpoint
_TOGETHER = (
    "FSDP2 reduces gradients of several backwards together (set_requires_gradient_sync(False))"
)


class Lowered:
    """The parts of a model that FSDP2 shards, and what takes the place of its hooks. False if there
    are none."""

    def __init__(self, model: nn.Module, by_engine: bool = False) -> None:
        """`by_engine`: autograd's engine runs each backward, and at its end reduces what is left of
        backwards before."""
        self._model, self._by_engine = model, by_engine
        self._roots: list[_Root] = []
        self._open = False  # may the backward of the last planned call still come?
        self._passed_over = False  # has FSDP2 run a call since, for that reason?
        self.look()

    def __bool__(self) -> bool:
        return bool(self._roots)

    @property
    def version(self) -> int:
        """Changes when graphs are given other leaves."""
        return sum(root.version for root in self._roots)

    def look(self) -> None:
        """Look again which parts are sharded, if none was."""
        if not self._roots:
            self._roots = [_Root(*found, self._by_engine) for found in _outermost(self._model)]

    def gather_first(self, error: Exception) -> bool:
        """Have the root gather all, if no hook may because of a checkpoint in the model's code, as
        the error says; False if that cannot help."""
        roots = [root for root in self._roots if not root.gathers_first]
        if _SIDE_EFFECT not in str(error) or not roots:
            return False
        for root in roots:
            root.gather_first()
        return True

    def reduce(self, now: bool) -> None:
        """Have backwards reduce gradients, or leave these to a later one."""
        for root in self._roots:
            root.module.set_requires_gradient_sync(now)

    @contextmanager
    def aside(self, whole: bool = False) -> Iterator[None]:
        """While the block runs, gathers and reductions are ops of the graph. CaptureError for a
        model or a moment at which they cannot be. `whole`: each backward reduces its gradients."""
        for root in self._roots:
            root.prepare(whole)
        with ExitStack() as stack:
            for root in self._roots:
                stack.enter_context(root.swapped())
            yield

    @property
    def is_open(self) -> bool:
        """Has the last planned call had no backward yet? Then FSDP2 runs this call: what both calls
        give to parameters outside of blocks it would add up, and reduce the sum. (Ranks must not
        judge by what they keep: they would go apart.)"""
        was_open = self._open and not self._delivered
        if was_open:
            self._open, self._passed_over = False, True
        return was_open

    def refuse_twice(self) -> None:
        """Raise if the call before the last has had its backward late: together with the last."""
        if self._passed_over and self._delivered:
            raise CaptureError(
                "it was called again before a backward of the call before; FSDP2 reduces gradients "
                "of both together, and the planned call's alone: the last step may differ by a "
                "rounding, later ones do not. Expected evaluation under torch.no_grad()"
            )
        self._open = self._passed_over = False

    @property
    def _delivered(self) -> bool:
        return any(root.delivered for root in self._roots)

    def ran(self) -> None:
        """A planned call has run: its backward may come."""
        self._open = True

    def check(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Raise if a graph of Dynamo's with these inputs is not what FSDP2 runs."""
        self.refuse_read(inputs)
        for root in self._roots:
            if targets := root.adds_up:
                refuse_called_again(graph, inputs, targets)

    def refuse_read(self, tensors: Iterable[Any]) -> None:
        """Raise if a graph reads a shard where the model means a full parameter."""
        if not self._roots:
            return
        known = {id(tensor) for tensor in tensors}
        for root in self._roots:
            if name := root.read(known):
                raise CaptureError(
                    f"the model reads {name}, which FSDP2 shards, otherwise than as an attribute "
                    "of its module (in parameters(), say)"
                )


class _Root:
    """A module with FSDP2's state, that no other is around, and its groups."""

    def __init__(self, module: nn.Module, state: Any, by_engine: bool) -> None:
        self.module, self._state, self._by_engine = module, state, by_engine
        self._queued = False  # will the engine call `finish`?
        self._groups: list[Any] = []
        self._kind: Any = None
        self.gathers_first = _checkpoints(module)
        self.version = 0
        self._swaps: list[tuple[dict[int, Any], int, Any, Any]] = []  # table, key, theirs, ours
        self._readers: dict[nn.Module, tuple[type, type, dict[str, Any]]] = {}

    def gather_first(self) -> None:
        self.gathers_first, self._kind = True, None

    def prepare(self, whole: bool) -> None:
        """Make leaves and hooks, if what they depend on has changed."""
        from overlapc.sharded.group import kind_of, refuse_accumulation

        if self._state._is_root is False:
            raise CaptureError(
                "FSDP2 shards a model around this one; expected the model on which fully_shard was "
                "called last"
            )
        if not hasattr(self._state, "_fsdp_param_groups"):
            raise CaptureError(
                f"FSDP2 of torch {torch.__version__} has other parts than overlapc knows; expected "
                "torch 2.13"
            )
        self._state._lazy_init()
        states = self._state._state_ctx.all_states
        theirs = [group for state in states for group in state._fsdp_param_groups]
        kind = [(id(group), kind_of(group)) for group in theirs]
        if kind != self._kind:
            self._lower(states)
            self._kind = kind
            self.version += 1
        self._queued = False  # a backward may have failed
        for group in self._groups:
            refuse_accumulation(group.group, whole)
            group.refresh()
            group.begin()
            group.heard.clear()

    def finish(self) -> None:
        """Reduce what backwards before have left and no graph has reduced."""
        self._queued = False
        for group in self._groups:
            group.reduce_waiting()

    def _came(self) -> None:
        """A gradient has come: more may wait when the backward ends."""
        if self._by_engine and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        for table, key, _, ours in self._swaps:
            table[key] = ours
        for module, (_, reads, slots) in self._readers.items():
            module.__class__ = reads
            module.__dict__[_SLOTS] = slots
        try:
            yield
        finally:
            for table, key, theirs, _ in self._swaps:
                table[key] = theirs
            for module, (kind, _, _) in self._readers.items():
                module.__class__ = kind
                del module.__dict__[_SLOTS]
            for group in self._groups:
                group.let_go()

    @property
    def adds_up(self) -> set[int]:
        """What gradients of parts of the model come to that are added up over several backwards."""
        outer = self._state._fsdp_param_groups
        groups = [g for g in self._groups if not g.reduces_alone and g.group not in outer]
        return {id(each) for group in groups for each in group.targets}

    @property
    def delivered(self) -> bool:
        """Has a gradient come since the last call?"""
        return any(group.heard for group in self._groups)

    def read(self, known: Container[int]) -> str:
        """The name of a sharded parameter among the tensors of these ids, or ""."""
        params = (each for group in self._groups for each in group.group.fsdp_params)
        found = (each._param_fqn for each in params if id(each.sharded_param) in known)
        return str(next(found, ""))

    def _lower(self, states: Any) -> None:
        from overlapc.sharded.group import Group

        for group in self._groups:
            group.close()
        self._kind, self._groups, self._swaps, self._readers = None, [], [], {}
        for name, module in self.module.named_modules():
            if module._compiled_call_impl is not None:
                raise CaptureError(
                    f"{name or 'the model'} is compiled by itself (module.compile()), and its "
                    "kernels would be lost"
                )
        theirs = [group for state in states for group in state._fsdp_param_groups]
        came = weakref.WeakMethod(self._came)  # hooks that hold the root would never be freed

        def tell() -> None:
            if (call := came()) is not None:
                call()

        made = {group: Group(group, number, tell) for number, group in enumerate(theirs)}
        self._groups = list(made.values())
        run = _Forward(self._groups)
        self.gathers_first |= _checkpoints(self.module)
        for state in states:
            mine = [made[group] for group in state._fsdp_param_groups]
            if self.gathers_first and state is self._state:
                mine = self._groups
            hooks = _Hooks(run, state, mine, state is self._state)
            self._swaps += _swaps(state, hooks.before, hooks.behind)
        slots: dict[nn.Module, dict[str, Any]] = {}
        for group in self._groups:
            for i, param in enumerate(group.group.fsdp_params):
                info = param._module_info
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                for module, name in ((info.module, info.param_name), *shared):
                    slots.setdefault(module, {})[name] = group, i
        self._readers = {
            module: (type(module), _reading_as(type(module), named), named)
            for module, named in slots.items()
        }


def _swaps(state: Any, before: Any, behind: Any) -> Iterator[tuple[dict[int, Any], int, Any, Any]]:
    """FSDP2's hooks of a state: table, key, and whose takes the place of whose."""
    pair = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    for handle in dict.fromkeys(pair):  # one of several for `fully_shard([a, b])`
        for each in getattr(handle, "handles", (handle,)):
            table = each.hooks_dict_ref()
            is_before = any(table is module._forward_pre_hooks for module in state._modules)
            yield table, each.id, table[each.id], before if is_before else behind


class _Forward:
    """A forward that runs: whose it is, and what it has gathered."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups
        self.root: Any = None

    def clear(self) -> None:
        for group in self.groups:
            group.full = None
        self.root = None


class _Hooks:
    """What a state of FSDP2 does before and behind the forward of its modules, for Dynamo."""

    def __init__(self, run: _Forward, state: Any, groups: list[Any], is_root: bool) -> None:
        self.run, self.groups, self.is_root = run, groups, is_root
        policy = state._mp_policy
        self.given = policy.param_dtype if policy.cast_forward_inputs else None
        self.made = policy.output_dtype

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.is_root or self.run.root is None:  # or a part of the model is called by itself
            self.run.clear()
            self.run.root = self
        if self.given is not None:
            args, kwargs = _cast(self.given, args), _cast(self.given, kwargs)
        for group in self.groups:
            group.gather()
        return args, kwargs

    def behind(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self.run.root is self:
            self.run.clear()
        return output if self.made is None else _cast(self.made, output)


def _cast(dtype: torch.dtype, values: Any) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
    from torch.distributed.utils import _apply_to_tensors

    cast = functools.partial(_cast_fp_tensor, dtype)

    def apply(value: Any) -> Any:
        if isinstance(value, (int, float, str)):
            return value  # Dynamo does not look for attributes of a symbolic number
        if type(value) in (list, tuple):
            return type(value)([apply(each) for each in value])
        if type(value) is dict:
            return {key: apply(each) for key, each in value.items()}
        return _apply_to_tensors(cast, value)

    return apply(values)


def _reading_as(kind: Any, named: Iterable[str]) -> type:
    return _reading(kind, tuple(sorted(named)))


@functools.cache
def _reading(kind: type, names: tuple[str, ...]) -> type:
    """A class like `kind` that finds full parameters under these names."""

    def read(name: str) -> property:
        def get(self: Any) -> Any:
            group, i = self.__dict__[_SLOTS][name]
            return self._parameters[name] if group.full is None else group.full[i]

        def put(self: Any, value: Any) -> None:
            self._parameters[name] = value

        return property(get, put)

    space = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: Any = type(kind)
    found: type = made(kind.__name__, (kind,), {**space, **{name: read(name) for name in names}})
    return found


def refuse_called_again(
    graph: fx.GraphModule, inputs: Sequence[Any], targets: Container[int]
) -> None:
    """Raise if a graph of Dynamo's adds up gradients of the targets in another order than FSDP2,
    which adds those of several calls of a module one by one."""
    places = graph.graph.find_nodes(op="placeholder")
    mine = [node for node, value in zip(places, inputs, strict=True) if id(value) in targets]
    gathers = dict.fromkeys(user for node in mine for user in node.users)
    for full in (full for gather in gathers for full in gather.users):
        if _several(full.users):
            raise CaptureError(f"{_TOGETHER}, and one of its modules is called several times")


def _several(users: Iterable[fx.Node]) -> bool:
    """Is one module called several times among the users of its parameter? (A checkpoint's call is
    one node; further calls of a module have numbers behind an "@".)"""
    calls: dict[str, set[str]] = {}
    for user in users:
        stack = list(user.meta.get("nn_module_stack", {}))
        if "checkpoint" in str(user.target) or not stack:
            calls.setdefault("", set()).add(user.name)
        else:
            calls.setdefault(stack[-1].partition("@")[0], set()).add(stack[-1])
    return any(len(each) > 1 for each in calls.values()) or (len(calls) > 1 and "" in calls)


def _checkpoints(model: nn.Module) -> bool:
    """Does the model checkpoint blocks? No hook may gather there, since Dynamo takes no side
    effects in a checkpoint: the root gathers all, and the plan may move that."""
    return any(
        any(kind.__name__ == _WRAPPER for kind in type(module).__mro__)
        or getattr(module, "gradient_checkpointing", False)
        for module in model.modules()
    )


def _outermost(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The modules with FSDP2's state that are in no other one, and their states."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is None:  # who does not import it has sharded nothing
        return []
    found: list[tuple[str, nn.Module, Any]] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{other}." if other else "") for other, _, _ in found):
            continue
        if (state := fsdp._get_module_fsdp_state(module)) is not None:
            found.append((name, module, state))
    return [(module, state) for _, module, state in found]
