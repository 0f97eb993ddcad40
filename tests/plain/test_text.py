"""Every text form round-trips, and no text at all makes a parser raise anything but FileError."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.core.errors import FileError
from overlapc.core.ir import Cost, Op, Piece, Plan, Problem, Profile, Slowdown, Trace, Value
from overlapc.core.text import (
    VERSION,
    format_plan,
    format_problem,
    format_profile,
    format_trace,
    parse_plan,
    parse_problem,
    parse_profile,
    parse_trace,
)
from tests.plain.strategies import legal_plans, problems, random_plan, random_problem

FORMS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "plan": (format_plan, parse_plan),
    "profile": (format_profile, parse_profile),
    "trace": (format_trace, parse_trace),
    "problem": (format_problem, parse_problem),
}

NUMBERS = st.integers(0, 10**18 - 1)
STRINGS = st.text(max_size=6) | st.sampled_from(["none", "end crc32 00000000", ">", "R:", "order"])
LISTS = st.lists(STRINGS, max_size=30).map(tuple)


def seal(body: str) -> str:
    return body + f"end crc32 {zlib.crc32(body.encode(errors='surrogatepass')):08x}\n"


def body(text: str) -> str:
    return text[: text.index("end crc32")]


def a_plan() -> Plan:
    long = tuple(f"mm_{index}_with_a_long_name" for index in (2, 3, 4))
    order = ("mm_1", "all_gather", "wait_1", "relu_1", *long, "R:relu_1", "mm_1_i")
    saved = ("relu_1", 'a "name"')
    return Plan("8c1f0011aabbccdd", "two words", saved, order, "feasible", 1200)


def a_problem() -> Problem:
    piece = Piece(0, "F", 0)
    ops = (
        Op("gather", "start", "expert group", piece, ("x",), ("raw",), "all_gather f32[8, 8]",
           recomputable=False),
        Op("wait", "wait", "compute", piece, ("raw",), ("y",), ""),
        Op("drop", "forward", "compute", piece, ("y", "y"), (), "", True, False),
    )  # fmt: skip
    values = (
        Value("x", 8, "x", ""),
        Value("raw", 16, "raw", "gather"),
        Value("y", 16, "raw", "wait"),
    )
    costs = {
        "gather": Cost(3, 40, source="measured"),
        "wait": Cost(),
        "drop": Cost(1, workspace_bytes=7),
    }
    trace = Trace(ops, values, ("x",), ("y",), {"x": "batch"})
    profile = Profile(costs, Slowdown(1100), {"device": "cpu"})
    return Problem(trace, profile, resident_bytes=5, in_flight=2)


PLAN = """\
overlapc plan 1
trace 8c1f0011aabbccdd
solver "two words"
status feasible
bound_ns 1200
saved
  relu_1 "a \\"name\\""
order
  mm_1 all_gather wait_1 relu_1 mm_2_with_a_long_name mm_3_with_a_long_name
  mm_4_with_a_long_name R:relu_1 mm_1_i
end crc32 88dee8d5
"""


PROBLEM = f"""\
overlapc problem 2
budget_bytes none
resident_bytes 5
in_flight 2
phases F IW
digest {a_problem().trace.digest}
inputs
  x
outputs
  y
ops name role lane piece flags inputs > outputs signature
  gather start "expert group" 0F0 once x > raw "all_gather f32[8, 8]"
  wait wait compute 0F0 - raw > y ""
  drop forward compute 0F0 random+once y y > ""
values name bytes storage producer
  x 8 x ""
  raw 16 raw gather
  y 16 raw wait
kinds input kind
  x batch
slowdown 1100 1000
conditions
  device cpu
costs op compute_ns comm_ns workspace_bytes source
  gather 3 40 0 measured
  wait 0 0 0 default
  drop 1 0 7 default
end crc32 ...
"""


def test_plan_text() -> None:
    assert format_plan(a_plan()) == PLAN
    assert parse_plan(PLAN) == a_plan()


def test_a_plan_says_what_found_it() -> None:
    """In a line that may be left out, and by which plans do not differ."""
    plan = replace(a_plan(), found_by="hull, listed 4 by path; of 7 plans")
    text = format_plan(plan)
    assert '\nbound_ns 1200\nfound_by "hull, listed 4 by path; of 7 plans"\nsaved\n' in text
    assert parse_plan(text).found_by == plan.found_by
    assert parse_plan(text) == a_plan()


def test_problem_text() -> None:
    assert body(format_problem(a_problem())) == body(PROBLEM)
    assert parse_problem(seal(body(PROBLEM))) == a_problem()


@given(st.builds(Plan, STRINGS, STRINGS, LISTS, LISTS, STRINGS, NUMBERS))
def test_any_plan_round_trips(plan: Plan) -> None:
    assert parse_plan(format_plan(plan)) == plan


COSTS = st.dictionaries(STRINGS, st.builds(Cost, NUMBERS, NUMBERS, NUMBERS, STRINGS))


@given(
    st.builds(
        Profile, COSTS, st.builds(Slowdown, NUMBERS, NUMBERS), st.dictionaries(STRINGS, STRINGS)
    )
)
def test_any_profile_round_trips(profile: Profile) -> None:
    again = parse_profile(format_profile(profile))
    assert again == profile
    assert list(again.costs) == list(profile.costs)


@given(st.data())
def test_problems_and_their_parts_round_trip(data: st.DataObject) -> None:
    problem = data.draw(problems(lags=True))
    plan = data.draw(legal_plans(problem))
    items = (
        ("plan", plan),
        ("profile", problem.profile),
        ("trace", problem.trace),
        ("problem", problem),
    )
    for kind, item in items:
        write, read = FORMS[kind]
        text = write(item)
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 200
        assert read(text) == item
        assert write(read(text)) == text


@given(STRINGS, STRINGS, STRINGS)
def test_any_names_in_a_trace_round_trip(op: str, value: str, lane: str) -> None:
    trace = Trace(
        (
            Op(op + "1", "start", lane + "2", Piece(7, "W", 9), (value,), (value + "3",), op),
            Op(op + "4", "wait", "compute", Piece(7, "W", 9), (value + "3",), (), lane),
        ),
        (Value(value, 0, lane, ""), Value(value + "3", 0, lane, op + "1")),
        (value,),
        (),
    )
    if not op.startswith("R:"):
        assert parse_trace(format_trace(trace)) == trace


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", "line 1 of the plan: found '', expected overlapc plan 1: make the plan again"),
        (
            "overlapc plan 1",
            "overlapc profile 1",
            "found a profile, expected a plan: pass the plan instead",
        ),
        (
            "overlapc plan 1",
            "overlapc plan 2",
            "found version '2' of a plan, expected version 1: make the plan again, or use the "
            "release of overlapc that made it",
        ),
        ("overlapc plan 1", "overlapc recipe 1", "found 'overlapc recipe 1', expected overlapc"),
        ("overlapc plan 1", '{"a": 1}', """found '{"a": 1}', expected overlapc plan 1"""),
        (
            "solver",
            "solved",
            "line 3 of the plan: found 'solved \"two words\"', expected solver and 1 word(s): make",
        ),
        ("status feasible\n", "", "line 4 of the plan: found 'bound_ns 1200', expected status"),
        ("status feasible", "status fea sible", "line 4 of the plan: found 'status fea sible'"),
        ("status", "colour red\nstatus", "found 'colour red', expected status"),
        ("1200", "-1", "line 5 of the plan: found '-1', expected a number from 0 to 10^18 - 1"),
        ("1200", "9" * 5000, "expected a number"),
        ("1200", "01", "found '01', expected a number"),
        ("1200", "1e3", "found '1e3', expected a number"),
        ("1200", "1 200", "found 'bound_ns 1 200', expected bound_ns and 1 word(s)"),
        ("saved\n", "saved 2\n", "line 6 of the plan: found 'saved 2', expected saved"),
        ("  relu_1", " relu_1", "expected order"),
        ("  relu_1", "   relu_1", "expected words with one space between"),
        (" R:relu_1", " R:relu_1\t", "expected words with one space between"),
        (" R:relu_1", ' "R:relu_1', "expected words with one space between"),
        (" R:relu_1", " >", "found '>', expected a name or a quoted name"),
        (" R:relu_1", " R:é", "expected words with one space between"),
        (" R:relu_1", " \x00", "expected words with one space between"),
        (" R:relu_1", " \ud800", "expected words with one space between"),
        (" R:relu_1", r' "\x"', "expected a name or a quoted name"),
        ("mm_1_i\n", "mm_1_i\nmore 1\n", "line 11 of the plan: found 'more 1', expected end crc32"),
        ("mm_1_i\n", "mm_1_i", "expected end crc32 and 8 digits, or the text is cut short"),
    ],
)
def test_what_is_wrong_with_a_sealed_plan_is_said(old: str, new: str, message: str) -> None:
    with pytest.raises(FileError) as error:
        parse_plan(seal(body(PLAN).replace(old, new)) if old else "")
    assert message in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("wait compute 0F0", "sleep compute 0F0", "found 'sleep', expected one of forward, input"),
        ("compute 0F0 -", "compute 0B0 -", "found '0B0', expected a piece such as 0F0"),
        ("compute 0F0 -", "compute 0F0 +", "found '+', expected one of -, once, seeded, "),
        ("raw > y", "raw y", "expected columns name role lane piece flags inputs > outputs sig"),
        ("raw > y", "x > y", "found 'a trace where wait wait reads 0 started collectives"),
        ("raw > y", "raw > z", "found 'a trace where wait makes z, which is no value"),
        ("raw > y", "raw > raw", "found 'a trace where raw has more than one producer"),
        ("raw > y", "lost > y", "found 'a trace where wait reads lost before anything makes it"),
        ("  drop forward", "  wait forward", "found 'a trace where 1 ops share a name"),
        ("  drop forward", "  R:drop forward", "found 'a trace where op R:drop: names cannot"),
        ("  y 16 raw wait", "  x 16 raw wait", "found 'a trace where 1 values share a name"),
        ("  y 16 raw wait", "  y 17 raw wait", "found 'a trace where y: two sizes for storage"),
        (
            "  y 16 raw wait\n",
            '  y 16 raw wait\n  z 1 z ""\n',
            "found 'a trace where value z is nev",
        ),
        ("inputs\n  x\n", "inputs\n  x x\n", "found 'a trace where input x is listed twice"),
        ("outputs\n  y\n", "outputs\n  z\n", "found 'a trace where value z is never made"),
        (
            "  x batch",
            "  x bach",
            "found 'bach', expected one of parameter, buffer, batch, grad",
        ),
        ("  x batch", "  y batch", "found 'a trace where y of kind batch: expected inputs of para"),
        ("8, 8", "8, 9", f"expected digest {a_problem().trace.digest}: make the p"),
        ("  wait 0 0 0", "  gather 0 0 0", "found 'gather a second time', expected it once"),
        ("  wait 0 0 0", "  wait 0 0", "found '  wait 0 0 default', expected 5 word(s)"),
        ("budget_bytes none", "budget_bytes all", "found 'all', expected a number from 0"),
    ],
)
def test_what_is_wrong_with_a_sealed_problem_is_said(old: str, new: str, message: str) -> None:
    assert old in PROBLEM
    with pytest.raises(FileError) as error:
        parse_problem(seal(body(PROBLEM).replace(old, new, 1)))
    assert message in str(error.value)
    assert len(str(error.value)) < 250


def test_cut_and_damaged_texts_are_told_apart() -> None:
    with pytest.raises(FileError, match=r"line 8 .*'order', expected end crc32 .* cut short"):
        parse_plan(PLAN[: PLAN.index("\n  mm_1") + 1])
    with pytest.raises(
        FileError, match=r"line 11 .*expected end crc32 \w{8}, or the text is damaged"
    ):
        parse_plan(PLAN.replace("wait_1", "wait_2"))


@pytest.mark.parametrize("kind", FORMS)
def test_every_cut_and_every_changed_character_is_found(kind: str) -> None:
    write, read = FORMS[kind]
    problem = a_problem()
    items = {
        "plan": a_plan(),
        "profile": problem.profile,
        "trace": problem.trace,
        "problem": problem,
    }
    text = write(items[kind])
    damaged = [text[:at] for at in range(len(text))]
    for at, character in enumerate(text):
        others = {chr(ord(character) ^ 1 << bit) for bit in range(8)} | {"\n", "\r", "é", "\ud800"}
        damaged += [text[:at] + c + text[at + 1 :] for c in sorted(others - {character})]
        damaged += [text[:at] + c + text[at:] for c in ("\n", " ", "0", "\0")]
        damaged += [text[:at] + text[at + 1 :]]
    for one in damaged:
        if one != text:
            with pytest.raises(FileError):
                read(one)


@given(st.text(st.characters(codec=None)), st.sampled_from(sorted(FORMS)))
def test_any_text_raises_only_file_errors(text: str, kind: str) -> None:
    for whole in (
        text,
        f"overlapc {kind} {VERSION[kind]}\n{text}",
        seal(text),
        seal(f"overlapc {kind} {VERSION[kind]}\n{text}\n"),
    ):
        with pytest.raises(FileError):
            FORMS[kind][1](whole)


@pytest.mark.parametrize("kind", FORMS)
def test_sealed_but_changed_texts_are_refused_or_mean_what_they_say(kind: str) -> None:
    """Past the checksum, the parser stands alone: still nothing but FileError."""
    write, read = FORMS[kind]
    accepted = refused = 0
    for seed in range(1500):
        rng = Random(seed)
        problem = random_problem(rng, max_ops=2)
        items = {
            "plan": random_plan(problem, rng),
            "profile": problem.profile,
            "trace": problem.trace,
            "problem": problem,
        }
        words = body(write(items[kind])).split(" ")
        at, other = rng.randrange(len(words)), rng.randrange(len(words))
        change = rng.choice(("drop", "copy", "swap", "letter", "line"))
        if change == "drop":
            del words[at]
        elif change == "copy":
            words.insert(at, words[other])
        elif change == "swap":
            words[at], words[other] = words[other], words[at]
        elif change == "letter":
            words[at] = words[at][1:] + chr(rng.choice((0, 10, 34, 48, 62, 92, 127, 233, 0xDC80)))
        else:
            words[at] += "\n"
        try:
            again = read(seal(" ".join(words)))
        except FileError:
            refused += 1
            continue
        assert read(write(again)) == again
        accepted += 1
    assert refused > 300
    assert accepted > 0


@pytest.mark.parametrize("kind", FORMS)
def test_other_kinds_are_named(kind: str) -> None:
    problem = a_problem()
    items = {"plan": a_plan(), "profile": problem.profile, "trace": problem.trace}
    for other, item in items.items():
        if other != kind:
            with pytest.raises(FileError, match=f"found a {other}, expected a {kind}: pass the"):
                FORMS[kind][1](FORMS[other][0](item))


def test_digest_tells_names_from_separators() -> None:
    trace = a_problem().trace
    one = replace(trace, outputs=("a,b",))
    two = replace(trace, outputs=("a", "b"))
    assert one.digest != two.digest
    assert replace(trace, outputs=("\ud800",)).digest


def test_a_digest_does_not_count_inputs_that_nothing_reads() -> None:
    def trace(inputs: str, view_of: str) -> Trace:
        names = tuple(inputs.split())
        view = Op("view", "forward", "compute", Piece(0, "F", 0), (view_of,), ("y",), "aten.view")
        values = (*(Value(name, 8, name, "") for name in names), Value("y", 8, view_of, "view"))
        return Trace((view,), values, names, ("y",))

    alone = trace("x_1 t_1", "x_1").digest
    assert trace("x_1 x_2 t_1", "x_2").digest == alone  # x_1 and t_1 are not read
    assert trace("x_1", "x_1").digest == alone
    assert trace("t_1", "t_1").digest != alone


@pytest.mark.parametrize(
    ("word", "found"),
    [("10/3", Fraction(10, 3)), ("2", 2), ("10/4", None), ("1/0", None), ("3/1", None)],
)
def test_microbatches_in_flight_may_be_a_fraction(word, found) -> None:
    text = seal(body(PROBLEM.replace("in_flight 2", f"in_flight {word}")))
    if found is None:
        with pytest.raises(FileError, match="fraction in lowest terms"):
            parse_problem(text)
    else:
        problem = parse_problem(text)
        assert problem.in_flight == found
        assert body(format_problem(problem)) == body(text)


@pytest.mark.parametrize("word", ["layers.0.mlp", "a b", "\N{SNOWMAN}"])
def test_modules_of_ops_are_kept_and_change_nothing_else(word) -> None:
    problem = a_problem()
    modules = {op.name: word for op in problem.trace.ops[:2]}
    named = replace(problem, trace=replace(problem.trace, modules=modules))
    assert named == problem
    assert named.trace.digest == problem.trace.digest
    assert parse_problem(format_problem(named)).trace.modules == modules
    assert "modules" not in format_problem(problem)
