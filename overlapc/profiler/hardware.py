"""`load_hardware` reads what a machine can do from `hardware/*.toml` or a file of yours.

Every figure in such a file is a table `{ value = 312e12, source = "where it is from" }`, so that
an estimate can say what it stands on; `Hardware.sources` keeps the sources by dotted key. To
describe a machine of your own, give `load_hardware` the path of a file with what is different from
the nearest, whose name is its `base`.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from overlapc.core.errors import FileError, OptionError, did_you_mean
from overlapc.core.files import StrPath, printable, read_text
from overlapc.core.ir import Slowdown
from overlapc.emulate.model import Kind
from overlapc.profiler.known import CALLED, FOLDER, hardware_name, known_hardware
from overlapc.profiler.link_spec import LinkSpec, Measured, Table, interpolate
from overlapc.profiler.shapes import Kernels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Hardware", "Kernels", "LinkSpec", "format_hardware", "known_hardware", "load_hardware"]

FP8 = "float8"  # the name of its rate among a machine's
_KERNELS = ("tn", "nn", "nt", "attention_forward", "attention_backward")
_FILLS = ("attention_forward_fill", "attention_backward_fill")
_LONG = ("attention_forward_long", "attention_backward_long")
_OLDER = ("products", "attention")  # of libraries of 2023
_STREAMS = ("norm", "norm_backward", "softmax", "softmax_backward", "cast", "dropout")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")


@dataclass(frozen=True)
class Hardware:
    """One kind of machine. Rates are peaks; efficiencies are the reachable part of them."""

    name: str
    status: str  # how far the figures can be trusted, in words
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    memory_efficiency: float
    launch_ns: int
    matmul_efficiency: Table  # smallest of m, n, k -> part of the peak
    attention_efficiency: float
    gpus_per_node: int
    intra: LinkSpec
    inter: LinkSpec
    sources: Mapping[str, str] = field(repr=False)
    kernels: Kernels | None = None  # where they were measured
    total: int = 0  # bytes that CUDA reports; 0: as many as the vendor says
    in_place: float = 0.0  # memory_efficiency of ops that write in place; 0: the same
    float8: float = 1.0  # the part of its peak that FP8 reaches, beside that of half precision
    # Where they were measured: the part of the memory's rate that PyTorch's own kernels reach
    streams: Mapping[str, float] = field(default_factory=dict)

    @property
    def half_flops(self) -> float:
        """The fastest rate of two-byte numbers, or wider ones if it has no others."""
        return max(rate for dtype, rate in self.peak_flops.items() if dtype != FP8)

    def flops_ns(self, flops: float, dtype: str, efficiency: float) -> float:
        peak = self.peak_flops.get(dtype) or self.peak_flops["float32"]
        peak *= self.float8 if dtype == FP8 else 1.0
        return flops / (peak * efficiency) * 1e9

    def memory_ns(self, moved_bytes: float) -> float:
        return self.stream_ns(moved_bytes, "")

    def stream_ns(self, moved_bytes: float, kernel: str) -> float:
        """How long a kernel of PyTorch's takes that mostly moves memory."""
        efficiency = self.streams.get(kernel, self.memory_efficiency)
        return moved_bytes / (self.memory_bytes_per_s * efficiency) * 1e9

    def in_place_ns(self, moved_bytes: float) -> float:
        efficiency = self.in_place or self.memory_efficiency
        return moved_bytes / (self.memory_bytes_per_s * efficiency) * 1e9

    @property
    def total_bytes(self) -> int:
        return self.total or self.memory_bytes

    @property
    def add_ns_per_kib(self) -> float:
        """How long it takes to add a KiB of a gradient to another: two are read, one is written."""
        return self.in_place_ns(3 * 1024)

    def average_ns(self, sizes: Iterable[int], ranks: int, per_node: int) -> int:
        """How long it takes to average gradients of so many bytes over ranks, at most `per_node` of
        them on a node: each is summed, then divided in place."""
        if ranks <= 1:
            return 0
        sizes = list(sizes)
        summed = sum(self.collective_ns("all_reduce", size, ranks, per_node) for size in sizes)
        return summed + round(self.in_place_ns(2 * sum(sizes)))

    def most_in_a_node(self, ranks: Iterable[int]) -> int:
        """How many of these ranks share a node at most, where nodes are filled one by one."""
        return max(Counter(rank // self.gpus_per_node for rank in ranks).values())

    def matmul_part(self, smallest_dimension: int) -> float:
        return interpolate(self.matmul_efficiency, smallest_dimension)

    def collective_ns(self, kind: Kind, size_bytes: int, ranks: int, per_node: int) -> int:
        """How long a collective over `ranks` takes, of which at most `per_node` are on one node.

        Between nodes a ring enters and leaves each node once, so its ranks share the network
        cards of as many GPUs as they are; it takes no less than inside a node, whose links it
        passes. Of an all-to-all only what other nodes get crosses; the rest stays inside meanwhile.
        """
        if ranks <= per_node:
            return self.intra.collective_ns(kind, size_bytes, ranks)
        rate = self.inter.bytes_per_s
        share = min(per_node / self.gpus_per_node, self.intra.bytes_per_s / rate)
        if kind in ("all_to_all", "p2p", "broadcast"):  # no ring: every rank crosses by itself
            share = min(1 / self.gpus_per_node, self.intra.bytes_per_s / rate)
        if kind in ("p2p", "broadcast"):
            return self.inter.collective_ns(kind, size_bytes, ranks, share)
        if kind != "all_to_all":
            across_ns = self.inter.collective_ns(kind, size_bytes, ranks, share)
            return max(across_ns, self.intra.collective_ns(kind, size_bytes, per_node))
        crossing = round(size_bytes * (ranks - per_node) / (ranks - 1))
        inside_ns = self.intra.collective_ns(kind, size_bytes * per_node // ranks, per_node)
        return max(inside_ns, self.inter.collective_ns(kind, crossing, ranks, share))


def load_hardware(name_or_path: StrPath) -> Hardware:
    """Load a machine by name (`hardware_name`), or from a file of the same form."""
    path = Path(name_or_path)
    if path.suffix != ".toml" and path.name == str(name_or_path):
        if (name := hardware_name(path.name)) in known_hardware():
            return _known(name)
        if not path.exists():
            meant = did_you_mean(path.name, (*known_hardware(), *CALLED))
            raise OptionError(
                f"unknown hardware {str(name_or_path)!r}; known: {', '.join(known_hardware())}; "
                f"or give the path of a .toml file{meant}"
            )
    return _read(path)


@cache
def _known(name: str) -> Hardware:
    return _read(FOLDER / f"{name}.toml")


def _read(path: Path) -> Hardware:
    return _parsed(path, read_text(path, "hardware file"))


@cache
def _parsed(path: Path, text: str) -> Hardware:
    try:
        data = tomllib.loads(text)
        base = data.pop("base", None)
        if isinstance(base, str) and base in known_hardware():
            text = read_text(FOLDER / f"{base}.toml", "hardware file")
            below = tomllib.loads(text)
            for link in ("intra", "inter"):  # times of another link than the file's are not its
                if isinstance(data.get(link), dict) and isinstance(below.get(link), dict):
                    below[link].pop("all_reduce_us", None)
            data = _over(below, data)
        elif base is not None:
            raise FileError(
                f"hardware file {printable(str(path))}: base is {base!r}, expected one of "
                f"{', '.join(known_hardware())}"
            )
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileError(f"hardware file {printable(str(path))} is not TOML: {error}") from error
    return _TomlReader(path, data).hardware()


def _over(base: dict[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Data of one file laid over another's, table by table; a figure is taken as a whole."""
    found = dict(base)
    for key, value in data.items():
        below = found.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        figure = both and ("value" in value or "value" in below)  # type: ignore[operator]
        found[key] = _over(below, value) if both and not figure else value  # type: ignore[arg-type]
    return found


def format_hardware(machine: Hardware) -> str:
    """Write the machine as a file that `load_hardware` reads."""

    def figure(key: str, value: object) -> str:
        name, source = key.split(".", 1)[1], json.dumps(machine.sources[key])
        return f"{name} = {{ value = {json.dumps(value)}, source = {source} }}"

    lines = [f"name = {json.dumps(machine.name)}", f"status = {json.dumps(machine.status)}"]
    lines += ["", "# flops per second", "[peak_flops]"]
    lines += [figure(f"peak_flops.{dtype}", rate) for dtype, rate in machine.peak_flops.items()]
    lines += ["", "[memory]", figure("memory.bytes", machine.memory_bytes)]
    lines += [figure("memory.total", machine.total)] if machine.total else []
    lines += [
        figure("memory.bytes_per_s", machine.memory_bytes_per_s),
        figure("memory.efficiency", machine.memory_efficiency),
    ]
    lines += [figure("memory.in_place", machine.in_place)] if machine.in_place else []
    if machine.streams:
        lines += ["", "# PyTorch's own kernels, parts of memory.bytes_per_s", "[streams]"]
        lines += [figure(f"streams.{name}", part) for name, part in machine.streams.items()]
    lines += ["", "[compute]", figure("compute.launch_ns", machine.launch_ns)]
    lines += [figure("compute.float8", machine.float8)] if machine.float8 != 1.0 else []
    lines += [
        "# [smallest of m, n, k, part of the peak]",
        figure("compute.matmul_efficiency", machine.matmul_efficiency),
        figure("compute.attention_efficiency", machine.attention_efficiency),
    ]
    if machine.kernels is not None:
        lines += ["", "[kernels]"]
        lines += [figure("kernels.multiprocessors", machine.kernels.multiprocessors)]
        lines += [figure("kernels.ramp", machine.kernels.ramp)]
        parts = {**machine.kernels.parts, **machine.kernels.fills}
        lines += [figure(f"kernels.{k}", part) for k, part in parts.items()]
        lines += [figure(f"kernels.{k}", table) for k, table in machine.kernels.long.items()]
        lines += [figure(f"kernels.older_{k}", part) for k, part in machine.kernels.older.items()]
        if machine.kernels.aligned:
            lines += [figure("kernels.aligned", machine.kernels.aligned)]
        if not math.isinf(machine.kernels.writing):
            lines += [figure("kernels.writing", machine.kernels.writing)]
    lines += ["", "[node]", figure("node.gpus", machine.gpus_per_node)]
    for name, link in (("intra", machine.intra), ("inter", machine.inter)):
        lines += ["", f"[{name}]", figure(f"{name}.alpha_ns", link.alpha_ns)]
        lines += [
            figure(f"{name}.bytes_per_s", link.bytes_per_s),
            figure(f"{name}.slowdown.compute_permille", link.slowdown.compute_permille),
            figure(f"{name}.slowdown.comm_permille", link.slowdown.comm_permille),
        ]
        for kind, part in link.efficiency.items():
            lines.append(figure(f"{name}.efficiency.{kind}", part))
        for kind, table in link.busbw.items():
            lines.append(figure(f"{name}.busbw.{kind}", table))
        if link.measured:
            rows = [[ranks, size, round(ns / 1000, 3)] for ranks, size, ns in link.measured]
            lines.append(figure(f"{name}.all_reduce_us", rows))
    return "\n".join(lines) + "\n"


class _TomlReader:
    """Takes figures out of the parsed file by dotted key, and keeps their sources."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self.data = path, data
        self.sources: dict[str, str] = {}

    def hardware(self) -> Hardware:
        matmul = self.table("compute.matmul_efficiency")
        for _, part in matmul:
            self.require(part <= 1, "compute.matmul_efficiency", "a part of the peak, 0 to 1")
        flops = {dtype: self.number(f"peak_flops.{dtype}") for dtype in self.section("peak_flops")}
        self.require("float32" in flops, "peak_flops.float32", "given: others fall back to it")
        found = Hardware(
            name=self.text("name"),
            status=self.text("status"),
            peak_flops=flops,
            memory_bytes=self.whole("memory.bytes"),
            memory_bytes_per_s=self.number("memory.bytes_per_s"),
            memory_efficiency=self.part("memory.efficiency"),
            launch_ns=int(self.number("compute.launch_ns")),
            matmul_efficiency=matmul,
            attention_efficiency=self.part("compute.attention_efficiency"),
            gpus_per_node=self.whole("node.gpus"),
            intra=self.link("intra"),
            inter=self.link("inter"),
            sources=self.sources,
            kernels=self.kernels() if "kernels" in self.data else None,
            total=self.whole("memory.total") if self.has("memory.total") else 0,
            in_place=self.part("memory.in_place") if self.has("memory.in_place") else 0.0,
            float8=self.part("compute.float8") if self.has("compute.float8") else 1.0,
            streams=self.streams() if "streams" in self.data else {},
        )
        self.require(
            found.total_bytes >= found.memory_bytes, "memory.total",
            f"memory.bytes ({found.memory_bytes}) or more, found {found.total}",
        )  # fmt: skip
        for key in _leaves(self.data):  # a misspelt one would change nothing
            read = key in self.sources or key in ("name", "status")
            self.require(read, key, "no such key; those of other machines show which there are")
        return found

    def kernels(self) -> Kernels:
        return Kernels(
            self.whole("kernels.multiprocessors"),
            self.number("kernels.ramp"),
            {key: self.part(f"kernels.{key}") for key in _KERNELS},
            {key: self.number(f"kernels.{key}") for key in _FILLS},
            {key: self.table(f"kernels.{key}") for key in _LONG if self.has(f"kernels.{key}")},
            self.aligned() if self.has("kernels.aligned") else (),
            self.writing() if self.has("kernels.writing") else math.inf,
            {k: self.part(f"kernels.older_{k}") for k in _OLDER if self.has(f"kernels.older_{k}")},
        )

    def writing(self) -> float:
        found = self.number("kernels.writing")
        self.require(found >= 1, "kernels.writing", f"a norm's power, 1 or more, found {found}")
        return found

    def aligned(self) -> Table:
        found = self.table("kernels.aligned")
        sizes, parts = zip(*found, strict=True)
        rows = f"rows of 2, 4, 8 and 16 bytes, found {', '.join(map('{:g}'.format, sizes))}"
        self.require(sizes == (2, 4, 8, 16), "kernels.aligned", rows)
        rising = f"parts of a rate up to 1, none less than before, found {list(parts)}"
        self.require(list(parts) == sorted(parts) and parts[-1] <= 1, "kernels.aligned", rising)
        return found

    def streams(self) -> dict[str, float]:
        return {key: self.part(f"streams.{key}") for key in _STREAMS if self.has(f"streams.{key}")}

    def link(self, name: str) -> LinkSpec:
        given = self.section(name)
        efficiency = {
            kind: self.part(f"{name}.efficiency.{kind}") for kind in self.kinds(name, "efficiency")
        }
        busbw = {kind: self.table(f"{name}.busbw.{kind}") for kind in self.kinds(name, "busbw")}
        slow = [
            int(self.number(f"{name}.slowdown.{which}_permille")) for which in ("compute", "comm")
        ]
        self.require(min(slow) >= 1000, f"{name}.slowdown", "1000 or more thousandths")
        return LinkSpec(
            alpha_ns=int(self.number(f"{name}.alpha_ns")),
            bytes_per_s=self.number(f"{name}.bytes_per_s"),
            efficiency=efficiency,
            busbw=busbw,
            slowdown=Slowdown(*slow),
            measured=self.measured(f"{name}.all_reduce_us") if "all_reduce_us" in given else (),
        )

    def measured(self, key: str) -> tuple[Measured, ...]:
        rows = self.figure(key)
        good = isinstance(rows, list) and all(
            isinstance(row, list) and len(row) == 3 and all(map(_is_positive, row)) for row in rows
        )
        self.require(good, key, "a list of [ranks, full bytes, microseconds] rows, above zero")
        keys = [(row[0], row[1]) for row in rows]
        self.require(keys == sorted(set(keys)), key, "rows by ranks, and of these by bytes")
        enough = bool(keys) and min(Counter(ranks for ranks, _ in keys).values()) > 1
        self.require(enough, key, "two sizes or more for each number of ranks")
        return tuple((int(ranks), int(size), us * 1000.0) for ranks, size, us in rows)

    def require(self, holds: bool, key: str, expected: str) -> None:
        if not holds:
            shown = printable(f"{self.path}: {key}")
            raise FileError(f"hardware file {shown}: expected {expected}")

    def get(self, key: str) -> Any:
        found: Any = self.data
        for word in key.split("."):
            self.require(isinstance(found, dict) and word in found, key, "this key; it is missing")
            found = found[word]
        return found

    def has(self, key: str) -> bool:
        section, name = key.split(".")
        return name in self.section(section)

    def text(self, key: str) -> str:
        found = self.get(key)
        self.require(isinstance(found, str), key, f"a string, found {found!r}")
        return printable(str(found))

    def section(self, key: str) -> dict[str, Any]:
        found = self.get(key)
        self.require(isinstance(found, dict) and bool(found), key, "a section with figures")
        return dict(found)

    def kinds(self, link: str, section: str) -> list[str]:
        found = self.get(link).get(section, {})
        self.require(isinstance(found, dict), f"{link}.{section}", "a section by collective")
        for kind in found:
            self.require(kind in _KINDS, f"{link}.{section}.{kind}", f"one of {', '.join(_KINDS)}")
        return list(found)

    def figure(self, key: str) -> Any:
        found = self.get(key)
        self.require(
            isinstance(found, dict)
            and set(found) == {"value", "source"}
            and isinstance(found["source"], str)
            and bool(found["source"].strip()),
            key,
            'a table { value = ..., source = "..." }',
        )
        self.sources[key] = found["source"]
        return found["value"]

    def number(self, key: str) -> float:
        value = self.figure(key)
        self.require(_is_positive(value), key, f"a number above zero, found {value!r}")
        return float(value)

    def whole(self, key: str) -> int:
        value = self.number(key)
        self.require(value.is_integer(), key, f"a whole number, found {value!r}")
        return int(value)

    def part(self, key: str) -> float:
        value = self.number(key)
        self.require(value <= 1, key, f"a part of the peak, 0 to 1, found {value!r}")
        return value

    def table(self, key: str) -> Table:
        value = self.figure(key)
        good = isinstance(value, list) and all(
            isinstance(row, list) and len(row) == 2 and all(map(_is_positive, row)) for row in value
        )
        self.require(good and bool(value), key, "a list of [key, value] rows, above zero")
        keys = [row[0] for row in value]
        self.require(keys == sorted(set(keys)), key, "ascending keys")
        return tuple((float(left), float(right)) for left, right in value)


def _leaves(data: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The dotted keys of all figures, and of whatever else is no section."""
    for key, value in data.items():
        if isinstance(value, dict) and value and "value" not in value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def _is_positive(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
