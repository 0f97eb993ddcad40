"""`optimize(model, slices=k)`: calls of a model cut into slices, whose results are put together.

The loss may be outside of the model, so gradients of the results come later, and are cut as the
results were put together. The numbers are bitwise those of

    parts = [model(*each) for each in slices]
    whole = cat(parts).detach().requires_grad_()      a loss: sum(part / k for part in parts)
    loss(whole).backward()
    for part, gradient in zip(parts, whole.grad.contiguous().chunk(k)):
        part.backward(gradient)

Autograd gets the sum of the slices' gradients, so it adds one gradient for each call to `.grad`,
and hooks see one. A call without gradients (evaluation, prefill) runs the slices' forwards alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from overlapc.core.errors import CaptureError
from overlapc.nn.layers import sliced
from overlapc.passes.capture.joint import Joint, Run, Stop, Traced, capture_as_called, owner_of
from overlapc.passes.draws import Draw
from overlapc.passes.emit.parts import parameter_gradients
from overlapc.passes.exact.switches import changed, switches
from overlapc.planning.options import Options
from overlapc.planning.problem import TrainingStep
from overlapc.planning.report import Report
from overlapc.planning.road import plan
from overlapc.ranks.exchange import busy, in_call
from overlapc.ranks.groups import Attempts
from overlapc.ranks.seeds import warn_of_seeds
from overlapc.runtime.call import Given, alike, inputs_of
from overlapc.runtime.foreign import untraced
from overlapc.runtime.program import Flight, State
from overlapc.runtime.slicing.compare import (
    Compared,
    compared,
    draws_for,
    refuse_failing,
    refuse_whole,
)
from overlapc.runtime.slicing.slices import SlicedProgram, Slices, Way, marked
from overlapc.runtime.train_step import adding
from overlapc.state.objects import batch_in_objects, is_held, rebuilt, storage_of
from overlapc.tools.told import Told

Uncut = Callable[[Any, Any], Any]  # args, kwargs -> the model's results


class SlicedCalls:
    """Runs calls of a model in `count` slices; those that cannot be captured `uncut`."""

    def __init__(self, model: nn.Module, options: Options, count: int, uncut: Uncut) -> None:
        self.model, self.options, self.count, self.uncut = model, options, count, uncut
        self.reports: dict[str, Report] = {}  # by digest of a slice's graph
        self.said: dict[Any, Compared] = {}  # slices compared with their batch, by key and digest
        self.fallbacks = Told()  # why calls ran uncut
        self._traced: dict[Any, Traced] = {}  # by the key of `alike`
        self._plain: set[Any] = set()  # keys of calls that run uncut
        self._attempts = Attempts("optimize in slices")
        self._given = Given((), {})  # the call that is in slices
        self._now: Slices | None = None  # the running batch
        self._batch: _Batch | None = None  # that waits for its backward

    @property
    def differences(self) -> list[str]:
        """Lines of the model whose trace may give other results than eager, with the reason."""
        found = (line for traced in self._traced.values() for line in traced.differences)
        return [*dict.fromkeys(found)]

    def __call__(self, args: Any, kwargs: Any) -> Any:
        self._given = given = Given(args, kwargs)
        with _outside_inference():
            each = given.cut(self.count, gradients=True)
            key, is_new = self._key(given, each)
            if key not in self._plain:
                try:
                    tracing = busy("tracing")
                    with tracing if is_new else in_call(), sliced(self.count):
                        result = self._run(key, given, each)
                    return self._joined(result, given, each)
                except CaptureError as error:
                    self._refused(key, error)
                finally:
                    self._now, self._batch, self._given = None, None, Given((), {})
        return self.uncut(args, kwargs)

    def plan(self, args: Any, kwargs: Any) -> Report | None:
        """Plan a call without running it; None if it cannot be captured. All ranks call this
        together."""
        with _outside_inference():
            self._given = Given(args, kwargs)
            each = self._given.cut(self.count, gradients=True)
            key, _ = self._key(self._given, each)
            if key in self._plain:
                return None
            self._now = now = Slices(1, runs=False, each=each)
            try:
                with busy("tracing"), sliced(self.count), suppress(Stop):
                    self._traced[key](*each[0].args, **each[0].kwargs)
            except CaptureError as error:
                self._refused(key, error)
            finally:
                self._now, self._given = None, Given((), {})
        return now.report

    def _key(self, given: Given, each: Sequence[Given]) -> tuple[Any, bool]:
        if kind := batch_in_objects((given.args, given.kwargs)):
            error = CaptureError(
                f"an argument is a {kind} that holds tensors of the batch, which cannot be cut; "
                "expected tensors in lists, tuples or dicts"
            )
            if kind not in self._plain:
                self._refused(kind, error)
            return kind, False
        key = alike(each)
        is_new = key not in self._traced
        if is_new:
            self._traced[key] = Traced(self._marked, self._adopt, self.model, alone=True)
        return key, is_new

    def _marked(self, *args: Any, **kwargs: Any) -> Any:
        return marked(self.model(*args, **kwargs), (args, kwargs))

    def _run(self, key: Any, given: Given, each: Sequence[Given]) -> Any:
        """Call the model with each slice; the call of the last runs all forwards."""
        traced = self._traced[key]

        def begin() -> Slices:
            self._now = now = Slices(1, self._forward, each=each)
            for one in each[:-1]:
                with suppress(Stop):
                    traced(*one.args, **one.kwargs)
            return now

        now = begin()
        if now.program is None:
            raise CaptureError("torch.compile is switched off")
        joint = now.program.joint
        at = key, joint.captured.trace.digest
        if at not in self.said:
            self.said[at] = self._compared(given, joint, now.program.draws)
            now = begin()  # counters of the model have changed meanwhile
        now.ways = self.said[at].ways
        return traced(*each[-1].args, **each[-1].kwargs)

    def _compared(self, given: Given, joint: Joint, draws: Mapping[str, Draw]) -> Compared:
        def forward(part: Given) -> list[Any]:
            return tree_leaves(self.model(*part.args, **part.kwargs))

        (batch,), each = (given.cut(count, gradients=True) for count in (1, self.count))
        groups, timeout_s = joint.captured.trace.groups, self.options.timeout_s
        with self._attempts.exchange_for(groups, timeout_s) as exchange:
            return compared(self.model, forward, batch, each, joint, draws, exchange)

    def _forward(
        self, program: SlicedProgram, states: Sequence[State], ways: Sequence[Way]
    ) -> list[Any]:
        results = program.forward(states, ways)
        if program.tangents:
            made = zip(program.joint.results, results, strict=True)
            self._batch = _Batch(
                program,
                states,
                ways,
                {program.places[name]: x for name, x in made if name in program.places},
            )
        return results

    def _joined(self, result: Any, given: Given, each: Sequence[Given]) -> Any:
        """Let autograd know how the results were made."""
        batch = self._batch
        if batch is None:
            return result
        leaves, spec = tree_flatten(result)
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ends = [leaves[i] if i < len(leaves) else batch.made[i].detach() for i in batch.ends]
        owners = batch.owned(given, each)
        held: dict[int | None, Tensor] = {}  # by storage
        for i, end in zip(batch.ends, _InSlices.apply(batch, ends, *owners), strict=True):
            if i < len(leaves):
                leaves[i] = end
            else:
                held[storage_of(end)] = end
        if held:
            put = lambda tensor: held.get(storage_of(tensor), tensor)  # noqa: E731
            leaves = [rebuilt(leaf, put) if is_held(leaf) else leaf for leaf in leaves]
        return tree_unflatten(leaves, spec)

    def _adopt(self, joint: Joint) -> Run:
        program: SlicedProgram | None = None

        def run(state: State) -> Sequence[Any]:
            nonlocal program
            now = self._now
            assert now is not None
            if program is None:
                draws: dict[str, Draw] = {}
                if self.count > 1:
                    refuse_whole(joint, state, self.model, self.count)
                    draws = draws_for(joint, self.count, self._uncut)
                now.report = self._report(joint, state, draws)
                if not now.runs:
                    raise Stop
                program = SlicedProgram(joint, now.report, whole=False, draws=draws)
            now.report = program.report
            if not now.runs:
                raise Stop
            return now.forward(program, state)

        return run

    def _uncut(self) -> Joint:
        """The graph of the whole batch."""
        (batch,) = self._given.cut(1, gradients=True)
        return capture_as_called(self.model, *batch.args, **batch.kwargs)

    def _report(self, joint: Joint, state: State, draws: Mapping[str, Draw]) -> Report:
        """Plan a graph, or return the plan of an equal graph."""
        captured, digest = joint.captured, joint.captured.trace.digest
        if digest not in self.reports:
            cut = f" in {self.count} slices" if self.count > 1 else ""
            each = self._now.each if self._now is not None else ()
            alone = "" if joint.tangents else ", its forward alone"
            primals, *others = inputs_of(joint.inputs, state, each)
            options = self.options if joint.tangents else replace(self.options, plan=None)
            step = TrainingStep(f"graph {len(self.reports)}{cut}{alone}")
            if self.count > 1:
                step = replace(
                    step,
                    gradients=tuple(parameter_gradients(captured)),
                    add_ns_per_kib=adding(self.model, self.options),
                    slices=self.count,
                    draws=tuple(draws),
                    loss=False,
                )
            groups, timeout_s = captured.trace.groups, self.options.timeout_s
            with self._attempts.exchange_for(groups, timeout_s) as exchange:
                self.reports[digest] = plan(
                    captured, options, step, primals=primals, others=others, exchange=exchange
                ).report
                warn_of_seeds(captured, primals, exchange)
        return self.reports[digest]

    def _refused(self, key: Any, error: CaptureError) -> None:
        self._attempts.refused(error)  # other ranks may wait for this one
        refuse_failing(error, self.count, self._given, self._uncut)
        self._plain.add(key)
        self.fallbacks.tell(str(error), f"overlapc runs the batch uncut: {error}")


def _outside_inference() -> ExitStack:
    """Leave the inference mode, in which nothing can be traced."""
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
    return stack


class _Batch:
    """A batch between its forward and its backward."""

    def __init__(
        self,
        program: SlicedProgram,
        states: Sequence[State],
        ways: Sequence[Way],
        made: Mapping[int, Tensor],  # the batch's results, by place
    ) -> None:
        self.program, self.ways, self.made = program, ways, made
        self.states: list[State] | None = list(states)
        self.ends = sorted(program.tangents)  # places of results that get a gradient
        read = [name for name in program.joint.inputs if isinstance(states[0].get(name), Tensor)]
        self.read = [state[name] for state in states for name in read if name in state]
        self.versions = [_version(tensor) for tensor in self.read]
        self.switches = switches()
        self.leaves: list[list[Tensor]] = []  # that gradients are gathered in, by owner

    def owned(self, given: Given, each: Sequence[Given]) -> list[Tensor]:
        """The tensors that get a gradient: the batch's inputs, and what all slices share. In the
        states leaves of the same memory take their place."""
        assert self.states is not None
        whole, parts = _leaves(given), [_leaves(part) for part in each]
        place = {id(part): i for mine in parts for i, part in enumerate(mine)}
        owners: list[Tensor] = []
        shared: dict[int, Tensor] = {}
        for name in self.program.joint.leaves:
            all_owners = [state[owner_of(name)] for state in self.states]
            tensor = all_owners[0].tensor
            cut = id(tensor) in place and whole[place[id(tensor)]] is not tensor
            if id(tensor) not in shared:
                shared[id(tensor)] = leaf = tensor.detach().requires_grad_()
                owners.append(whole[place[id(tensor)]] if cut else tensor)
                mine = [o.tensor.detach().requires_grad_() for o in all_owners] if cut else [leaf]
                self.leaves.append(mine)
            mine = self.leaves[[*shared].index(id(tensor))]
            for k, (state, owner) in enumerate(zip(self.states, all_owners, strict=True)):
                state[owner_of(name)] = replace(owner, tensor=mine[k if cut else 0])
        return owners

    @untraced
    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the owners."""
        states, self.states = self.states, None
        if states is None:
            raise RuntimeError(
                "a second backward through a batch in slices; expected one for each call of the "
                "model: call it again"
            )
        if [_version(tensor) for tensor in self.read] != self.versions:
            raise RuntimeError(
                "a parameter, buffer or input that the backward reads was changed in place after "
                "the forward; expected the optimizer's step behind the backward"
            )
        if self.program.report.plan.recomputed and (others := changed(self.switches)):
            raise RuntimeError(
                "a switch of PyTorch's changed after the forward of a batch in slices, whose "
                f"backward recomputes: {others}; expected it to be set around both, or slices=1"
            )
        self.read.clear()
        self.program.gradients_came(states, gradients, self.ways)
        flight = Flight(self.program, states)
        flight.run("B")
        flight.end()
        return [_gathered(leaves) for leaves in self.leaves]


def _gathered(leaves: Sequence[Tensor]) -> Tensor | None:
    """The gradient of an owner: that of what slices share, or of an input's slices."""
    found = [leaf.grad for leaf in leaves]
    if len(found) == 1 or all(gradient is None for gradient in found):
        return found[0]
    pairs = zip(leaves, found, strict=True)
    return torch.cat([torch.zeros_like(x) if grad is None else grad for x, grad in pairs])


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _leaves(given: Given) -> list[Any]:
    return tree_leaves((given.args, given.kwargs))


class _InSlices(torch.autograd.Function):
    """Hands gradients of the batch's results to the backward of its slices."""

    @staticmethod
    def forward(ctx: Any, batch: _Batch, ends: Sequence[Tensor], *owners: Tensor) -> Any:
        ctx.batch, ctx.owners = batch, owners
        return tuple(ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            found = ctx.batch.backward(gradients)
        if torch.is_grad_enabled():  # `create_graph`
            pairs = zip(ctx.owners, found, strict=True)
            found = [None if made is None else _Once.apply(owner, made) for owner, made in pairs]
        return None, None, *found


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(_ctx: Any, _owner: Tensor, gradient: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "a gradient of a batch in slices is differentiated again, which is not supported; "
            "expected one backward: call the model itself, not what optimize returned"
        )
