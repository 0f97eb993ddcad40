"""Megatron's recompute by module: `--recompute-granularity selective --recompute-modules ...`.

The solver `megatron-selective:layernorm+moe` recomputes these modules of each block, as Megatron-LM
does (its transformer_config.py, `recompute_modules`):

              what is recomputed                                what is kept of it
core_attn       the core of attention                           what goes in and comes out
layernorm       the norms before attention and MLP              what goes in
mla_up_proj     queries, keys and values of latent attention,   what goes in: the thin ones
                made of thin ones; norms between
moe_act         the activation of the experts                   what goes in
mlp             an MLP of a block without experts               what goes in and comes out
moe             router, experts, what moves tokens, and         what goes in and comes out
                shared experts
shared_experts  shared experts                                  what goes in and comes out

A module that keeps what comes out is run again whole, like a checkpointed layer: also its last
product, and collectives whose result nobody needs. Of the others only what is missing runs again.
It does so before the backward of the module begins, and a norm before that of the module that
reads it. Where Transformer Engine makes a norm and the product behind it one kernel, Megatron's
`layernorm` recomputes nothing.

Modules are those of `search/models/modules.py`, by their names in `Trace.modules`. A block that
lacks one of them recomputes the others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace

from overlapc.core.errors import OptionError
from overlapc.core.ir import Op, Plan, Problem, Trace, issue, parse_issue
from overlapc.solvers.field.baselines import (
    core_attention,
    hide_weights,
    is_core_attention,
    megatron_without,
    reruns,
    storages_of,
    target,
)

PREFIX = "megatron-selective:"
_ACTIVATIONS = ("gelu", "silu", "glu")
_THIN = ("q_thin", "kv_thin")
_EXPERTS = ("moe", "shared")
# Modules that run again whole, by their parts, and of which what comes out is kept
_WHOLE = {"mlp": ("mlp",), "moe": _EXPERTS, "shared_experts": ("shared",)}
# Norms, and the modules that read what they make
_NORMS = {"attn_norm": ("attn",), "norm": ("mlp", *_EXPERTS)}


@dataclass(frozen=True)
class _Region:
    """Forward ops of a block that run again together, before the first backward op of some of the
    block's modules."""

    ops: tuple[Op, ...]
    before: str  # this op


def modules_of(solver: str) -> tuple[str, ...]:
    """The modules that a solver's name has, in Megatron's order; OptionError for unknown ones."""
    names = solver.removeprefix(PREFIX).split("+")
    for name in names:
        if name not in MODULES:
            raise OptionError(
                f"solver {solver!r}: no module {name!r} to recompute; expected some of "
                f"{', '.join(MODULES)}, joined by +"
            )
    return tuple(name for name in MODULES if name in names)


def by_module(problem: Problem, solver: str) -> Plan:
    """Megatron's plan that recomputes the modules of the solver's name."""
    trace, dropped, regions = problem.trace, set[str](), list[_Region]()
    for name in modules_of(solver):
        if name in _WHOLE:
            found = _regions(trace, _WHOLE[name], _WHOLE[name])
            dropped |= {each for region in found for each in _inner(trace, region.ops)}
            regions += found
        else:
            dropped |= _DROPPED[name](problem)
        if name == "layernorm":
            regions += [one for norm, by in _NORMS.items() for one in _regions(trace, (norm,), by)]
    plan = megatron_without(problem, dropped, solver)
    return hide_weights(problem, _together(trace, regions, plan), at_most=1)


def _parts(trace: Trace, op: Op) -> tuple[str, ...]:
    """`attn`, `q`: the op's modules within its block."""
    _, _, within = trace.modules.get(op.name, "").partition("blocks.")
    return tuple(within.split(".")[1:])


def _block(trace: Trace, op: Op) -> str:
    return trace.modules[op.name].partition("blocks.")[2].split(".")[0]


def _regions(trace: Trace, names: Container[str], before: Container[str]) -> list[_Region]:
    """The forward ops of each block's modules of these names, and the first backward op of those
    they run before."""
    ops: dict[str, list[Op]] = {}
    first: dict[str, str] = {}
    for op in trace.ops:
        within = _parts(trace, op)
        if within and op.is_forward and within[0] in names:
            ops.setdefault(_block(trace, op), []).append(op)
        elif within and not op.is_forward and within[0] in before:
            first.setdefault(_block(trace, op), op.name)
    return [_Region(tuple(ops[block]), first.get(block, "")) for block in ops]


def _inner(trace: Trace, ops: Iterable[Op]) -> set[str]:
    """What the ops make for each other alone: no other op of the forward makes or reads it."""
    mine = {op.name for op in ops}
    outside = (op for op in trace.ops if op.is_forward and op.name not in mine)
    touched = (name for op in outside for name in (*op.inputs, *op.outputs))
    return _made(trace, ops) - storages_of(trace, touched)


def _made(trace: Trace, ops: Iterable[Op]) -> set[str]:
    return storages_of(trace, (name for op in ops for name in op.outputs)) - trace.resident


def _norms(problem: Problem) -> set[str]:
    trace = problem.trace
    found = (region.ops for norm in _NORMS for region in _regions(trace, (norm,), ()))
    return _made(trace, (op for ops in found for op in ops))


def _activations(problem: Problem) -> set[str]:
    """What the activations of experts make, with the product behind a gate."""
    trace = problem.trace
    ops = [op for op in trace.ops if op.is_forward and _parts(trace, op) == ("moe",)]
    first = [op for op in ops if target(op) in _ACTIVATIONS]
    made = {name for op in first for name in op.outputs}
    gated = [op for op in ops if target(op) == "mul" and not made.isdisjoint(op.inputs)]
    return _made(trace, [*first, *gated])


def _up_projections(problem: Problem) -> set[str]:
    """What latent attention makes of its thin tensors before its core. What comes from other ranks
    stays."""
    trace = problem.trace
    thin = {
        name
        for op in trace.ops
        if op.is_forward and _parts(trace, op)[1:] in {(n,) for n in _THIN}
        for name in op.outputs
    }
    region: list[Op] = []
    made = set(thin)
    for op in trace.ops:
        is_behind = _parts(trace, op)[:1] == ("attn",) and not made.isdisjoint(op.inputs)
        if is_behind and op.role == "forward" and not is_core_attention(op):
            region.append(op)
            made.update(op.outputs)
    return _made(trace, region) - storages_of(trace, thin)


_DROPPED: Mapping[str, Callable[[Problem], set[str]]] = {
    "core_attn": core_attention,
    "layernorm": _norms,
    "mla_up_proj": _up_projections,
    "moe_act": _activations,
}
MODULES = (*_DROPPED, *_WHOLE)


def _together(trace: Trace, regions: Iterable[_Region], plan: Plan) -> Plan:
    """The plan in which each region of which anything is recomputed runs again whole, in the place
    that it has."""
    saved = set(plan.saved)
    again = {parse_issue(text)[0] for text in plan.order if parse_issue(text)[1]}
    region_of: dict[str, _Region] = {}
    begins: dict[str, list[_Region]] = {}
    for region in sorted(regions, key=lambda region: len(region.ops)):
        if again.intersection(op.name for op in region.ops):
            # Of a region in another one, the larger counts.
            region_of |= {op.name: region for op in region.ops}
            begins.setdefault(region.before, []).append(region)
    order: list[str] = []
    done: set[str] = set()

    def run(op: Op) -> None:
        """Run the op again, behind all of its region, and what it reads before it."""
        text = issue(op.name, True)
        if text in done or not reruns(trace, op, saved):
            return
        done.add(text)
        for name in op.inputs:
            maker = trace.op.get(trace.value[name].producer)
            if maker is not None and maker.is_forward and name not in saved:
                run(maker)
        order.append(text)

    for text in plan.order:
        name, is_again = parse_issue(text)
        if is_again:
            for op in region_of[name].ops if name in region_of else (trace.op[name],):
                run(op)
            continue
        for region in begins.get(name, ()):
            for op in region.ops:
                run(op)
        order.append(text)
    return replace(plan, order=tuple(order))
