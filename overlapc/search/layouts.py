"""`layouts` lists how a model can be divided over a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from overlapc.core.errors import OptionError
from overlapc.core.schedule import Schedule
from overlapc.profiler.hardware import FP8, load_hardware
from overlapc.search.frameworks.framework import Framework
from overlapc.search.frameworks.known import find_framework
from overlapc.search.models.transformer import Model, Transformer
from overlapc.solvers.pipeline.schedules import make_schedule

SCHEDULES = ("1f1b", "zero-bubble", "interleaved", "zero-bubble-v")
# How context-parallel ranks exchange keys and values, by Megatron's names: its default is first.
CP_COMM_TYPES = ("p2p", "a2a", "all_gather")
_MOST_CHUNKS = 8
_MOST_SEQUENCES = 16  # of a microbatch, unless the user names a number


@dataclass(frozen=True, order=True)
class Layout:
    """How ranks are divided: tp ranks share a matrix, pp ranks hold different layers, dp ranks see
    different data; a microbatch has `microbatch` sequences. The schedule says how many stages a
    rank holds. With `sequence` each tp rank has a part of each sequence between the matrices
    (Megatron's sequence parallelism). `chunks` is the number of interleaved stages of a rank.
    Context parallelism: cp ranks have a part of each sequence everywhere; for attention keys and
    values go round ("p2p"), heads are exchanged ("a2a"), or all are gathered. Expert parallelism:
    ep ranks, next to each other, divide the experts; 0 stands for as many as can. Expert tensor
    parallelism: with `shares_experts` tp ranks share each expert's matrices, too, else each has
    whole experts. `first_layers` and `last_layers` are those of the first and the last stage; 0: as
    all others, as far as they divide evenly."""

    tp: int
    pp: int
    dp: int
    microbatch: int
    schedule: str = "1f1b"
    sequence: bool = False
    chunks: int = 2
    cp: int = 1
    shares_experts: bool = False
    first_layers: int = 0
    last_layers: int = 0
    cp_comm_type: str = CP_COMM_TYPES[0]  # with one context-parallel rank without a meaning
    ep: int = 0

    @property
    def ends(self) -> tuple[int, int]:
        return self.first_layers, self.last_layers

    @property
    def etp(self) -> int:
        """How many ranks share an expert's matrices."""
        return self.tp if self.shares_experts else 1

    @property
    def expert_step(self) -> int:
        """How far apart the ranks are that divide the experts: ranks between them share an expert,
        or have the same tokens."""
        return 1 if self.sequence and not self.shares_experts else self.tp

    @property
    def replicas(self) -> int:
        """How many ranks hold the same dense weights, for different tokens."""
        return self.dp * self.cp

    def replicas_near(self, node: int) -> int:
        """How many of them share a node of so many GPUs."""
        return max(1, min(self.replicas, node // self.tp))

    @property
    def stages(self) -> int:
        return self.pp * {"interleaved": self.chunks, "zero-bubble-v": 2}.get(self.schedule, 1)

    def rows(self, microbatches: int) -> Schedule:
        """The rows of the schedule, before any are placed by costs."""
        return make_schedule(self.schedule, self.pp, microbatches, self.chunks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank of the pipeline holds, as its schedule places them."""
        if self.schedule == "interleaved":
            return tuple(range(rank, self.stages, self.pp))
        if self.schedule == "zero-bubble-v":
            return rank, 2 * self.pp - 1 - rank
        return (rank,)

    def __str__(self) -> str:
        tp = f"{self.tp}+sp" if self.sequence else f"{self.tp}"
        tp += "+etp" * self.shares_experts
        cp = f" cp={self.cp} {self.cp_comm_type}" if self.cp > 1 else ""
        ep = f" ep={self.ep}" if self.ep else ""
        text = f"tp={tp}{cp} pp={self.pp} dp={self.dp}{ep} microbatch={self.microbatch}"
        text += f" {self.schedule}" if self.pp > 1 else ""
        text += f" ends={self.first_layers},{self.last_layers}" if any(self.ends) else ""
        return text + (f" chunks={self.chunks}" if self.schedule == "interleaved" else "")


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, and what each step has to do on them."""

    hardware: str
    gpus: int
    gpus_per_node: int
    memory_bytes: int  # of one GPU, what may be used
    global_batch: int
    costs: str = ""  # a file of op times measured on one of them
    framework: str = "overlapc"  # the framework that runs the model
    fp8: bool = False  # products of matrices of the model's layers in FP8
    # Is `memory_bytes` for a whole run, also for what is beside its tensors (search/memory.py)?
    of_run: bool = False


@dataclass(frozen=True)
class Fixed:
    """The user's decisions; 0 or none leaves one open. Without `sequence` every tp rank has whole
    sequences."""

    tp: int = 0
    pp: int = 0
    dp: int = 0
    microbatch: int = 0
    schedule: str = ""
    sequence: bool = True
    chunks: int = 0  # interleaved stages of a rank
    cp: int = 1  # never open
    shares_experts: bool = False
    first_layers: int = 0  # of stages that are a whole rank's
    last_layers: int = 0
    cp_comm_type: str = ""
    ep: int = 0

    @property
    def ends(self) -> tuple[int, int]:
        return self.first_layers, self.last_layers

    def __post_init__(self) -> None:
        if self.cp_comm_type and self.cp == 1:
            raise OptionError(
                f"cp_comm_type={self.cp_comm_type} without context-parallel ranks; expected a cp "
                "of 2 or more, or none of both"
            )
        if self.cp_comm_type not in ("", *CP_COMM_TYPES):
            raise OptionError(
                f"cp_comm_type={self.cp_comm_type}: expected one of {', '.join(CP_COMM_TYPES)}"
            )
        if self.chunks and self.schedule not in ("", "interleaved"):
            raise OptionError(
                f"chunks={self.chunks} with schedule {self.schedule!r}, which fixes the stages of "
                "a rank; expected the schedule interleaved, or none"
            )
        if self.chunks == 1:
            raise OptionError(
                "chunks=1: expected 2 or more; a rank with one stage runs 1f1b or zero-bubble"
            )

    def __str__(self) -> str:
        """The decisions as options of the command: `--tp 2 --schedule 1f1b`."""
        decided = (
            "tp",
            "pp",
            "dp",
            "ep",
            "microbatch",
            "schedule",
            "chunks",
            "first_layers",
            "last_layers",
        )
        said = [
            f"--{key.replace('_', '-')} {getattr(self, key)}"
            for key in decided
            if getattr(self, key)
        ]
        said += [f"--cp {self.cp}"] if self.cp > 1 else []
        said += [f"--cp-comm-type {self.cp_comm_type}"] if self.cp_comm_type else []
        said += ["--expert-tensor-parallel"] if self.shares_experts else []
        said += [] if self.sequence else ["--no-sequence-parallel"]
        return " ".join(said) or "any layout"


ANY = Fixed()


def layouts(model: Model, cluster: Cluster, fixed: Fixed = ANY) -> Iterator[Layout]:
    """Every layout that divides ranks, heads, layers and batch without remainder. Ranks share
    sequences wherever they can: that sends the same bytes and holds fewer."""
    framework, cp = find_framework(cluster.framework), fixed.cp
    check_framework(model, cluster)
    _check_pipeline(cluster, framework, fixed)
    if not framework.of(model).splits_sequence(cp) or cluster.gpus % cp:
        raise OptionError(
            f"cp={cp} on {cluster.gpus} GPUs, with sequences of {model.seq} tokens of "
            f"{model.name}: expected a divisor of the GPUs, sequences of a multiple of {2 * cp} "
            "tokens, fused attention, and a preset or config.json, not a block of your own"
        )
    for tp in divisors(cluster.gpus // cp):
        if tp > cluster.gpus_per_node or not model.splits(tp):
            continue
        if cluster.gpus > cluster.gpus_per_node and cluster.gpus_per_node % tp:
            continue  # a tensor-parallel group would span two nodes
        if fixed.shares_experts and not model.splits_experts(tp):
            continue
        sequence = fixed.sequence and model.shares_sequence(tp, cp)
        kinds = comm_types(model, tp, cp)
        for pp in divisors(cluster.gpus // cp // tp):
            dp = cluster.gpus // cp // tp // pp
            if pp > 1 and framework.gathers:
                break  # weights would be gathered for each microbatch and stage
            if pp * model.period > model.layers or cluster.global_batch % dp:
                continue
            shares = fixed.shares_experts and tp > 1
            for microbatch in divisors(cluster.global_batch // dp):
                if microbatch > max(_MOST_SEQUENCES, fixed.microbatch):
                    break
                for (schedule, chunks), kind in product(
                    _schedules(model, pp, fixed, framework), kinds
                ):
                    layout = Layout(
                        tp,
                        pp,
                        dp,
                        microbatch,
                        schedule,
                        sequence,
                        chunks,
                        cp,
                        shares,
                        *fixed.ends,
                        kind,
                    )
                    if layout.stages * model.period > model.layers:
                        continue
                    if any(fixed.ends) and not _has_ends(model, layout):
                        continue
                    if (
                        schedule == "interleaved"
                        and (cluster.global_batch // dp // microbatch) % pp
                    ):
                        continue  # its microbatches come in groups of pp
                    if all(
                        not getattr(fixed, key) or getattr(fixed, key) == getattr(layout, key)
                        for key in ("tp", "pp", "dp", "microbatch", "schedule", "cp_comm_type")
                    ):
                        for ep in expert_sizes(model, layout, fixed.ep, cluster.gpus_per_node):
                            yield replace(layout, ep=ep)


def check_framework(model: Model, cluster: Cluster) -> None:
    """Raise OptionError if the search cannot say what the cluster's framework makes of the
    model."""
    framework = find_framework(cluster.framework)
    if cluster.fp8:
        check_fp8(model, cluster)
    if framework.dispatcher != "alltoall" and not isinstance(model, Transformer):
        raise OptionError(
            f"framework {cluster.framework} with a block of your own, {model.name}, which sends "
            "its tokens itself; expected a preset or a config.json"
        )
    if framework.dispatcher != "alltoall" and not model.experts:
        raise OptionError(
            f"framework {cluster.framework} with {model.name}: expected a model with experts, "
            "whose tokens it sends"
        )
    if framework.gathers:
        _check_sharded(model, cluster, framework)


def _check_pipeline(cluster: Cluster, framework: Framework, fixed: Fixed) -> None:
    """Raise OptionError if the framework has no such pipeline."""
    piped = fixed.pp > 1 or fixed.chunks or any(fixed.ends) or fixed.schedule not in ("", "1f1b")
    if framework.gathers and piped:
        raise OptionError(
            f"framework {cluster.framework}, which divides weights over replicas, with {fixed}: "
            "expected no pipeline"
        )
    asked = "interleaved" if fixed.chunks else fixed.schedule
    if asked and framework.schedules and asked not in framework.schedules:
        raise OptionError(
            f"framework {cluster.framework} with {fixed}: it runs no such schedule; expected "
            f"{' or '.join(framework.schedules)}"
        )


def _check_sharded(model: Model, cluster: Cluster, framework: Framework) -> None:
    """Raise OptionError if the search cannot say what dividing the model's weights gives."""
    node = cluster.gpus_per_node
    if not isinstance(model, Transformer):
        found = f"a block of your own, {model.name}; expected a preset or a config.json"
    elif model.experts:
        found = f"experts, {model.experts} in {model.name}; expected a model without"
    elif framework.in_node and cluster.gpus > node and cluster.gpus % node:
        found = f"{cluster.gpus} GPUs, {node} a node; expected replicas that fill nodes"
    else:
        return
    raise OptionError(
        f"framework {cluster.framework}, which divides weights over replicas, with {found}"
    )


def comm_types(model: Model, tp: int, cp: int) -> tuple[str, ...]:
    """How so many context-parallel ranks may exchange keys and values; the default, if there are
    none. All-to-alls divide the heads of a tensor-parallel rank."""
    if cp == 1 or not isinstance(model, Transformer):
        return CP_COMM_TYPES[:1]
    return tuple(kind for kind in CP_COMM_TYPES if kind != "a2a" or model.splits_heads(tp * cp))


def _has_ends(model: Model, layout: Layout) -> bool:
    """Can the first and the last stage have the layers that the layout says?"""
    if layout.pp == 1 or layout.stages > layout.pp:
        return False  # a rank with all stages, or with several
    try:
        return min(stage_layers(model, layout.stages, layout.ends)) > 0
    except OptionError:
        return False


def check_fp8(model: Model, cluster: Cluster) -> None:
    """Raise OptionError if the search cannot say what FP8 gives."""
    hardware, framework = cluster.hardware, cluster.framework
    if FP8 not in load_hardware(hardware).peak_flops:
        found = f"on {hardware}, whose file names no peak_flops.{FP8}; expected one that does"
    elif not isinstance(model, Transformer):
        found = f"with a block of your own, {model.name}; expected a preset or a config.json"
    elif "attention" in find_framework(framework).unfused.split():
        found = f"with framework {framework}; expected one with fused attention"
    else:
        return
    raise OptionError(f"FP8 {found}")


def _schedules(
    model: Model, pp: int, fixed: Fixed, framework: Framework
) -> Iterator[tuple[str, int]]:
    """The schedules that the framework runs, with their chunks: two, more where all chunks have
    equal size. If the user says how many chunks, those alone that have so many."""
    if fixed.chunks:
        yield from [("interleaved", fixed.chunks)] if pp > 1 else []
        return
    runs = framework.schedules or SCHEDULES
    for schedule in runs if pp > 1 else SCHEDULES[:1]:
        yield schedule, 2
    if pp > 1 and "interleaved" in runs:
        for chunks in range(3, _MOST_CHUNKS + 1):
            if model.layers % (pp * chunks * model.period) == 0:
                yield "interleaved", chunks


def expert_sizes(model: Model, layout: Layout, ep: int, node: int = 0) -> list[int]:
    """Over how many ranks the layout's experts may be divided: as many as can, and as many as a
    `node` of so many GPUs has whole groups of; unless it is to be `ep`. Without experts it is
    0."""
    if not model.experts:
        return [] if ep > 1 else [0]
    sizes = divisors(math.gcd(model.experts, _across(layout)))
    if ep:
        return [ep] if ep in sizes else []
    near = [size for size in sizes if node % (size * layout.expert_step) == 0]
    return sizes[-1:] if model.whole or not near else sorted({sizes[-1], near[-1]}, reverse=True)


def expert_ranks(model: Model, layout: Layout) -> int:
    """The number of ranks over which the experts are divided."""
    if not model.experts:
        return 1
    return layout.ep or math.gcd(model.experts, _across(layout))


def expert_replicas(model: Model, layout: Layout) -> int:
    """How many ranks hold the same experts, for different tokens."""
    return _across(layout) // expert_ranks(model, layout)


def _across(layout: Layout) -> int:
    """How many ranks of a stage have other tokens for the experts than each other."""
    return layout.replicas * layout.tp // layout.expert_step


def replicas(model: Model, layout: Layout) -> tuple[int, int]:
    """How many ranks hold the same dense weights, and how many the same experts."""
    return layout.replicas, expert_replicas(model, layout) if model.experts else 1


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def stage_layers(model: Model, stages: int, ends: tuple[int, int] = (0, 0)) -> list[int]:
    """Split blocks into stages of whole periods; the stages in the middle get the remainder. `ends`
    are the layers of the first and the last stage, where these are given."""
    if any(ends):
        return _between(model, stages, *ends)
    periods = model.layers // model.period
    if periods < stages:
        raise OptionError(
            f"{model.name}: {model.layers} layers cannot be divided over {stages} stages"
        )
    each, more = divmod(periods, stages)
    first = (stages - more) // 2
    counts = [(each + (first <= s < first + more)) * model.period for s in range(stages)]
    counts[-1] += model.layers % model.period
    return counts


def _between(model: Model, stages: int, first: int, last: int) -> list[int]:
    """Split what the ends leave among the other stages."""
    others = stages - bool(first) - bool(last)
    left = model.layers - first - last
    if (
        first % model.period
        or last % model.period
        or left < 0
        or (others == 0) != (left == 0)
        or left // model.period < others
    ):
        raise OptionError(
            f"{model.name}: {model.layers} layers cannot be divided over {stages} stages with "
            f"{first or 'any number'} in the first and {last or 'any number'} in the last; "
            f"expected multiples of {model.period} that leave some for each of the others"
        )
    middle = stage_layers(replace(model, layers=left), others) if others else []
    return [*([first] if first else []), *middle, *([last] if last else [])]


def dense_layers(model: Model, counts: Sequence[int]) -> list[int]:
    """How many of each stage's layers are among the first of the model, which have no experts."""
    found, before = [], 0
    for layers in counts:
        found.append(max(0, min(layers, model.dense_first - before)))
        before += layers
    return found


def microbatches(cluster: Cluster, layout: Layout) -> int:
    """The number of microbatches of a layout's step."""
    return cluster.global_batch // layout.dp // layout.microbatch
