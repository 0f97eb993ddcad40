"""`Replay` runs a joint graph node by node on real inputs, as often as wanted, and changes nothing.

A replay behaves like a training step: values die after their last reader, and mutation happens (on
copies of the caller's tensors). Every run draws the same random numbers and so has the same
data-dependent sizes. Measurements are watchers: `Watcher.before` and `after` are called around each
node.

A graph that is measured to be recomputed may not fit in memory uncut. Then a replay drops what only
the backward will read, and reads noise in its place: an op takes as long on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from overlapc.core.errors import CaptureError, OverlapcError
from overlapc.core.ir import Value
from overlapc.passes.nodes import is_folded_getitem, is_start
from overlapc.passes.opaque.op import groups_within
from overlapc.passes.storages import hint
from overlapc.passes.trace import Captured
from overlapc.profiler.link_model import Collective
from overlapc.profiler.links import collective_of, tensors
from overlapc.profiler.memory import available_bytes

__all__ = ["Replay", "ReplayStep", "Watcher"]

_MOST = 0.8  # of the available memory, for what the forward keeps


@dataclass(frozen=True)
class ReplayStep:
    """One node to call. `is_op` is false for getitems, which count with their producer."""

    node: fx.Node
    is_op: bool
    is_start: bool
    may_write: bool
    frees: tuple[fx.Node, ...]  # nothing reads these nodes afterwards
    drops: tuple[fx.Node, ...] = ()  # of these the backward will read noise


class Watcher(Protocol):
    """Sees each node of a replay before and after it runs."""

    def before(self, step: ReplayStep) -> None: ...

    def after(self, step: ReplayStep, result: Any) -> None:
        """Called when the node has run, and values that die with it are freed."""


class Replay:
    """A captured graph and its inputs, made ready to run.

    Missing or fake inputs are made up from the graph: noise, and zeros for integers. CaptureError
    if an input can be neither. `drops`: whether the forward's values are dropped; by default if
    they would not fit.
    """

    def __init__(
        self,
        captured: Captured,
        primals: Sequence[Any] | None = None,
        tangents: Sequence[Any] | None = None,
        drops: bool | None = None,
    ) -> None:
        self.captured = captured
        self.symbols: dict[Any, int] = {}  # symbol of a size -> its real value
        nodes = captured.joint.graph.find_nodes(op="placeholder")
        kinds = captured.trace.kinds
        late = [node for node in nodes if kinds[node.name] == "gradient"]
        early = [node for node in nodes if kinds[node.name] != "gradient"]
        self.inputs: dict[fx.Node, Any] = {}
        self._take(early, primals, "primals")
        self._take(late, tangents, "tangents")
        self.lacking = {node for node in nodes if node not in self.inputs}
        self.device = _device(
            [t for n in nodes for t in tensors(self.inputs.get(n, n.meta.get("val")))]
        )
        self._random_state: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        crossing = self._crossing()
        held = sum({v.storage: v.bytes for v in map(self._value, crossing)}.values())
        self.drops = held > _MOST * available_bytes(self.device) if drops is None else drops
        self._dropped = crossing if self.drops else {}
        self.steps = self._steps()
        # The process groups whose ranks run it together.
        groups = [call.group for call in self.calls().values()]
        self.groups = list(dict.fromkeys([*groups, *groups_within(captured.joint.graph)]))

    def calls(self) -> dict[str, Collective]:
        """Start op -> its collective. Unknown sizes are right once the graph has run."""
        return {
            step.node.name: collective_of(step.node, self.number)
            for step in self.steps
            if step.is_start
        }

    def number(self, size: Any) -> int:
        """Return the real value of a size of the graph, or its hint while that is unknown."""
        if isinstance(size, int):
            return size
        symbols = size.node.expr.free_symbols
        if symbols <= self.symbols.keys():
            return int(size.node.expr.xreplace({s: self.symbols[s] for s in symbols}))
        return hint(size)

    @property
    def runs_alone(self) -> bool:
        """May `run` leave collectives out? Where sizes depend on data, other data would not fit."""
        changes = any(step.is_start and step.may_write for step in self.steps)
        return not changes and not self.captured.depends_on_data

    def run(self, watcher: Watcher, alone: bool = False) -> None:
        """Run the graph once. Each collective is waited for at once, and the watcher does not see
        the wait. `alone`: without the other ranks, a collective's result is this rank's own data.

        CaptureError names a node that cannot run. The caller must have switched off autograd and
        saved the random state.
        """
        self._same_random_numbers()
        joint = self.captured.joint
        env: dict[fx.Node, Any] = dict(self.inputs)
        for node in joint.graph.find_nodes(op="get_attr"):
            env[node] = _attribute(joint, str(node.target))

        def value(node: fx.Node) -> Any:
            if node not in env and (node in self.lacking or node in self._dropped):
                # made at its first reader, when all sizes are known
                env[node] = self._make_up(node)
            return env[node]

        for step in self.steps:
            node = step.node
            try:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
                if step.may_write:
                    args, kwargs = self._copied((args, kwargs))
                watcher.before(step)
                if alone and step.is_start:
                    result = self._own_data(node, args)
                else:
                    result = node.target(*args, **kwargs)  # type: ignore[operator]
                env[node] = result
                del args, kwargs
                for dead in (*step.frees, *step.drops):
                    env.pop(dead, None)
                watcher.after(step, result)
                if step.is_start and not alone:
                    for tensor in tensors(result):
                        torch.ops._c10d_functional.wait_tensor(tensor)
                expected = node.meta.get("val")
                if isinstance(expected, torch.SymInt) or "unbacked_bindings" in node.meta:
                    self._learn(expected, result)
                del result
            except OverlapcError:
                raise
            except Exception as error:
                raise CaptureError(_reason(error), node.name) from error

    def _own_data(self, node: fx.Node, args: Any) -> Any:
        """A result of the collective's form, filled with what it is given, over and over."""
        given = torch.cat([tensor.reshape(-1) for tensor in tensors(args)])

        def filled(expected: torch.Tensor) -> torch.Tensor:
            shape = [self.number(n) for n in expected.shape]
            made = given.new_zeros(shape, dtype=expected.dtype)
            for part in made.view(-1).split(given.numel()) if given.numel() else ():
                part.copy_(given[: part.numel()])
            return made

        return tree_map_only(torch.Tensor, filled, node.meta["val"])

    # ------------------------------------------------------------------ inputs

    def _take(self, nodes: Sequence[fx.Node], values: Sequence[Any] | None, what: str) -> None:
        if values is None:
            return
        if len(values) != len(nodes):
            raise CaptureError(f"the graph takes {len(nodes)} {what}, {len(values)} were given")
        for node, value in zip(nodes, values, strict=True):
            if isinstance(value, FakeTensor):
                continue  # Dynamo has no value of an input with dynamic sizes: make it up
            if isinstance(value, torch.Tensor) and (
                value.is_meta or is_traceable_wrapper_subclass(value)
            ):
                raise CaptureError(
                    f"only plain real tensors can be measured, found {type(value).__name__} on "
                    f'{value.device}: plan with profile="estimate" instead',
                    node.name,
                )
            if isinstance(value, torch.SymInt):  # Dynamo passes a number that may change so
                value = hint(value)
            self.inputs[node] = value
            self._learn(node.meta.get("val"), value)

    def _learn(self, expected: Any, value: Any) -> None:
        """Learn the values of the graph's symbols from a real value."""
        if isinstance(expected, torch.SymInt) and isinstance(value, int):
            if expected.node.expr.is_Symbol:
                self.symbols[expected.node.expr] = value
        elif isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
            for size, real in zip(expected.shape, value.shape, strict=True):
                self._learn(size, real)
        elif isinstance(expected, (tuple, list)) and isinstance(value, (tuple, list)):
            for item, real in zip(expected, value, strict=True):
                self._learn(item, real)

    def _make_up(self, node: fx.Node) -> Any:
        """Make up a value for the node: noise, since gradients of ones may cancel out to denormals,
        which CPUs compute slowly; zeros for integers, since 0 is a valid index."""
        expected = node.meta.get("val")
        if isinstance(expected, torch.Tensor) and expected.device.type == "meta":
            raise CaptureError(
                'on the meta device nothing can be measured: plan with profile="estimate"',
                node.name,
            )
        if not isinstance(expected, torch.Tensor):
            return self.number(expected) if isinstance(expected, torch.SymInt) else expected
        made = torch.empty_strided(
            [self.number(n) for n in expected.shape],
            [self.number(n) for n in expected.stride()],
            dtype=expected.dtype,
            device=expected.device,
        )
        if not (made.is_floating_point() or made.is_complex()):
            made.zero_()
        elif made.numel() == 1:
            made.fill_(1)
        else:
            made.normal_(std=0.02)
        fixed = all(isinstance(n, int) or n.node.has_hint() for n in expected.shape)
        if fixed and node in self.lacking:
            self.inputs[node] = made  # its size is the same in every run: keep it
        return made

    def _copied(self, given: Any) -> Any:
        """The arguments of a node that may write, with copies of the caller's tensors."""
        owned = {t.untyped_storage()._cdata for v in self.inputs.values() for t in tensors(v)}
        owned |= {t.untyped_storage()._cdata for t in self.captured.joint.buffers()}
        return tree_map_only(
            torch.Tensor,
            lambda t: t.clone() if t.untyped_storage()._cdata in owned else t,
            given,
        )

    def _same_random_numbers(self) -> None:
        cuda = torch.cuda.is_initialized()
        if self._random_state is None:
            states = torch.cuda.get_rng_state_all() if cuda else []
            self._random_state = torch.get_rng_state(), states
        torch.set_rng_state(self._random_state[0])
        if self._random_state[1]:
            torch.cuda.set_rng_state_all(self._random_state[1])

    # ------------------------------------------------------------------ steps

    def _value(self, node: fx.Node) -> Value:
        return self.captured.trace.value[node.name]

    def _crossing(self) -> dict[fx.Node, fx.Node]:
        """The values that a step without recompute keeps for its backward, and that may be noise;
        each with the last node of the forward that reads it."""
        joint, trace = self.captured.joint, self.captured.trace
        calls = [node for node in joint.graph.nodes if node.op == "call_function"]
        inputs = {value.storage for value in trace.values if value.name in trace.kinds}
        place = {node: i for i, node in enumerate(calls)}

        def is_forward(node: fx.Node) -> bool:
            maker = node.args[0] if is_folded_getitem(node) else node
            return maker.name in trace.op and trace.op[maker.name].is_forward

        found = {}
        for node in calls:
            val = node.meta.get("val")
            is_noise = isinstance(val, torch.Tensor) and val.is_floating_point()
            if not is_noise or not is_forward(node) or node.name not in trace.value:
                continue
            early = [user for user in node.users if user in place and is_forward(user)]
            crosses = len(early) < sum(user in place for user in node.users)
            if crosses and self._value(node).storage not in inputs:
                found[node] = max([node, *early], key=place.__getitem__)
        return found

    def _steps(self) -> tuple[ReplayStep, ...]:
        graph, trace = self.captured.joint.graph, self.captured.trace
        drops: dict[fx.Node, list[fx.Node]] = {}
        for node, reader in self._dropped.items():
            drops.setdefault(reader, []).append(node)
        calls = [node for node in graph.nodes if node.op == "call_function"]
        last = {node: node for node in calls}
        for reader in (*calls, *graph.find_nodes(op="output")):
            for node in reader.all_input_nodes:
                last[node] = reader
        dying: dict[fx.Node, list[fx.Node]] = {}
        for node, reader in last.items():
            if node.op == "call_function" or node in self.lacking:
                dying.setdefault(reader, []).append(node)
        return tuple(
            ReplayStep(
                node,
                is_op=node.name in trace.op,
                is_start=is_start(node),
                may_write=_may_write(node.target),
                frees=tuple(dying.get(node, ())),
                drops=tuple(drops.get(node, ())),
            )
            for node in calls
        )


def _device(given: Sequence[torch.Tensor]) -> torch.device:
    """The device of the graph: the accelerator if any input is there."""
    devices = [t.device for t in given]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def _may_write(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    return isinstance(target, torch._ops.HigherOrderOperator)  # these have no schema


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _reason(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return (
            f'measuring ran out of memory: {first}; plan with profile="estimate", or on a smaller '
            "batch"
        )
    return f"this op cannot be run to be measured: {type(error).__name__}: {first}"
