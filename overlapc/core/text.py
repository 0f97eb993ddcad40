r"""The text form of plans, profiles, traces and problems, which users read, ranks exchange and
files store.

    text     = "overlapc" kind version, line*, "end crc32" 8 hex digits      the last line too
    line     = field | table                                                 ends in a newline
    field    = key word*                        `solver overlap`
    table    = key column* row*                 `saved`, then the saved values
    row      = two spaces, word*
    word     = ">" | bare | JSON string         bare where nothing needs quotes: `R:mm_3`

    plan     = trace solver status bound_ns found_by?, saved, order
    profile  = slowdown, conditions, costs
    trace    = digest, inputs, outputs, ops, values, kinds?, modules?
    problem  = budget_bytes resident_bytes in_flight phases, trace, profile

`in_flight` may be a fraction in lowest terms, `10/3`.

`parse_x(format_x(x)) == x` for whatever holds valid Unicode and numbers from 0 to 10^18 - 1. The
parsers raise FileError and nothing else. Fields come in the order above; whoever changes them
raises VERSION. Texts are ASCII, and the checksum covers every byte above its line.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import compress, product
from typing import NoReturn, TypeVar

from overlapc.core.errors import FileError, InvalidProblem
from overlapc.core.ir import (
    KINDS,
    ROLES,
    Cost,
    Kind,
    Op,
    Piece,
    Plan,
    Problem,
    Profile,
    Role,
    Slowdown,
    Trace,
    Value,
)
from overlapc.core.valid import validate_trace, validated

_T = TypeVar("_T")

VERSION: Mapping[str, int] = {"plan": 1, "profile": 1, "trace": 2, "problem": 2}

_WIDTH = 96
_BARE = re.compile(r"[A-Za-z0-9_.:/+*=@-]+")
_WORD = re.compile(rf'>|{_BARE.pattern}|"(?:[ !#-\[\]-\x7f]|\\[!-~])*"')
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_PIECE = re.compile(rf"({_NUMBER.pattern})([FIW])({_NUMBER.pattern})")
_SEAL = re.compile(r"end crc32 [0-9a-f]{8}\n")

_COSTS = "costs op compute_ns comm_ns workspace_bytes source"
_OPS = "ops name role lane piece flags inputs > outputs signature"
_VALUES = "values name bytes storage producer"
_KINDS = "kinds input kind"
_MODULES = "modules op module"
_ROLES: Mapping[str, Role] = {role: role for role in ROLES}
_KIND: Mapping[str, Kind] = {kind: kind for kind in KINDS}
_FLAGS = {
    flags: "+".join(compress(("random", "seeded", "once"), flags)) or "-"
    for flags in product((False, True), repeat=3)
}


def format_plan(plan: Plan) -> str:
    return _seal(
        "plan",
        [
            _field("trace", plan.digest),
            _field("solver", plan.solver),
            _field("status", plan.status),
            _field("bound_ns", plan.bound_ns),
            *([_field("found_by", plan.found_by)] if plan.found_by else []),
            *_wrapped("saved", plan.saved),
            *_wrapped("order", plan.order),
        ],
    )


def parse_plan(text: str) -> Plan:
    reader = _TextReader(text, "plan")
    plan = Plan(
        digest=reader.string("trace"),
        solver=reader.string("solver"),
        status=reader.string("status"),
        bound_ns=reader.number("bound_ns"),
        found_by=reader.string("found_by") if reader.next_is("found_by") else "",
        saved=reader.strings("saved"),
        order=reader.strings("order"),
    )
    reader.finish()
    return plan


def format_profile(profile: Profile) -> str:
    return _seal("profile", _profile_lines(profile))


def parse_profile(text: str) -> Profile:
    reader = _TextReader(text, "profile")
    profile = _read_profile(reader)
    reader.finish()
    return profile


def format_trace(trace: Trace) -> str:
    return _seal("trace", _trace_lines(trace))


def parse_trace(text: str) -> Trace:
    """Parse a trace and validate it."""
    reader = _TextReader(text, "trace")
    trace = _read_trace(reader)
    reader.finish()
    return trace


def format_problem(problem: Problem) -> str:
    budget = problem.budget_bytes
    return _seal(
        "problem",
        [
            _field("budget_bytes", "none" if budget is None else budget),
            _field("resident_bytes", problem.resident_bytes),
            _field("in_flight", str(problem.in_flight)),
            _field("phases", *problem.phases),
            *_trace_lines(problem.trace),
            *_profile_lines(problem.profile),
        ],
    )


def parse_problem(text: str) -> Problem:
    """Parse a problem and validate it."""
    reader = _TextReader(text, "problem")
    budget = reader.string("budget_bytes")
    budget_bytes = None if budget == "none" else reader.as_number(budget)
    resident_bytes = reader.number("resident_bytes")
    in_flight = reader.fraction("in_flight")
    phases = tuple(map(reader.as_string, reader.field("phases")))
    trace = _read_trace(reader)
    profile = _read_profile(reader)
    reader.finish()
    try:
        return validated(Problem(trace, profile, budget_bytes, resident_bytes, in_flight, phases))
    except InvalidProblem as error:
        reader.fail(f"a problem where {error}", "a valid problem")


def _profile_lines(profile: Profile) -> Iterator[str]:
    slowdown = profile.slowdown
    yield _field("slowdown", slowdown.compute_permille, slowdown.comm_permille)
    yield "conditions"
    for key, condition in profile.conditions.items():
        yield _row(key, condition)
    yield _COSTS
    for op, cost in profile.costs.items():
        yield _row(op, cost.compute_ns, cost.comm_ns, cost.workspace_bytes, cost.source)


def _read_profile(reader: _TextReader) -> Profile:
    compute, comm = reader.field("slowdown", 2)
    slowdown = Slowdown(reader.as_number(compute), reader.as_number(comm))
    conditions: dict[str, str] = {}
    for key, condition in reader.table("conditions", 2):
        reader.add(conditions, key, reader.as_string(condition))
    costs: dict[str, Cost] = {}
    for op, compute, comm, workspace, source in reader.table(_COSTS, 5):
        cost = Cost(
            reader.as_number(compute),
            reader.as_number(comm),
            reader.as_number(workspace),
            reader.as_string(source),
        )
        reader.add(costs, op, cost)
    return Profile(costs, slowdown, conditions)


def _trace_lines(trace: Trace) -> Iterator[str]:
    yield _field("digest", trace.digest)
    yield from _wrapped("inputs", trace.inputs)
    yield from _wrapped("outputs", trace.outputs)
    yield _OPS
    for op in trace.ops:
        head = _row(op.name, op.role, op.lane, str(op.piece))
        flags = _FLAGS[op.random, op.seeded, not op.recomputable]
        inputs, outputs = map(_quote, op.inputs), map(_quote, op.outputs)
        yield " ".join([head, flags, *inputs, ">", *outputs, _quote(op.signature)])
    yield _VALUES
    for value in trace.values:
        yield _row(value.name, value.bytes, value.storage, value.producer)
    if trace.kinds:
        yield _KINDS
        for name, kind in trace.kinds.items():
            yield _row(name, kind)
    if trace.modules:
        yield _MODULES
        for name, module in trace.modules.items():
            yield _row(name, module)


def _read_trace(reader: _TextReader) -> Trace:
    digest = reader.string("digest")
    inputs = reader.strings("inputs")
    outputs = reader.strings("outputs")
    ops = tuple(_read_op(reader, row) for row in reader.table(_OPS))
    values = tuple(
        Value(
            reader.as_string(name),
            reader.as_number(size),
            reader.as_string(storage),
            reader.as_string(producer),
        )
        for name, size, storage, producer in reader.table(_VALUES, 4)
    )
    kinds: dict[str, Kind] = {}
    if reader.next_is("kinds"):
        for name, kind in reader.table(_KINDS, 2):
            if kind not in _KIND:
                reader.fail(kind, f"one of {', '.join(_KIND)}")
            reader.add(kinds, name, _KIND[kind])
    modules: dict[str, str] = {}
    if reader.next_is("modules"):
        for op, module in reader.table(_MODULES, 2):
            reader.add(modules, op, reader.as_string(module))
    trace = Trace(ops, values, inputs, outputs, kinds, modules)
    try:
        validate_trace(trace)
    except InvalidProblem as error:
        reader.fail(f"a trace where {error}", "a valid trace")
    if trace.digest != digest:
        reader.fail(f"a trace of digest {trace.digest}", f"digest {digest}")
    return trace


def _read_op(reader: _TextReader, row: list[str]) -> Op:
    if len(row) < 7 or ">" not in row[5:-1]:
        reader.fail(" ".join(row), f"columns {_OPS.partition(' ')[2]}")
    arrow = row.index(">", 5)
    name, role, lane, piece, flags = row[:5]
    inputs, outputs, signature = row[5:arrow], row[arrow + 1 : -1], row[-1]
    matched = _PIECE.fullmatch(piece)
    if matched is None:
        reader.fail(piece, "a piece such as 0F0")
    if role not in _ROLES:
        reader.fail(role, f"one of {', '.join(_ROLES)}")
    if flags not in _FLAGS.values():
        reader.fail(flags, f"one of {', '.join(_FLAGS.values())}")
    return Op(
        name=reader.as_string(name),
        role=_ROLES[role],
        lane=reader.as_string(lane),
        piece=Piece(int(matched[1]), matched[2], int(matched[3])),
        inputs=tuple(map(reader.as_string, inputs)),
        outputs=tuple(map(reader.as_string, outputs)),
        signature=reader.as_string(signature),
        random="random" in flags,
        recomputable="once" not in flags,
        seeded="seeded" in flags,
    )


def _quote(word: str | int) -> str:
    text = str(word)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _field(key: str, *words: str | int) -> str:
    return " ".join([key, *map(_quote, words)])


def _row(*words: str | int) -> str:
    return "  " + " ".join(map(_quote, words))


def _wrapped(key: str, words: Iterable[str]) -> Iterator[str]:
    """Format a table of one column, with as many words on a line as fit."""
    yield key
    line = " "
    for word in map(_quote, words):
        if len(line) > 1 and len(line) + 1 + len(word) > _WIDTH:
            yield line
            line = " "
        line += " " + word
    if len(line) > 1:
        yield line


def _seal(kind: str, lines: Iterable[str]) -> str:
    body = "\n".join([f"overlapc {kind} {VERSION[kind]}", *lines, ""])
    return body + _end(body)


def _end(body: str) -> str:
    return f"end crc32 {zlib.crc32(body.encode(errors='surrogatepass')):08x}\n"


class _TextReader:
    """Reads the lines of one text in order; any unexpected line is a FileError."""

    def __init__(self, text: str, kind: str) -> None:
        """Check the first line and the checksum, so the lines between are as they were written."""
        self.kind = kind
        self.at = 1
        if "\r\n" in text:
            raise FileError(
                f"found Windows line ends in a {kind}, expected those it was written with: copy it "
                "anew, as binary"
            )
        head = text.partition("\n")[0].split(" ")
        if len(head) != 3 or head[0] != "overlapc" or head[1] not in VERSION:
            self.fail(text.partition("\n")[0], f"overlapc {kind} {VERSION[kind]}")
        if head[1] != kind:
            raise FileError(f"found a {head[1]}, expected a {kind}: pass the {kind} instead")
        if head[2] != str(VERSION[kind]):
            raise FileError(
                f"found version {_show(head[2])} of a {kind}, expected version {VERSION[kind]}: "
                f"make the {kind} again, or use the release of overlapc that made it"
            )
        body = text.rpartition("end crc32")[0]
        seal = text[len(body) :]
        self.lines = body.split("\n")
        last = text.rstrip("\n").split("\n")
        self.at = len(last)
        if not _SEAL.fullmatch(seal) or self.lines[-1]:
            self.fail(last[-1], "end crc32 and 8 digits, or the text is cut short")
        if seal != _end(body):
            self.fail(last[-1], f"{_end(body).rstrip()}, or the text is damaged")
        self.at = 1

    def fail(self, found: str, expected: str) -> NoReturn:
        raise FileError(
            f"line {self.at} of the {self.kind}: found {_show(found)}, expected {expected}: "
            f"make the {self.kind} again"
        )

    def field(self, key: str, count: int | None = None) -> list[str]:
        """Return the words of the next line, which must begin with `key`, without it."""
        self.at += 1
        words = self._words(self.lines[self.at - 1])
        if words[0] != key or count not in (None, len(words) - 1):
            wanted = "" if count is None else f" and {count} word(s)"
            self.fail(self.lines[self.at - 1], key + wanted)
        return words[1:]

    def next_is(self, key: str) -> bool:
        """Is the next line a field of that key? For optional fields."""
        return self.at < len(self.lines) and self.lines[self.at].startswith(f"{key} ")

    def table(self, title: str, columns: int | None = None) -> Iterator[list[str]]:
        """Return the rows of the next table, one by one."""
        self.at += 1
        if self.lines[self.at - 1] != title:
            self.fail(self.lines[self.at - 1], title)
        while self.lines[self.at].startswith("  "):
            self.at += 1
            row = self._words(self.lines[self.at - 1][2:])
            if columns not in (None, len(row)):
                self.fail(self.lines[self.at - 1], f"{columns} word(s)")
            yield row

    def finish(self) -> None:
        self.at += 1
        if self.at != len(self.lines):
            self.fail(self.lines[self.at - 1], "end crc32")

    def string(self, key: str) -> str:
        return self.as_string(self.field(key, 1)[0])

    def number(self, key: str) -> int:
        return self.as_number(self.field(key, 1)[0])

    def fraction(self, key: str) -> int | Fraction:
        """A whole number, or two as in `10/3`."""
        above, *below = map(self.as_number, self.field(key, 1)[0].split("/", 1))
        if not below:
            return above
        found = Fraction(above, max(1, *below))
        if f"{above}/{below[0]}" != str(found):
            self.fail(f"{above}/{below[0]}", "a fraction in lowest terms")
        return found

    def strings(self, title: str) -> tuple[str, ...]:
        return tuple(self.as_string(word) for row in self.table(title) for word in row)

    def as_string(self, word: str) -> str:
        if _BARE.fullmatch(word):
            return word
        try:
            text = json.loads(word)
        except ValueError:
            text = None
        if not isinstance(text, str):
            self.fail(word, "a name or a quoted name")
        return text

    def as_number(self, word: str) -> int:
        if not _NUMBER.fullmatch(word):
            self.fail(word, "a number from 0 to 10^18 - 1")
        return int(word)

    def add(self, found: dict[str, _T], word: str, item: _T) -> None:
        key = self.as_string(word)
        if key in found:
            self.fail(f"{key} a second time", "it once")
        found[key] = item

    def _words(self, text: str) -> list[str]:
        words: list[str] = _WORD.findall(text)
        if not words or " ".join(words) != text:
            self.fail(text, "words with one space between")
        return words


def _show(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:60] + "…")
