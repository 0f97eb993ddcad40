"""What a batch gives in slices, beside what it gives uncut.

What a graph shows to see the whole batch is refused when it is planned (`refuse_whole`); the rest
shows when eager runs a first batch both ways (`compared`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from overlapc.core.errors import CaptureError, OptionError, OverlapcError, RankError
from overlapc.nn.layers import beside, in_turn, sliced
from overlapc.passes.capture.joint import Joint
from overlapc.passes.capture.untraced import Raised
from overlapc.passes.draws import Draw, Drawn, Whole, drawing, draws_of
from overlapc.passes.means import Weighing
from overlapc.passes.nodes import is_total
from overlapc.passes.trace import changed_inputs
from overlapc.ranks.exchange import Exchange
from overlapc.runtime.program import State
from overlapc.runtime.restored import as_it_was, holding_the_same, left_alone
from overlapc.runtime.restored import held as state_held
from overlapc.runtime.side_effects import (
    attributes,
    of_parameters,
    plain_values,
    put_together,
    refuse_inputs,
    refuse_numbers,
    refuse_values,
    set_since,
)
from overlapc.runtime.slicing.slices import (
    Way,
    apart,
    is_number,
    mean_of_numbers,
    means,
    together,
    uneven,
    way_of,
)
from overlapc.runtime.slicing.tolerances import dense, distance, farthest, tolerance_of
from overlapc.state.objects import is_held, joined, objects_in, opened

SAID = {"mean": "mean", "alike": "alike", "inside": "each tensor in it along dimension 0"}
Forward = Callable[[Any], list[Any]]  # part of a batch -> the model's results, in a list


@dataclass(frozen=True)
class Compared:
    """How the batch's results are made of its slices', and how far these were from the uncut
    batch's."""

    ways: tuple[Way, ...]
    apart: float
    tolerance: float
    cut: str = "cut along dimension 0"
    held: tuple[str, ...] = ()  # the last results, which are in objects

    def __str__(self) -> str:
        names = [f"result {i}" for i in range(len(self.ways) - len(self.held))]
        made = [
            f"{name} {f'along dimension {way}' if isinstance(way, int) else SAID[way]}"
            for name, way in zip([*names, *self.held], self.ways, strict=True)
        ]
        return (
            f"{self.cut}; put together: {', '.join(made)}; bitwise plain accumulation "
            f"over slices; the first batch was {self.apart:.2g} of its largest numbers from the "
            f"uncut batch (measured; at most {self.tolerance:g} is accepted)"
        )


def refuse_whole(joint: Joint, state: State, model: nn.Module, count: int) -> None:
    """Raise for what would run once for each slice and should once for the batch."""
    captured = joint.captured
    if changed := changed_inputs(captured.joint):
        written = {id(state.get(name)) for name in changed}
        owned = [*model.named_buffers(), *model.named_parameters()]
        names = [name for name, tensor in owned if id(tensor) in written]
        raise OptionError(
            f"slices={count}: the forward changes {', '.join(names) or 'an input'}, once for each "
            "slice; expected buffers and inputs that it only reads"
        )


def refuse_failing(error: CaptureError, count: int, given: Any, uncut: Callable[[], Joint]) -> None:
    """Raise if the model raised this when a slice was traced, and does not for the whole batch,
    which `uncut` captures."""
    if not isinstance(error, Raised) or count == 1:
        return
    try:
        with sliced(1):
            uncut()
    except OverlapcError:
        return
    raise OptionError(failing(error, count, given)) from error


def failing(error: CaptureError, count: int, given: Any) -> str:
    return (
        f"slices={count}: the model fails for a slice and not for the whole batch, {error}; "
        f"{_cut(given)}: expected the batch there, and what is not the batch, a hidden state of "
        "several layers say, as an attribute of the model"
    )


def _cut(given: Any) -> str:
    shapes = [tuple(x.shape) for x in _tensors_in((given.args, given.kwargs)) if x.dim()]
    return f"inputs of shapes {shapes} were cut along dimension 0"


def draws_for(joint: Joint, count: int, uncut: Callable[[], Joint]) -> dict[str, Draw]:
    """What slices draw together, by op; `uncut` captures the whole batch."""
    captured = joint.captured
    if not drawing(captured):
        return {}
    with sliced(1), joint.as_called():
        return draws_of(captured, uncut().captured, count)


# --------------------------------------------------------------------------- both ways


_BLOCKED_S = 7.0  # so long the others, which may wait for this rank in a collective, may not come


def compared(
    model: nn.Module,
    forward: Forward,
    batch: Any,
    each: Sequence[Any],
    joint: Joint,
    draws: Mapping[str, Draw],
    exchange: Exchange | None,
) -> Compared:
    """Let eager compute the batch uncut and in slices, with gradients if the graph has any. Raise,
    on all ranks, if slices give anything else."""
    mine = _EagerBothWays(model, forward, batch, each, joint, [*draws.values()])
    found = Compared(mine.ways, mine.apart, mine.tolerance, held=mine.ends)
    if mine.failed is None or exchange is None:
        return told(found, mine.different, mine.first_module, len(each), exchange)
    # The others may wait for this rank in a collective.
    try:
        with exchange.within(_BLOCKED_S):
            return told(found, mine.different, mine.first_module, len(each), exchange)
    except RankError as late:
        raise RankError(f"slices={len(each)}: {mine.different}, on this rank; {late}") from late


def told(
    found: Compared,
    different: str,
    where: Callable[[], str],
    count: int,
    exchange: Exchange | None,
) -> Compared:
    """Raise, on all ranks, if slices of one rank were `different`; `where` looks for the place.
    Else return what was `found` of the farthest."""

    def all_say(what: str, said: str) -> list[str]:
        if exchange is None:
            return [said]
        return [data.decode() for data in exchange.gather(what, said.encode())]

    said = [text.partition(" ") for text in all_say("in slices", f"{found.apart!r} {different}")]
    first = next((different for _, _, different in said if different), "")
    if first:
        place = next(filter(None, all_say("whole batch", where())), "")
        raise OptionError(
            f"slices={count}: {first}; {place and f'{place}; '}expected results that are means "
            "over samples, or of samples of which each goes its own way: leave slices out"
        )
    return replace(found, apart=max(float(text) for text, _, _ in said))


class _EagerBothWays:
    """Results and gradients of a batch uncut and in slices. `different` says what is another in
    slices, `apart` how far the farthest of all is, relative to its largest number."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        batch: Any,
        each: Sequence[Any],
        joint: Joint,
        draws: Sequence[Draw],
    ) -> None:
        self.draws = draws
        self.model, self._forward, self.batch, self.each = model, forward, batch, each
        self.tolerance, self.backward = tolerance_of(joint.captured), bool(joint.tangents)
        self.weighs, self.lasting = joint.weighs, Counter(of_parameters(joint).values())
        self.means = means(joint)
        self.totals = any(is_total(node) for node in joint.captured.joint.graph.nodes)
        self.ways: tuple[Way, ...] = ()
        self.ends: tuple[str, ...] = ()  # the last results, which are in objects
        self.different, self.apart = "", 0.0
        self.failed: Exception | None = None  # for a slice alone
        with as_it_was(model):
            expected = self.uncut()
        try:
            with as_it_was(model):
                found = self.in_slices()
        except OptionError as error:  # the other ranks wait
            self.different = str(error).partition(": ")[2]
        except OverlapcError:
            raise
        except Exception as error:
            self.different, self.failed = f"the model fails for a slice, {error!r}", error
        else:
            self.apart, self.different = farthest(expected, found, self.tolerance)

    def forward(self, part: Any) -> tuple[list[Any], dict[str, Any]]:
        """The model's results, and what the objects among them hold: of that the tensors with a
        gradient are results, too. Objects among the arguments, which all slices get, are left as
        they were."""
        with left_alone(objects_in((part.args, part.kwargs))):
            results = self._forward(part)
            ends, held = opened(results)
        self.ends = tuple(ends)
        return [*results, *ends.values()], held

    def uncut(self) -> dict[str, Any]:
        before = attributes(self.model)
        ((results, held),) = self.ran([self.batch], lambda _, batch: self.forward(batch))
        self.kept = {n: x for n, x in set_since(before, self.model).items() if x.dim()}
        self.values = plain_values(self.model)
        self.cotangents = [_cotangent(i, leaf) for i, leaf in enumerate(results)]
        if self.backward:
            _differentiate(results, self.cotangents)
        self.results, self.held = self.named(results), held
        found = {name: x for name, x in self.results.items() if not is_held(x)}
        return found | held | self.kept | self.gradients([self.batch])

    def named(self, results: Sequence[Any]) -> dict[str, Any]:
        named = {}
        names = [f"result {i}" for i in range(len(results) - len(self.ends))]
        for name, leaf in zip([*names, *self.ends], results, strict=True):
            is_loss = isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel() == 1
            named["the loss" if is_loss and "the loss" not in named else name] = leaf
        return named

    def in_slices(self) -> dict[str, Any]:
        """One slice after the other, each with what those before it counted; or beside each other,
        if they ask for totals."""
        count = len(self.each)
        inputs = _tensors_in((self.batch.args, self.batch.kwargs))
        refuse_inputs(self.held | self.kept, inputs, count)
        uncut = [*self.results.items()]
        kept: list[dict[str, Tensor]] = []
        values: list[dict[str, Any]] = []
        held: list[dict[str, Any]] = [{} for _ in self.each]

        def run(k: int, part: Any) -> list[Any]:
            if self.totals:  # beside others
                return each(k, part)
            with holding_the_same([self.model]):  # what a forward counts it counts once
                return each(k, part)

        def each(k: int, part: Any) -> list[Any]:
            before = attributes(self.model)
            results, held[k] = self.forward(part)
            if len(results) != len(uncut):
                raise OptionError(
                    f"slices={count}: the model gives {len(results)} results for a slice and "
                    f"{len(uncut)} for the batch; expected as many: stack those of the samples"
                )
            kept.append(set_since(before, self.model))
            values.append(plain_values(self.model))
            if not k:
                self.ways = tuple(
                    # Without gradients any number may be a loss.
                    "mean"
                    if not self.backward and is_number(whole, part)
                    else way_of(name, whole, part, count)
                    for (name, whole), part in zip(uncut, results, strict=True)
                )
            if self.backward and not self.totals:
                _differentiate(results, self.cotangents_of(k, results))
                return [_detached(leaf) for leaf in results]
            return results

        parts = self.ran(self.each, run)
        if self.backward and self.totals:
            cotangents = [c for k in range(count) for c in self.cotangents_of(k, parts[k])]
            with in_turn(count), self.drawn(0):  # only checkpoints run again
                _differentiate([leaf for results in parts for leaf in results], cotangents)
        columns = [[_detached(leaf) for leaf in column] for column in zip(*parts, strict=True)]
        is_mean = [i in self.means for i in range(len(uncut))]
        self.ways = tuple(map(mean_of_numbers, self.ways, columns, is_mean))
        refuse_values(self.values, values, self.tolerance)
        refuse_numbers(kept)
        found = {
            name: together(name, column, way)
            for (name, _), column, way in zip(uncut, columns, self.ways, strict=True)
            if way != "inside"
        }
        names = dict.fromkeys(name for one in (self.held, *held) for name in one)
        found |= {name: joined(name, [one.get(name) for one in held]) for name in names}
        for name, whole in self.kept.items():
            found[name] = put_together([one.get(name) for one in kept], whole, self.lasting)
        return found | self.gradients(self.each)

    def ran(self, parts: Sequence[Any], run: Callable[[int, Any], Any]) -> list[Any]:
        """What `run` returns for each part of the batch."""
        self.wholes: list[Whole] = []

        def drawn(k: int, part: Any) -> Any:
            with ExitStack() as stack:
                if len(parts) > 1:
                    stack.enter_context(self.drawn(k))
                if len(parts) > 1 and self.weighs:
                    stack.enter_context(Weighing(len(parts)))
                return run(k, part)

        if self.totals and len(parts) > 1:
            hold = partial(state_held, [self.model])  # what a forward counts it counts once
            return beside(lambda each: drawn(*each), [*enumerate(parts)], hold)
        found = []
        with in_turn(len(parts)) as begin:
            for k, part in enumerate(parts):
                begin()
                found.append(drawn(k, part))
        return found

    def drawn(self, k: int) -> AbstractContextManager[Any]:
        """In it a slice reads its part of what the batch draws."""
        return Drawn(self.draws, self.wholes, k, len(self.each)) if self.draws else nullcontext()

    def cotangents_of(self, k: int, results: Sequence[Any]) -> list[Tensor | None]:
        """The gradients of a slice's results."""
        found: list[Tensor | None] = []
        each = zip(self.results, results, self.cotangents, self.ways, strict=True)
        for name, result, whole, way in each:
            if whole is None:
                found.append(None)
                continue
            count = len(self.each)
            of_all = [*result.shape]
            if isinstance(way, int):
                of_all[way] *= count
            if of_all != [*whole.shape]:
                raise uneven(name, count, [tuple(result.shape), f"(of {tuple(whole.shape)})"])
            found.append(apart(whole, way, count)[k])
        return found

    def gradients(self, parts: Sequence[Any]) -> dict[str, Any]:
        if not self.backward:
            return {}
        found = {f"the gradient of {n}": dense(p.grad) for n, p in self.model.named_parameters()}
        each = zip(*(tree_leaves((part.args, part.kwargs)) for part in parts), strict=True)
        for i, leaves in enumerate(each):
            if isinstance(leaves[0], Tensor) and leaves[0].requires_grad:
                grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
                found[f"the gradient of input {i}"] = torch.cat(grads)
        return found

    def first_module(self) -> str:
        """The first module that makes of the same inputs other results in slices; "" if none
        does. Of a model that fails, what it was given."""
        if self.failed is not None:
            return _cut(self.batch)

        def agree(one: Tensor, parts: Sequence[Tensor]) -> bool:
            try:
                way = way_of("", one.detach(), parts[0], len(self.each))
            except OptionError:
                return False
            if isinstance(way, int):
                return self.agree(one, torch.cat(tuple(parts), way))
            if any(part.shape != one.shape for part in parts):
                return False
            if one.is_floating_point() and self.agree(one, together("", parts, "mean")):
                return True
            return all(self.agree(one, part) for part in parts)

        def agree_all(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> bool:
            as_many = all(len(one) == len(whole) for one in parts)
            return as_many and all(map(agree, whole, zip(*parts, strict=True)))

        (uncut,), in_slices = self.calls([self.batch]), self.calls(self.each)
        for (name, taken, made), *others in zip(uncut, *in_slices, strict=False):
            if agree_all(taken, [o[1] for o in others]) > agree_all(made, [o[2] for o in others]):
                module = self.model.get_submodule(name)
                return f"{name or 'the model'} ({type(module).__name__}) sees the whole batch"
        return ""

    def agree(self, one: Tensor, other: Tensor) -> bool:
        return distance(one, other)[0] <= self.tolerance

    def calls(self, parts: Sequence[Any]) -> list[list[tuple[str, list[Any], list[Any]]]]:
        """For each part the modules that it calls, with their inputs and results."""
        each: list[list[tuple[str, list[Any], list[Any]]]] = [[] for _ in parts]
        here = threading.local()  # slices beside each other run in threads
        with as_it_was(self.model), ExitStack() as stack:
            for name, module in self.model.named_modules():

                def note(_module: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                    each[here.k].append((name, _tensors((args, kwargs)), _tensors(out)))

                hook = module.register_forward_hook(note, with_kwargs=True)
                stack.callback(hook.remove)

            def run(k: int, part: Any) -> None:
                here.k = k
                self.forward(part)

            self.ran(parts, run)
        return each


def _cotangent(i: int, leaf: Any) -> Tensor | None:
    """The gradient that a result gets: one for a loss, else random numbers."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return None
    if leaf.numel() == 1 or type(leaf) is not Tensor:
        return torch.ones_like(leaf)
    return noise(i, leaf)


def noise(seed: int, like: Tensor) -> Tensor:
    """Random numbers in a tensor like this one, which may be fake."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return numbers.to(like.device, like.dtype)


def _differentiate(results: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None]
    torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _tensors(values: Any) -> list[Any]:
    return [tensor.detach().clone() for tensor in _tensors_in(values)]
