"""What the commands print, word for word, and the page in a real browser where there is one.

`OVERLAPC_GOLDEN=write pytest tests/plain/test_golden.py` writes the texts anew; read the diff.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from overlapc.cli import GOOD, USAGE, main
from overlapc.core.files import load_problem, save_plan, save_problem
from overlapc.core.pipeline import StageCost, simulate_pipeline
from overlapc.core.schedule import format_schedule
from overlapc.profiler.hardware import load_hardware
from overlapc.report.answer import located
from overlapc.report.page import page
from overlapc.report.verdict import verdict
from overlapc.search.evaluate import Found
from overlapc.search.layouts import Cluster
from overlapc.search.models.transformer import Transformer
from overlapc.search.search import Result
from overlapc.solvers import solve
from overlapc.solvers.pipeline.schedules import make_schedule, one_f_one_b
from overlapc.validation.nearest import Nearest

GOLDEN = Path(__file__).parent / "golden"
PROBLEM = Path(__file__).parent / "problems" / "7B-2L-x4-s2048-b8-a100-pcie-80-f1-m0.35.txt"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
COMMANDS = {
    "models": "presets models",
    "hardware": "presets hardware",
    "explain": "explain problem full",
    "explain_ops": "explain problem full --ops",
    "diff": "explain problem none full",
    "simulate": "simulate problem full",
    "simulate_rows": "simulate rows --costs costs",
    "show": "simulate problem full --picture",
    "show_rows": "simulate rows --costs costs --picture",
    "plan": "plan problem --solver none",
}


def check(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("OVERLAPC_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; OVERLAPC_GOLDEN=write writes it anew"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    problem = replace(load_problem(PROBLEM), budget_bytes=20_000_000_000)
    save_problem(folder / "problem", problem)
    for solver in ("none", "full"):
        save_plan(folder / solver, solve(problem, solver))
    (folder / "rows").write_text(format_schedule(one_f_one_b(3, 5)))
    stage = {"forward_ns": 30_000, "input_ns": 40_000, "weight_ns": 20_000, "sent_ns": 1000}
    (folder / "costs").write_text(json.dumps([stage] * 3))
    return folder


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_texts(
    name: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    assert main(COMMANDS[name].split()) == GOOD
    out, err = capsys.readouterr()
    assert err == ""
    check(name, out)


def test_explain_names_modules(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the trace knows them: of collectives and of ops."""
    problem = load_problem(files / "problem")
    modules = {"all_reduce": "layers.0.attention", "gelu": "layers.0.mlp"}
    save_problem(files / "named", replace(problem, trace=replace(problem.trace, modules=modules)))
    assert main(["explain", str(files / "named"), str(files / "full"), "--ops"]) == GOOD
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for head in ("collective", "op"):
        assert next(line[-1] for line in lines if line[0] == head) == "module"
    for op, module in (*modules.items(), ("R:all_reduce", "layers.0.attention")):
        assert next(line[-1] for line in lines if line[0] == op) == module


def test_what_becomes_of_each_op(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the plan says; some of what is made again is made beside a collective."""
    problem = load_problem(files / "problem")
    plan = solve(problem, "heu")
    save_plan(files / "heu", plan)
    assert main(["explain", str(files / "problem"), str(files / "heu"), "--ops", "--json"]) == GOOD
    fates = json.loads(capsys.readouterr().out)["ops"]
    told = {what: {f["op"] for f in fates if f["what"] == what} for what in ("recomputed", "saved")}
    value = problem.trace.value
    saved = {value[name].storage for name in plan.saved}
    keeps = {op.name for op in problem.trace.ops if saved & {value[v].storage for v in op.outputs}}
    assert told["recomputed"]
    assert told["recomputed"] <= set(plan.recomputed)
    assert told["saved"]
    assert told["saved"] <= keeps
    assert any(f["why"].startswith("beside all_reduce") for f in fates)


def test_the_verdict_of_a_search() -> None:
    found = json.loads((GOLDEN / "search.json").read_text())
    best = Found.parse(found["best"])
    rows = make_schedule(best.layout.schedule, best.layout.pp, best.microbatches)
    cost = StageCost(forward_ns=30_000, input_ns=40_000, weight_ns=20_000, sent_ns=1000)
    text = verdict(
        Transformer(**found["model"]),
        Cluster(**found["cluster"]),
        load_hardware(found["cluster"]["hardware"]),
        Result(
            best,
            [Found.parse(each) for each in found["tried"]],
            [Found.parse(each) for each in found["less_memory"]],
            [Found.parse(each) for each in found["rivals"]],
            pruned=found["pruned"],
            bound_ns=found["bound_ns"],
            seconds=found["seconds"],
        ),
        [Found.parse(each) for each in found["compared"]],
        simulate_pipeline(rows, [cost] * best.layout.pp),
        top=3,
        public=Nearest.parse(found["public"]),
    )
    check("verdict", text + "\n")
    assert all(str(Found.parse(tried).layout) in page(found) for tried in found["tried"])


@pytest.mark.parametrize("framework", ["overlapc", "megatron-2021"])
def test_the_verdict_has_megatrons_arguments_and_what_they_divide(framework: str) -> None:
    found = json.loads((GOLDEN / "search.json").read_text())
    best = Found.parse(found["best"])
    best = replace(best, layout=replace(best.layout, schedule="1f1b"))
    full = replace(best, solver="megatron-full", recompute_ns=1)
    result = Result(best, instead=full)
    if framework != "overlapc":
        result = Result(full, alone=("megatron-none", "megatron-full"))
    cluster = Cluster(**found["cluster"] | {"framework": framework})
    machine = load_hardware(cluster.hardware)
    text = verdict(Transformer(**found["model"]), cluster, machine, result, [], None, top=1)
    _, _, said = text.replace("\\\n", "").partition("Megatron's arguments:")
    said = " ".join(said.split())
    text = " ".join(text.split())
    ours = "-m overlapc.megatron --search DIR/search.json pretrain_gpt.py --num-layers 4 "
    assert said.startswith(ours if framework == "overlapc" else "pretrain_gpt.py --num-layers 4 ")
    assert located(ours, Path("so so")).startswith(
        "-m overlapc.megatron --search 'so so/search.json'"
    )
    assert "--recompute-granularity full --recompute-method uniform" in said
    assert "--hidden-size 256 " in said
    assert (f"that {framework} runs by itself" in text) == (framework != "overlapc")
    divided = "--use-distributed-optimizer" in said
    assert best.layout.dp == 2
    assert "--pipeline-model-parallel-size 2 " in said
    assert divided == (framework == "overlapc")
    where = "divided over" if divided else "on all"
    kept = "float32 gradients and" if divided else "bf16 gradients, float32"
    assert f"{kept} optimizer, the latter {where} replicas" in text


# Says what is wider than the window, what the wheel does, and whether the choice of what to compare
# changes what is shown.
_PROBE = """
<script>
  const scroll = document.querySelector(".scroll"), stretch = document.querySelector(".stretch");
  const wheel = ctrlKey => {
    const event = new WheelEvent("wheel", {deltaY: -100, clientX: 50, cancelable: true, ctrlKey});
    scroll.dispatchEvent(event);
    return event.defaultPrevented + " " + (stretch.style.width || "whole");
  };
  const page = document.documentElement;
  const told = ["wider by " + (page.scrollWidth - page.clientWidth)];
  told.push("wheel " + wheel(false), "with Ctrl " + wheel(true));
  document.querySelector("[data-zoom='0']").click();
  told.push("button " + stretch.style.width);
  const pick = document.querySelectorAll(".sides select")[1], cells = pick.closest("table").rows;
  const before = cells[2].cells[2].textContent;
  pick.value = pick.options.length - 1;
  pick.dispatchEvent(new Event("change"));
  told.push("compares " + (cells[2].cells[2].textContent !== before));
  document.title = told.join(", ");
</script>
"""
_TOLD = "wheel false whole, with Ctrl true 125%, button 100%, compares true"


def test_the_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are drawn from the same JSON as the page, all of it labelled."""
    folder = tmp_path / "pictures"
    words = ["report", str(GOLDEN / "search.json"), "--pictures", str(folder), "--json"]
    assert main(words) == GOOD
    written = [Path(name) for name in json.loads(capsys.readouterr().out)["written"]]
    assert {path.name for path in written} == {path.name for path in folder.iterdir()}
    for name, said in {
        "timeline": ("rank 1", "input gradients"),
        "memory": ("rank 0", "GB may be tensors"),
        "layouts": ("ms a step", "the fastest with less memory"),
    }.items():
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(folder / f"{name}.svg")
        text = (folder / f"{name}.svg").read_text()
        assert all(f"{label} -->" in text for label in said)
    empty = tmp_path / "empty.json"
    for broken, hint in (({"best": None}, "nothing fitted"), ({"best": {}}, "lacks or garbles")):
        empty.write_text(json.dumps(broken))
        assert main(["report", str(empty), "--pictures", str(folder)]) == USAGE
        assert hint in capsys.readouterr().err
    assert main(["report", str(empty)]) == USAGE
    assert "nothing to write" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("width", [1920, 1280, 500])
def test_the_page_in_a_browser(width: int, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    text = page(json.loads((GOLDEN / "search.json").read_text()))
    path = tmp_path / "report.html"
    path.write_text(text.replace("</body>", _PROBE + "</body>"))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
         "--virtual-time-budget=3000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=360, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert title[1] == f"wider by 0, {_TOLD}"
