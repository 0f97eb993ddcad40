"""A microbatch of a chunk in slices along its samples: cut, compared with the whole, and run.

Between Megatron's layers the batch is dimension 1, in tokens, labels and losses dimension 0. So a
tensor of a call is cut along the dimension that is as large as the microbatch, and the chunk's
result is put together along that in which a slice's is smaller. What Megatron sends stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten

from overlapc.core.errors import OptionError
from overlapc.core.ir import Plan
from overlapc.megatron.gradients import Receiver, deliver, fuse, fused_weights, unreduced
from overlapc.megatron.planned import ChunkCall, Planned, WholeChunk, described, names_in, owners_in
from overlapc.megatron.tracing import STREAM, draw_in
from overlapc.passes.draws import Draw, drawing, draws_of, dropped
from overlapc.passes.emit.parts import Parts, cut
from overlapc.passes.nodes import primal_nodes
from overlapc.passes.trace import Captured, changed_inputs
from overlapc.planning.report import Report
from overlapc.ranks.exchange import Exchange
from overlapc.runtime.program import Flight
from overlapc.runtime.slicing.compare import Compared, noise, told
from overlapc.runtime.slicing.slices import (
    SlicedProgram,
    Way,
    apart,
    together,
    way_of,
)
from overlapc.runtime.slicing.tolerances import farthest, tolerance_of


@dataclass
class Cut:
    """A call in slices. `places` are by tensor of the call the dimension of the batch, or None for
    what all slices share. `share`: a slice's part of the factor of auxiliary losses."""

    module: nn.Module
    whole: ChunkCall
    count: int
    places: tuple[int | None, ...]
    share: float
    draws: Mapping[str, Draw] = field(default_factory=dict)
    compared: Compared | None = None

    @staticmethod
    def of(module: Any, call: ChunkCall, batch: int | None, count: int) -> Cut:
        """Cut a call whose microbatch has `batch` samples, or as many as its first argument."""
        _, kwargs = tree_unflatten(call.leaves, call.spec)
        experts = getattr(module.config, "num_moe_experts", None)
        if experts and kwargs.get("padding_mask") is not None:
            raise OptionError(
                f"slices={count}: found a padding_mask, by which the losses of experts are means "
                "over counted tokens of the microbatch; expected none, or slices left out"
            )
        leaves = [leaf for leaf in call.leaves if isinstance(leaf, Tensor) and leaf.dim()]
        samples = leaves[0].shape[0] if batch is None and leaves else batch
        places = _places(call, samples)
        if not samples or samples % count or set(places) == {None}:
            raise OptionError(
                f"slices={count}: found a microbatch of {samples} samples, and tensors of shapes "
                f"{[tuple(tensor.shape) for tensor in call.tensors]}; expected a number of samples "
                "that it divides, and a dimension of that size"
            )
        # Megatron divides auxiliary losses by the number of microbatches, unless it divides all
        # gradients by the number of tokens at the end.
        per_token = getattr(module.config, "calculate_per_token_loss", False)
        return Cut(module, call, count, places, 1.0 if per_token else 1 / count)

    def slice(self, k: int) -> ChunkCall:
        """The call of a slice."""
        return replace(self.whole, tensors=self.tensors(self.whole.tensors, k))

    def tensors(self, tensors: Sequence[Tensor], k: int) -> list[Tensor]:
        """The tensors of a call of slice k, laid out as those of a small microbatch."""
        call, found = self.whole, []
        for i, (tensor, place) in enumerate(zip(tensors, self.places, strict=True)):
            made = tensor.detach()
            if place is not None:
                made = made.chunk(self.count, place)[k].contiguous()
            elif call.has_input <= i < call.has_input + call.scales:
                made = made * self.share
            found.append(made.requires_grad_(tensor.requires_grad))
        return found

    def compare(
        self,
        captured: Captured,
        uncut: Captured,
        lasting: Sequence[Tensor],
        logged: Sequence[str],
        exchange: Exchange | None,
    ) -> None:
        """Run the graphs of the slices and of the whole microbatch, of which nothing changes.
        OptionError on all ranks of the exchange if slices give anything else. `logged` are names of
        the losses that are logged."""
        ways: tuple[Way, ...] = ()
        different = ""
        try:
            self._refuse(captured)
            self.draws = _in_streams(captured, draws_of(captured, uncut, self.count))
            ways = _ways(captured, uncut, self.count, logged)
        except OptionError as error:
            different = str(error).partition(": ")[2]
        found = Compared(ways, 0.0, tolerance_of(captured), self._said())
        told(found, different, str, self.count, exchange)  # now all ranks run collectives
        with _as_drawn(), torch.no_grad(), torch._C._DisableAutocast():
            both = _GraphBothWays(self, captured, uncut, lasting, ways, logged)
            apart, different = farthest(both.uncut(), both.in_slices(), found.tolerance)
        self.compared = told(replace(found, apart=apart), different, str, self.count, exchange)

    def emitted(
        self,
        captured: Captured,
        report: Report,
        whole: WholeChunk,
        lasting: Sequence[Tensor],
        ddp: Any,
        actions: Mapping[str, str],
    ) -> SlicedPlanned:
        """Make the planned parts of all slices; `whole` and `captured` are of one."""
        joint = described(captured, whole.returned.count)
        owners = owners_in(joint, lasting, ddp)
        fused = fused_weights(whole.model)

        def parts_of(captured: Captured, plan: Plan) -> Parts:
            parts = cut(captured, plan, deliver)
            if fused:
                fuse(parts.backward, owners, fused)
            return parts

        program = SlicedProgram(joint, report, False, self.draws, parts_of)
        moved = program.move(actions)
        assert self.compared is not None
        return SlicedPlanned(
            program,
            whole.taps,
            owners,
            apart=moved,
            **names_in(program, self.whole, lasting, whole.returned),
            cut=replace(self, whole=self.whole.emptied()),
            ways=self.compared.ways,
            unreduced={name: unreduced(owner, ddp) for name, owner in owners.items()},
        )

    def _refuse(self, captured: Captured) -> None:
        names = [name for name, _ in _lasting(self.module)]
        hooked = [name for name, each in self.module.named_parameters() if each._backward_hooks]
        if hooked:
            raise OptionError(
                f"slices={self.count}: {hooked[0]} has a hook, which would see the gradient of "
                "each slice; expected none, or slices left out"
            )
        inputs = [node.name for node in primal_nodes(captured.joint)]
        changed = changed_inputs(captured.joint)
        if found := [name for name, node in zip(names, inputs, strict=False) if node in changed]:
            raise OptionError(
                f"slices={self.count}: the forward changes {', '.join(found)}, once for each "
                "slice; expected buffers that it only reads"
            )

    def _said(self) -> str:
        found = [place for place in self.places if place is not None]
        along = ", ".join(f"{found.count(d)} along dimension {d}" for d in sorted({*found}))
        return f"tensors cut: {along}"


@dataclass
class SlicedPlanned(Planned):
    """A chunk that runs each microbatch in slices."""

    program: SlicedProgram
    cut: Cut
    ways: tuple[Way, ...]
    unreduced: dict[str, Receiver]  # the owners, for gradients of slices that others follow

    @property
    def slices(self) -> int:
        return self.cut.count

    def begin(
        self, flat: Sequence[Tensor], before: Flight | None = None
    ) -> tuple[Flight, list[Tensor]]:
        """Run F of all slices. (They are never merged with a backward.)"""
        first = len(flat) - len(self.cut.places)
        flat, states = self.own(flat), []
        for k in range(self.slices):
            tensors = [*flat[:first], *self.cut.tensors(flat[first:], k)]
            owners = self.owners if k == self.slices - 1 else self.unreduced
            states.append(dict(zip(self.program.joint.inputs, tensors, strict=True)) | owners)
        flight = self.program.begin(states)
        found = self.program.whole(flight, self.ways)
        results = dict(zip(self.program.joint.results, found, strict=True))
        self.log.replay([results[name] for name in self.taps])
        return flight, [results[name] for name in self.outs]

    def ask(self, flight: Flight, tangents: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        self.program.gradients_came(flight.states, tangents, self.ways)
        for state in flight.states:
            for name, scale in zip(self.scales, scales, strict=True):
                if name in state:
                    state[name] = scale * self.cut.share

    def handed(self, flight: Flight) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for name, place in zip(self.gradients, self.cut.places, strict=True):
            parts = [state.pop(name, None) for state in flight.states] if name else []
            known = [part for part in parts if part is not None]
            found.append(_joined(known, place) if known else None)
        return found


class _GraphBothWays:
    """Results and gradients of the whole microbatch, and of its slices one after the other."""

    def __init__(
        self,
        cut: Cut,
        captured: Captured,
        uncut: Captured,
        lasting: Sequence[Tensor],
        ways: Sequence[Way],
        logged: Sequence[str],
    ) -> None:
        self.cut, self.captured, self.whole = cut, captured, uncut
        self.lasting, self.ways = lasting, ways
        self.results = ["the result", *(f"the logged {name}" for name in logged)]
        self.drawn: list[Tensor] = []
        tangent = next(n for n in _placeholders(uncut) if uncut.trace.kinds[n.name] == "gradient")
        self.tangent = noise(0, tangent.meta["val"])

    def uncut(self) -> dict[str, Any]:
        run = _SliceInterpreter(self.whole, [*self.cut.draws.values()], self.drawn)
        results, gradients = run.step(self.lasting, self.cut.whole.tensors, self.tangent)
        return self.named(results, gradients)

    def in_slices(self) -> dict[str, Any]:
        each: list[Any] = []
        tangents = apart(self.tangent, self.ways[0], self.cut.count)
        for k, tangent in enumerate(tangents):
            run = _SliceInterpreter(self.captured, [*self.cut.draws.values()], self.drawn, k)
            tensors = self.cut.tensors(self.cut.whole.tensors, k)
            each.append(run.step(self.lasting, tensors, tangent))
        results = [
            together(name, parts, way)
            for name, way, *parts in zip(
                self.results, self.ways, *(one for one, _ in each), strict=True
            )
        ]
        gradients = []
        for place, *parts in zip(self.places, *(one for _, one in each), strict=True):
            known = [part for part in parts if part is not None]
            gradients.append(_joined(known, place) if known else None)
        return self.named(results, gradients)

    @property
    def places(self) -> list[int | None]:
        return [*(None for _ in self.lasting), *self.cut.places]

    def named(self, results: Sequence[Any], gradients: Sequence[Any]) -> dict[str, Any]:
        names = [name for name, _ in _lasting(self.cut.module)]
        names += [f"input {i}" for i, _ in enumerate(self.cut.places)]
        found = dict(zip(self.results, results, strict=True))
        pairs = zip(names, gradients, strict=True)
        return found | {f"the gradient of {name}": g for name, g in pairs if g is not None}


class _SliceInterpreter(fx.Interpreter):
    """Runs a joint graph. The whole microbatch notes what it has `drawn`, and slice k reads its
    part of that."""

    def __init__(
        self, captured: Captured, draws: Sequence[Draw], drawn: list[Tensor], k: int | None = None
    ) -> None:
        super().__init__(captured.joint)
        self.captured, self.draws, self.drawn, self.k = captured, draws, drawn, k
        self.place_of = {node: i for i, node in enumerate(drawing(captured))}

    def step(
        self, lasting: Sequence[Tensor], tensors: Sequence[Tensor], tangent: Any
    ) -> tuple[list[Any], list[Any]]:
        """Results and gradients."""
        inputs = iter([*lasting, *tensors])
        kinds = self.captured.trace.kinds
        given = [
            tangent if kinds[node.name] == "gradient" else next(inputs)
            for node in _placeholders(self.captured)
        ]
        found = list(self.run(*given, enable_io_processing=False))
        count = self.captured.num_fwd_outputs
        return found[:count], found[count:]

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.place_of:
            return super().run_node(n)
        draw = self.draws[self.place_of[n]]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if self.k is None:
            made = draw.made(args, kwargs)
            self.drawn.append(made[1] if draw.is_dropout else made)
            return made
        part = draw.of(self.drawn[self.place_of[n]], self.k)
        return dropped(args[0], part, args[1]) if draw.is_dropout else part


def _places(call: ChunkCall, samples: int | None) -> tuple[int | None, ...]:
    """The dimension of each tensor that is as large as the microbatch. Of several it is the one
    where Megatron has the batch: of the stage's input dimension 1, of arguments 0."""
    before = call.has_input + call.scales
    behind = before + sum(isinstance(leaf, Tensor) for leaf in call.leaves)

    def place(i: int, tensor: Tensor) -> int | None:
        if call.has_input <= i < before or i >= behind:  # a scale, or a module's attribute
            return None
        usual = 1 if i < call.has_input else 0
        found = [d for d, size in enumerate(tensor.shape) if size == samples]
        if len(found) == 1:
            return found[0]
        return usual if usual in found else None

    return tuple(place(i, tensor) for i, tensor in enumerate(call.tensors))


def _ways(
    captured: Captured, uncut: Captured, count: int, logged: Sequence[str]
) -> tuple[Way, ...]:
    """How the result, and what is logged, are made of those of slices."""
    out, *losses = zip(_results(uncut), _results(captured), strict=True)
    way = way_of("the result", *out, count)
    if not isinstance(way, int):
        raise OptionError(
            f"slices={count}: the result is of shape {tuple(out[0].shape)} for a slice and for the "
            "whole microbatch; expected a dimension that is the batch"
        )
    for name, (whole, part) in zip(logged, losses, strict=True):
        if whole.shape != part.shape:
            raise OptionError(
                f"slices={count}: the logged {name} is of shape {tuple(part.shape)} for a slice "
                f"and {tuple(whole.shape)} for the whole microbatch; expected a mean"
            )
    means: list[Way] = ["mean" for _ in losses]
    return way, *means


def _results(captured: Captured) -> list[Any]:
    output = captured.joint.graph.find_nodes(op="output")[0].args[0]
    return [node.meta["val"] for node in output[: captured.num_fwd_outputs]]


def _placeholders(captured: Captured) -> list[fx.Node]:
    found: list[fx.Node] = captured.joint.graph.find_nodes(op="placeholder")
    return found


def _lasting(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _joined(parts: Sequence[Tensor], place: int | None) -> Tensor:
    """The gradient of what was cut along this dimension, or of what all slices share."""
    if place is not None:
        return torch.cat(tuple(parts), place)
    first, *others = parts
    for other in others:
        first = first + other
    return first


def _in_streams(captured: Captured, draws: Mapping[str, Draw]) -> dict[str, Draw]:
    """Let draws come from the random streams in which they were traced."""
    stream_of = {
        node.name: node.meta.get("custom", {}).get(STREAM) for node in captured.joint.graph.nodes
    }
    return {
        name: replace(draw, through=(draw_in, stream_of[name])) if stream_of[name] else draw
        for name, draw in draws.items()
    }


@contextmanager
def _as_drawn() -> Iterator[None]:
    """Restore random states behind the block."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    before = {
        name: state.clone() if isinstance(state, Tensor) else state.clone_state()
        for name, state in tracker.get_states().items()
    }
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            tracker.set_states(before)
