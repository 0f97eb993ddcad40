"""`LinkModel` has the measured times of collectives alone on their lanes; torch-free, prints and
parses.

A collective is described by its *full* bytes (what an all-gather makes, what a reduce-scatter
takes, the larger side of an all-to-all), as in `overlapc.emulate.model`. Between measured sizes
times are interpolated linearly; beyond them the line through the two nearest sizes goes on.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

from overlapc.core.errors import FileError, InvalidProblem
from overlapc.core.ir import Slowdown
from overlapc.emulate.model import Kind

__all__ = ["Collective", "Curve", "LinkModel"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a graph. `dtype` is set if the collective adds numbers, else it is ""."""

    group: str
    kind: Kind
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Curve:
    """The measured times of one kind of collective on one process group, by size.

    `points` are (full bytes, nanoseconds), ascending; `source` is `measured` or `cached`.
    """

    group: str
    kind: Kind
    dtype: str
    ranks: int
    points: tuple[tuple[int, int], ...]
    source: str

    def time_ns(self, size_bytes: int) -> int:
        if size_bytes <= 0 or self.ranks == 1:
            return 0
        sizes = [size for size, _ in self.points]
        at = bisect_left(sizes, size_bytes)
        if at < len(sizes) and sizes[at] == size_bytes:
            return self.points[at][1]
        if len(sizes) == 1:
            return self.points[0][1] * size_bytes // sizes[0]
        (left, low), (right, high) = self.points[max(0, min(at, len(sizes) - 1) - 1) :][:2]
        between_ns = low + (high - low) * (size_bytes - left) / (right - left)
        # a negative latency is noise: use the line through the origin
        if at == 0 and between_ns < 0:
            return low * size_bytes // left
        return max(round(between_ns), high if at == len(sizes) else 0)


@dataclass(frozen=True)
class LinkModel:
    """The measured links under a graph, agreed among its ranks; `conditions` says how they were
    measured."""

    curves: tuple[Curve, ...]
    slowdown: Slowdown = field(default_factory=Slowdown)
    conditions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _by_kind(self) -> Mapping[tuple[str, str, str], Curve]:
        return {(curve.group, curve.kind, curve.dtype): curve for curve in self.curves}

    def curve(self, call: Collective) -> Curve:
        try:
            return self._by_kind[call.group, call.kind, call.dtype]
        except KeyError:
            known = sorted({f"{c.kind} {c.dtype} on group {c.group}" for c in self.curves})
            raise InvalidProblem(
                f"links: no figure for {call.kind} {call.dtype} on group {call.group}; measured "
                f"are: {', '.join(known) or 'none'}; measure the links of this graph"
            ) from None

    def time_ns(self, call: Collective) -> int:
        return self.curve(call).time_ns(call.bytes)

    def to_text(self) -> str:
        body = {
            "curves": [asdict(curve) for curve in self.curves],
            "slowdown": asdict(self.slowdown),
            "conditions": dict(self.conditions),
        }
        head = {"overlapc": "links", "version": _VERSION, "checksum": _checksum(body)}
        return json.dumps(head | body, indent=1) + "\n"

    @staticmethod
    def from_text(text: str) -> LinkModel:
        """The inverse of `to_text`; FileError for anything else."""
        try:
            body = json.loads(text)
            kind, version = body.pop("overlapc"), body.pop("version")
            if (kind, version) != ("links", _VERSION):
                raise FileError(
                    f"expected links of version {_VERSION}, found {kind!r} of version {version!r}"
                )
            if body.pop("checksum") != _checksum(body):
                raise FileError("links are damaged (wrong checksum): measure them again")
            curves = tuple(
                Curve(**curve | {"points": tuple((int(b), int(t)) for b, t in curve["points"])})
                for curve in body["curves"]
            )
            return LinkModel(curves, Slowdown(**body["slowdown"]), body["conditions"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileError(f"this is not a link model of overlapc: {error}") from error


def _checksum(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
