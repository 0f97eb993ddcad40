"""`measure` times every op of a captured graph on the device it will run on.

The joint graph runs whole and in order, on the real inputs, a few times, so each op meets the
caches and the allocator as in training. An op's time is the median over these runs and over all ops
of its signature; it includes freeing values that die with the op. Collectives' times come from
`measure_links`. They run here for their launches and for the data: in every run where sizes depend
on data, else in two, and a slow link does not make measuring long.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.core.errors import OptionError
from overlapc.core.ir import Cost, Profile, Slowdown
from overlapc.passes.summed import aside
from overlapc.passes.trace import Captured
from overlapc.profiler.cache import Cache, cache_key
from overlapc.profiler.clock import Clock, conditions_of, section_of
from overlapc.profiler.link_model import LinkModel
from overlapc.profiler.links import agree_sizes, behind_launches, measure_links, tensors
from overlapc.profiler.replay import Replay, ReplayStep
from overlapc.profiler.together import agree
from overlapc.tools.timing import now_ns

__all__ = ["measure", "measure_sizes", "retime"]

_STABLE = 0.02
_MIN_PASSES, _MAX_PASSES, _PASSES_TOGETHER = 3, 7, 5
_LIMIT_NS = 10_000_000_000
_CUDA_BLOCK = 512  # the caching allocator rounds every allocation up to this
_LABEL = "overlapc op: "


def measure(
    captured: Captured,
    primals: Sequence[Any] | None = None,
    *,
    tangents: Sequence[Any] | None = None,
    passes: int | None = None,
    links: LinkModel | None = None,
    cache: Cache | None = None,
) -> tuple[Profile, dict[str, int]]:
    """Return the costs of all ops, and the measured storage bytes of every value.

    `primals` and `tangents` are the joint graph's inputs, tensors and numbers; missing or fake ones
    are made up. Nothing that the caller owns changes: parameters, buffers and random state stay.
    `passes` fixes how often the graph is timed. Without it the graph is timed until its total is
    stable within 2%, on all ranks of its collectives' groups, which measure together. Without
    `links`, whose times are taken as they are, the links are measured, too. If the `cache` of every
    rank has all figures, only one probe of each kind of collective runs.

    CaptureError names an op that cannot run, or for which memory does not suffice.
    """
    if passes is not None and passes < 1:
        raise OptionError(f"passes={passes}: expected at least one")
    replay = Replay(captured, primals, tangents)
    with _undisturbed(replay.device):
        keys = _keys(replay)
        found = _from_cache(replay, keys, cache)
        if not _least(replay, int(found is not None)) or found is None:
            found = _run(replay, passes)
            _into_cache(replay, keys, found, cache)
        names, calls = list(replay.calls()), list(replay.calls().values())
        took: list[int] = []
        if calls:
            calls = agree_sizes(calls, replay.device)
            given = links
            links = given or measure_links(calls, device=replay.device, cache=cache)
            launches = [found.costs[name].compute_ns for name in names]
            took = [links.time_ns(call) for call in calls]
            if given is None:
                took = behind_launches(calls, took, launches, replay.device)
    if links is None:
        return Profile(found.costs, Slowdown(), found.conditions), found.sizes
    for name, ns in zip(names, took, strict=True):
        found.costs[name] = replace(found.costs[name], comm_ns=ns)
    how = {f"links.{key}": text for key, text in links.conditions.items()}
    return Profile(found.costs, links.slowdown, found.conditions | how), found.sizes


def measure_sizes(captured: Captured, others: Iterable[Sequence[Any]]) -> Iterator[dict[str, int]]:
    """Yield the storage bytes of every value for each of these inputs, but for inputs that are made
    up. They have the shapes of those that `measure` took: where no size depends on data, nothing
    runs and nothing is yielded."""
    for primals in others:
        replay = Replay(captured, primals)
        with _undisturbed(replay.device):
            if None not in _keys(replay).values():
                return
            memory = _Memory(replay)
            memory.measure()
        yield memory.sizes


def retime(
    captured: Captured, primals: Sequence[Any] | None, profile: Profile, passes: int = 1
) -> Profile:
    """Return the profile with every op's compute time measured again; links and memory stay.

    A shared machine changes its speed by the minute, so a prediction should be judged by op times
    taken next to the step that it predicts. All ranks of the graph's groups call this together.
    """
    replay = Replay(captured, primals)
    with _undisturbed(replay.device):
        times, conditions = _time(replay, passes)
    costs = {
        op.name: replace(profile.costs[op.name], compute_ns=times[op.signature])
        for op in captured.trace.ops
    }
    return replace(profile, costs=costs, conditions={**profile.conditions, **conditions})


@dataclass
class _Found:
    """The figures of a graph, without its collectives."""

    costs: dict[str, Cost]
    sizes: dict[str, int]
    conditions: dict[str, str]


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Run the block as compiled code runs, and restore the caller's random state and modes."""
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    collecting = gc.isenabled()
    with (
        torch.random.fork_rng(devices=cuda),
        torch.no_grad(),
        torch._C._DisableAutocast(),  # the graph already has autocast's casts
        _disable_current_modes(),
        aside(),
        # Under AOTAutograd's tracing the Python dispatcher is on. It would hold the GIL through
        # every wait, but gloo's threads need the GIL to release tensors: ranks would hang.
        torch._C._DisablePythonDispatcher(),
        torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(),
    ):
        gc.disable()  # a garbage collection within a pass is no op's cost
        try:
            yield
        finally:
            if collecting:
                gc.enable()


def _least(replay: Replay, number: int) -> int:
    """The least number of all ranks that share a group with this one."""
    for _ in replay.groups:
        for group in replay.groups:
            (number,) = agree([number], "min", group, replay.device)
    return number


def _run(replay: Replay, passes: int | None) -> _Found:
    times, conditions = _time(replay, passes)
    memory = _Memory(replay)
    workspace = memory.measure()
    costs = {
        op.name: Cost(times[op.signature], 0, workspace.get(op.name, 0), "measured")
        for op in replay.captured.trace.ops
    }
    if replay.drops:
        conditions["dropped"] = "what the forward keeps, for want of memory"
    if replay.lacking:
        conditions["made_up"] = f"{len(replay.lacking)} of the graph's inputs"
    if memory.otherwise:
        conditions["aliasing"] = (
            f"{len(memory.otherwise)} values share storage otherwise than traced: "
            + ", ".join(memory.otherwise[:5])
        )
    return _Found(costs, memory.sizes, {**conditions_of(replay.device), **conditions})


# --------------------------------------------------------------------------- time


@dataclass
class _Stopwatch:
    clock: Clock
    names: list[str] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    def before(self, step: ReplayStep) -> None:
        if step.is_op:
            self.names.append(step.node.name)
            self.marks.append(self.clock.mark())

    def after(self, step: ReplayStep, result: Any) -> None:
        if step.is_op:
            self.marks.append(self.clock.mark())

    def times(self) -> dict[str, int]:
        read = self.clock.read(self.marks)
        spans = zip(self.names, read[::2], read[1::2], strict=True)
        return {name: max(0, end - begin) for name, begin, end in spans}


def _time(replay: Replay, passes: int | None) -> tuple[dict[str, int], dict[str, str]]:
    """Signature -> nanoseconds, and a text that says how they were measured."""
    clock = Clock(replay.device)
    alone = bool(replay.groups) and bool(_least(replay, int(replay.runs_alone)))
    began = now_ns()
    replay.run(_Stopwatch(clock), alone)  # warm-up: it chooses kernels and maps memory
    clock.wait()
    affordable = _LIMIT_NS // max(1, now_ns() - began)
    if passes is not None:
        least = most = passes
    elif replay.groups:
        most = _least(replay, max(1, min(_PASSES_TOGETHER, affordable)))
        least = min(_MIN_PASSES, most)
    else:
        least, most = _MIN_PASSES, max(_MIN_PASSES, min(_MAX_PASSES, affordable))

    signature = {op.name: op.signature for op in replay.captured.trace.ops}
    starts = {step.node.name for step in replay.steps if step.is_start}
    count = Counter(signature.values())
    samples: dict[str, list[int]] = {}
    totals: list[int] = []
    total = 0.0
    while len(totals) < most:
        watch = _Stopwatch(clock)
        clock.wait()
        without = alone and bool(totals)  # the first of these runs times launches
        replay.run(watch, without)
        taken = {n: ns for n, ns in watch.times().items() if not (without and n in starts)}
        totals.append(sum(ns for name, ns in taken.items() if name not in starts))
        for name, ns in taken.items():
            samples.setdefault(signature[name], []).append(ns)
        before, total = total, sum(count[s] * statistics.median(ns) for s, ns in samples.items())
        stable = abs(total - before) <= _STABLE * total
        if len(totals) >= least and _least(replay, int(stable)):
            break
    spread = (max(totals) - min(totals)) / max(1, min(totals))
    return (
        {s: round(statistics.median(ns)) for s, ns in samples.items()},
        {
            "passes": f"median of {len(totals)}",
            "spread": f"{100 * spread:.1f}% between the fastest pass and the slowest",
        },
    )


# --------------------------------------------------------------------------- memory


class _Memory:
    """Measures memory in one run: workspace by op, real sizes, and which values share a storage."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.values = replay.captured.trace.value
        self.sizes: dict[str, int] = {}
        self.otherwise: list[str] = []  # values whose storage differs from the traced one
        self.made: dict[str, int] = {}  # op -> bytes of the storages it made
        self.peak: dict[str, int] = {}  # op -> most bytes that it held at once, on CUDA
        self.alive: dict[int, str] = {}  # storage -> the first value on it
        self.readers: dict[int, int] = {}  # storage -> values on it that are alive
        self.holds: dict[str, list[int]] = {}  # value -> its storages
        self.level = 0
        self.range: Any = None
        self.on_cuda = replay.device.type == "cuda"

    def measure(self) -> dict[str, int]:
        """Op -> transient bytes beyond its inputs and outputs; fills `sizes`, `otherwise`."""
        for node, value in self.replay.inputs.items():
            self._enter(node.name, value, is_input=True)
        if self.on_cuda:
            self.replay.run(self)
        # the user profiles, and only one profiler can run
        elif torch._C._autograd._profiler_enabled():
            self.replay.run(self)
            return {}
        else:
            self.peak = self._recorded()
        return {op: max(0, self.peak[op] - made) for op, made in self.made.items()}

    def _recorded(self) -> dict[str, int]:
        """Run with all CPU allocations recorded; op -> most bytes that it held at once.

        Uses PyTorch's older profiler: the newer one takes seconds to start, and prints.
        """
        config = torch._C._profiler.ProfilerConfig(
            torch._C._profiler.ProfilerState.CPU,
            False,  # report_input_shapes
            True,  # profile_memory
            False,  # with_stack
            False,  # with_flops
            False,  # with_modules
            torch._C._profiler._ExperimentalConfig(),
        )
        torch._C._autograd._enable_profiler_legacy(config)
        try:
            self.replay.run(self)
        finally:
            threads = torch._C._autograd._disable_profiler_legacy()
        return {name: peak for events in threads for name, peak in _peaks(events)}

    def before(self, step: ReplayStep) -> None:
        if self.on_cuda:
            self.level = torch.cuda.memory_allocated(self.replay.device)
            torch.cuda.reset_peak_memory_stats(self.replay.device)
        else:
            self.range = torch.profiler.record_function(_LABEL + step.node.name)
            self.range.__enter__()

    def after(self, step: ReplayStep, result: Any) -> None:
        name = step.node.name
        if self.on_cuda:
            highest = torch.cuda.max_memory_allocated(self.replay.device)
            if step.is_op:
                self.peak[name] = highest - self.level
        else:
            self.range.__exit__(None, None, None)
        if step.is_op:
            fresh = {
                t.untyped_storage()._cdata: t
                for t in tensors(result)
                if t.untyped_storage()._cdata not in self.alive
            }
            self.made[name] = sum(map(_allocated, fresh.values()))
        if name in self.values:
            self._enter(name, result)
        elif step.is_op:  # a tuple keeps the tensors of its getitems alive
            self.holds[name] = [
                t.untyped_storage()._cdata
                for t in tensors(result)
                if t.untyped_storage()._cdata in self.alive
            ]
            for storage in self.holds[name]:
                self.readers[storage] += 1
        for dead in (*step.frees, *step.drops):
            self._leave(dead.name)

    def _enter(self, name: str, value: Any, is_input: bool = False) -> None:
        self.sizes[name] = sum(map(_allocated, tensors(value)))
        self.holds[name] = [t.untyped_storage()._cdata for t in tensors(value)]
        for storage in self.holds[name]:
            first = self.alive.setdefault(storage, name)
            self.readers[storage] = self.readers.get(storage, 0) + 1
            alone = not is_input and len(self.holds[name]) == 1 and not self.replay.drops
            if alone and self.values[name].storage != first:
                self.otherwise.append(name)

    def _leave(self, name: str) -> None:
        for storage in self.holds.pop(name, ()):
            self.readers[storage] -= 1
            if self.readers[storage] == 0:
                del self.readers[storage], self.alive[storage]


def _peaks(events: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """(op, most bytes above those at its begin) from a thread's events in order of time.

    An op frees older memory only after its call, so that does not hide its peak.
    """
    name, depth, level, peak = "", 0, 0, 0
    for event in events:
        match event.kind():
            case "push":
                if event.name().startswith(_LABEL):
                    name, depth, level, peak = event.name().removeprefix(_LABEL), 0, 0, 0
                depth += 1
            case "pop":
                depth -= 1
                if name and depth == 0:
                    yield name, peak
                    name = ""
            case "memory_alloc":
                level += event.cpu_memory_usage()
                peak = max(peak, level)


def _allocated(tensor: torch.Tensor) -> int:
    held = getattr(tensor, "overlapc_held_bytes", 0)  # bytes that an opaque op's handle owns
    return _rounded(tensor.untyped_storage().nbytes(), tensor.device) + held


def _rounded(size: int, device: torch.device) -> int:
    return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK if device.type == "cuda" else size


# --------------------------------------------------------------------------- cache


def _keys(replay: Replay) -> Mapping[str, str | None]:
    """Op -> its signature with sizes as numbers; None if only a run shows a size."""
    keys: dict[str, str | None] = {}
    for step in replay.steps:
        if not step.is_op:
            continue
        values = [n.meta.get("val") for n in (*step.node.all_input_nodes, step.node)]
        sizes = [n for v in values for t in tensors(v) for n in t.shape if not isinstance(n, int)]
        signature = replay.captured.trace.op[step.node.name].signature
        known = all(n.node.expr.free_symbols <= replay.symbols.keys() for n in sizes)
        numbers = map(replay.number, sizes)
        keys[step.node.name] = cache_key(signature, numbers) if known else None
    return keys


def _from_cache(
    replay: Replay, keys: Mapping[str, str | None], cache: Cache | None
) -> _Found | None:
    if cache is None:
        return None
    costs: dict[str, Cost] = {}
    section = section_of(replay.device)
    for name, key in keys.items():
        figures = cache.get(section, key) if key is not None else None
        if figures is None or len(figures) != 2:
            return None
        costs[name] = Cost(figures[0], 0, figures[1], "measured")
    sizes = {
        node.name: sum(
            _rounded(replay.number(t.untyped_storage().nbytes()), t.device)
            for t in tensors(node.meta.get("val"))
        )
        for node in replay.captured.joint.graph.nodes
        if node.name in replay.captured.trace.value
    }
    return _Found(costs, sizes, {**conditions_of(replay.device), "passes": "cached"})


def _into_cache(
    replay: Replay, keys: Mapping[str, str | None], found: _Found, cache: Cache | None
) -> None:
    if cache is None:
        return
    section = section_of(replay.device)
    for name, key in keys.items():
        if key is not None:
            cost = found.costs[name]
            cache.put(section, key, (cost.compute_ns, cost.workspace_bytes))
    cache.save()
