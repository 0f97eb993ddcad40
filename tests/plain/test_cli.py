"""The command line: what it prints, its exit codes, and that it never falls over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from overlapc.cli import FAILED, GOOD, USAGE, main
from overlapc.core.errors import FileError, OptionError
from overlapc.core.files import save_plan, save_problem
from overlapc.core.ir import Cost, Op, Piece, Problem, Profile, Trace, Value
from overlapc.core.schedule import format_schedule
from overlapc.search.layouts import Cluster, Fixed, layouts
from overlapc.search.presets import find_model
from overlapc.search.weights import static_bytes
from overlapc.solvers import solve
from overlapc.solvers.pipeline.schedules import one_f_one_b
from tests.plain.strategies import random_problem


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    problem = next(
        p
        for seed in range(200)
        if (p := random_problem(Random(seed), 8)).trace.lanes and len(p.phases) == 2
    )
    found = {name: str(tmp_path / name) for name in ("problem", "first", "second", "rows", "costs")}
    problem = type(problem)(**{**vars_of(problem), "budget_bytes": None})
    save_problem(found["problem"], problem)
    save_plan(found["first"], solve(problem, "none"))
    save_plan(found["second"], solve(problem, "full"))
    (tmp_path / "rows").write_text(format_schedule(one_f_one_b(2, 4)))
    stage = {"forward_ns": 3, "input_ns": 4, "weight_ns": 2, "sent_ns": 1}
    (tmp_path / "costs").write_text(json.dumps([stage, stage]))
    return found


def vars_of(problem):
    return {name: getattr(problem, name) for name in problem.__dataclass_fields__}


def test_python_runs_it_by_its_name():
    words = [sys.executable, "-m", "overlapc", "presets", "models"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gpt-7b" in done.stdout


def test_help_is_instant_and_knows_no_torch():
    code = (
        "import sys; from overlapc.cli import main; main(['--help']);"
        "main(['presets', 'models']); main(['presets', 'hardware']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "search" in done.stdout
    assert "gpt-7b" in done.stdout
    assert "a100-sxm-80" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        "explain problem first",
        "explain problem first second",
        "simulate problem second",
        "simulate rows --costs costs",
        "plan problem --solver heu",
        "presets models",
        "presets hardware",
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_command_on_good_files(words, as_json, files, capsys):
    argv = [files.get(word, word) for word in words.split()] + ["--json"] * as_json
    assert main(argv) == GOOD
    out, err = capsys.readouterr()
    assert err == ""
    assert out
    if as_json:
        json.loads(out)


def test_a_trace_is_written(files, tmp_path, capsys):
    where = tmp_path / "trace.json"
    assert main(["simulate", files["rows"], "--trace", str(where)]) == GOOD
    assert "step" in capsys.readouterr().out
    assert json.loads(where.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("", USAGE, "COMMAND"),
        ("magic", USAGE, "invalid choice"),
        ("search", USAGE, "required"),
        ("search gpt-7b --gpus 0", USAGE, "whole number"),
        ("search gpt-9b --gpus 8", USAGE, "expected a preset"),
        ("search nothing.json --gpus 8", USAGE, "config.json"),
        ("search gpt-7b --gpus 8 --hardware abacus", USAGE, "unknown hardware"),
        ("search gpt-7b --gpus 8 --hardware h10", USAGE, "did you mean 'h100'"),
        ("search gpt-7b --gpus 8 --memory lots", USAGE, "a number and a unit"),
        ("search gpt-7b --gpus 8 --memory 800GB", USAGE, "has 85.0 GB; expected no more"),
        ("search gpt-7b --gpus 8 --solver guess", USAGE, "expected one of"),
        ("search gpt-7b --gpus 8 --tp 3", USAGE, "no layout"),
        ("search gpt-7b --gpus 8 --slices 2", USAGE, "expected a model of your own"),
        ("search gpt-7b --gpus 8 --costs absent", USAGE, "no such file"),
        ("search gpt-7b --gpus 8 --costs first", USAGE, "damaged"),
        pytest.param(
            *("search gpt-7b --gpus 1 --memory 1GB --no-cache", FAILED, ""), marks=pytest.mark.slow
        ),
        ("explain absent first", USAGE, "absent"),
        ("explain first first", USAGE, "problem"),
        ("explain problem rows", USAGE, "plan"),
        ("plan problem --memory 1B", FAILED, "no plan fits"),
        ("simulate rows --costs first", USAGE, "JSON list"),
        ("simulate problem first --costs costs", USAGE, "whose problem has its own costs"),
        ("simulate absent", USAGE, "absent"),
        ("report absent --out page.html", USAGE, "absent"),
        ("report costs --out page.html", USAGE, "JSON object"),
    ],
)
def test_wrong_use_is_an_error_with_a_hint(words, code, said, files, capsys):
    assert main([files.get(word, word) for word in words.split()]) == code
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err
    if code == FAILED and not said:
        assert "smallest memory that works" in out


TEXT = """search plan explain diff simulate show models hardware problem first second rows costs
--json --gpus 8 -1 1e9 --memory 8GB --tp 2 gpt-7b --costs --solver none opt --help --columns
\N{SNOWMAN} /dev/null --trace ."""
WORDS = [*TEXT.split(), ""]


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 10_300), marks=pytest.mark.slow)]
)
def test_any_words_end_with_a_code(seeds, files, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for seed in seeds:
        rng = Random(seed)
        words = [rng.choice(WORDS) for _ in range(rng.randint(0, 7))]
        if words[:1] == ["search"]:
            words = ["search", *words[1:], "--memory", "1MB", "--no-cache"]
        code = main([files.get(word, word) for word in words])
        assert code in (GOOD, FAILED, USAGE), words
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert code == GOOD or err or "nothing fits" in out, words


def damaged(text: str, rng: Random) -> str:
    if rng.random() < 0.3:
        return text[: rng.randrange(len(text))]
    at, length = rng.randrange(len(text)), rng.randint(0, 6)
    return (
        text[:at] + rng.choice(["", "0", "-1", "null", "{", "\0", "x" * 50]) + text[at + length :]
    )


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 4000), marks=pytest.mark.slow)]
)
def test_damaged_configs_are_typed_errors(seeds, tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    path = tmp_path / "config.json"
    cluster = Cluster("a100-sxm-80", 8, 8, 1000, 64)
    refused = []
    for seed in seeds:
        path.write_text(damaged(json.dumps(config), Random(seed)))
        try:
            model = find_model(str(path))
            for layout in layouts(model, cluster):
                assert min(static_bytes(model, layout)) > 0
        except (FileError, OptionError) as error:
            refused.append(str(error))
    assert 0 < len(refused) < len(seeds)
    assert all("expected" in said for said in refused)


def test_a_named_microbatch_may_be_larger_than_those_that_are_tried() -> None:
    cluster = Cluster("a100-sxm-80", 8, 8, 1 << 40, 256)
    model = find_model("gpt-1.3b")
    assert {layout.microbatch for layout in layouts(model, cluster)} == {1, 2, 4, 8, 16}
    named = layouts(model, cluster, Fixed(microbatch=32))
    assert {layout.microbatch for layout in named} == {32}


def test_named_chunks_leave_out_layouts_that_have_none() -> None:
    cluster = Cluster("a100-sxm-80", 8, 8, 1 << 40, 256)
    named = list(layouts(find_model("gpt-1.3b"), cluster, Fixed(chunks=3)))
    assert {(layout.schedule, layout.chunks) for layout in named} == {("interleaved", 3)}


def test_a_broken_config_is_wrong_use(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("{")
    assert main(["search", str(path), "--gpus", "2"]) == USAGE
    assert "expected a HuggingFace config.json" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "deep", "Infinity", "1e999", "NaN"])
@pytest.mark.parametrize(
    "words",
    [
        "search FILE.json --gpus 2",
        "search gpt-7b --gpus 2 --hardware FILE.toml",
        "report FILE --out page.html",
        "simulate rows --costs FILE",
        "explain FILE first",
    ],
)
def test_strange_files_are_named_at_once(kind, words, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [word.replace("FILE", "strange") for word in words.split()]
    path = next(tmp_path / word for word in words if word.startswith("strange"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "deep":
        path.write_text(("a = " if path.suffix else "") + "[" * 100_000)
    else:
        path.write_text(f'{{"hidden_size": {kind}}}')
    assert main([files.get(word, word) for word in words]) == USAGE
    err = capsys.readouterr().err
    assert path.name in err
    assert "Traceback" not in err
    assert "\n" not in err.strip()


def test_names_with_control_characters_are_shown_escaped(tmp_path):
    """The model is named by its file, or by its folder."""
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = json.dumps(
        config | {"vocab_size": 256, "max_position_embeddings": 64, "model_type": "\ud800\x1b"}
    )
    for name, shown in (("my-8b.json", "my-8b"), ("a\x1b[31m\n.json", "a\\x1b[31m\\n")):
        (tmp_path / name).write_text(text)
        assert find_model(str(tmp_path / name)).name == shown
    (tmp_path / "config.json").write_text(text)
    assert find_model(str(tmp_path)).name == tmp_path.name


def test_control_characters_in_a_file_do_not_reach_the_terminal(tmp_path, capsys):
    wait, start = "wait\x1b[2J", "start\u2028"
    trace = Trace(
        (
            Op(start, "start", "lane\x07", Piece(0, "F", 0), ("x",), ("y",), "s"),
            Op(wait, "wait", "compute", Piece(0, "F", 0), ("y",), ("z",), "w"),
        ),
        (Value("x", 8, "x", ""), Value("y", 8, "y", start), Value("z", 8, "z", wait)),
        ("x",),
        ("z",),
    )
    problem = Problem(trace, Profile({start: Cost(1, 9), wait: Cost(0)}))
    plans = [solve(problem, "none")] * 2
    names = [str(tmp_path / name) for name in ("problem\x1b", "a\x1b", "b\x1b")]
    save_problem(names[0], problem)
    for name, plan in zip(names[1:], plans, strict=True):
        save_plan(name, replace(plan, solver="none\x1b"))
    for words in (
        ["explain", *names[:2], "--ops"],
        ["explain", *names],
        ["simulate", *names[:2], "--picture"],
        ["simulate", *names[:2]],
    ):
        assert main(words) == GOOD
        out, err = capsys.readouterr()
        assert all(c.isprintable() or c == "\n" for c in out + err)


def test_there_are_few_commands(capsys):
    assert main(["--help"]) == GOOD
    listed = capsys.readouterr().out.split("COMMAND\n")[1]
    assert len([line for line in listed.splitlines() if re.match(r"    [a-z]", line)]) <= 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("simulate rows --picture --json", "expected one of both"),
        ("explain problem first second --ops", "expected one plan, or no --ops"),
    ],
)
def test_options_that_do_not_go_together(files, capsys, words, said):
    assert main([files.get(word, word) for word in words.split()]) == USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--picture"]])
def test_a_problem_without_its_plan_is_told_what_is_missing(files, capsys, more):
    assert main(["simulate", files["problem"], *more]) == USAGE
    error = capsys.readouterr().err
    assert files["problem"] in error
    assert "name its plan behind it" in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_an_error_without_a_traceback():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "overlapc.cli", "presets", "models"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == FAILED
    assert done.stderr.startswith("overlapc: [Errno 28]")
    assert "Traceback" not in done.stderr
