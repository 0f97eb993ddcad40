"""The search: its winner is that of trying everything, and its arithmetic is the models'."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from overlapc.cli import FAILED, GOOD, USAGE, main
from overlapc.core.errors import FileError, OptionError
from overlapc.core.merge import merge
from overlapc.core.pipeline import simulate_pipeline
from overlapc.core.schedule import format_schedule
from overlapc.core.simulate import saved_bytes, simulate
from overlapc.planning.rows import StageFigures, plan_rows
from overlapc.profiler.hardware import load_hardware
from overlapc.search.cache import PlannedLayouts
from overlapc.search.captures import UnitKey
from overlapc.search.chosen import load_search, memory_budgets
from overlapc.search.evaluate import Found, evaluate, first_bound, lower_bound, memory_bound
from overlapc.search.layouts import SCHEDULES, Cluster, Fixed, Layout, layouts, stage_layers
from overlapc.search.models.configs import from_config
from overlapc.search.models.modules import Block, Blocks, Head, Ranks
from overlapc.search.models.own import Repeats
from overlapc.search.models.transformer import Transformer
from overlapc.search.partition import partitioned
from overlapc.search.place import embedding_ns
from overlapc.search.pool import planners
from overlapc.search.presets import PRESETS, find_model
from overlapc.search.replicas import Update
from overlapc.search.search import Progress, search
from overlapc.search.tasks import Packed, warn_of_uncut
from overlapc.search.units import make_unit
from overlapc.search.weights import stage_parameters, static_bytes
from overlapc.solvers import bound_ns, solve
from overlapc.solvers.pipeline.schedules import make_schedule
from overlapc.solvers.step import solve_step
from tests.plain.html_checks import check_page

TINY = Transformer("tiny", layers=8, width=256, heads=4, ffn=1024, vocab=512, seq=256)
EXPERTS = replace(TINY, name="tiny-moe", experts=4, top_k=2, expert_width=512, moe_every=2)
CLUSTER = Cluster("a100-sxm-80", 4, 8, 300_000_000, 16)
PAIR = replace(CLUSTER, gpus=2, global_batch=4)


captured_once = cache(make_unit)


def captured_alone(keys):
    return [captured_once(key) for key in keys]


def key(model: Transformer, layout: Layout) -> UnitKey:
    ranks = min(model.experts, layout.dp) or 1
    where = model, CLUSTER.hardware, CLUSTER.gpus
    return UnitKey(*where, layout.tp, ranks, layout.microbatch, layout.sequence)


LATENT = replace(
    EXPERTS, gated=True, head_width=32, q_rank=48, kv_rank=64, rope_width=16, value_width=32,
    shared_width=128, moe_every=1,
)  # fmt: skip
NORMED = replace(TINY, gated=True, head_width=32, head_norms=True, post_norms=True)


@pytest.mark.parametrize(
    "model", [TINY, EXPERTS, replace(TINY, gated=True, kv_heads=2), LATENT, NORMED]
)
def test_parameters_are_those_of_the_modules(model):
    with FakeTensorMode():
        blocks = sum(p.numel() for p in Blocks(model, model.layers, None, None).parameters())
        head = sum(p.numel() for p in Head(model, None).parameters())
    assert blocks + head + model.vocab * model.width == model.parameters()
    assert sum(map(sum, stage_parameters(model, Layout(1, 1, 1, 1)))) == model.parameters()
    over_stages = sum(map(sum, stage_parameters(model, Layout(1, 4, 1, 1))))
    assert over_stages == model.parameters()


@pytest.mark.parametrize(
    ("model", "sequence"),
    [
        (NORMED, False),
        pytest.param(LATENT, True, marks=pytest.mark.slow),
        pytest.param(NORMED, True, marks=pytest.mark.slow),
        pytest.param(LATENT, False, marks=pytest.mark.slow),
    ],
)
def test_blocks_as_people_train_them_are_planned(model, sequence):
    layout = Layout(2, 1, 2, 1, sequence=sequence)
    cluster = replace(CLUSTER, memory_bytes=1 << 40)
    unit = captured_once(UnitKey.of(model, cluster, layout))
    none, ours = (evaluate(model, cluster, layout, unit, s).found for s in ("none", "heu"))
    assert ours.fits
    assert ours.step_ns <= none.step_ns


@pytest.mark.parametrize(
    "unfused", ["", "attention", "attention softmax norm loss", "norm rotary scores"]
)
def test_what_a_framework_does_not_fuse_takes_longer(unfused):
    model, layout = replace(TINY, gated=True, unfused=unfused), Layout(2, 1, 2, 1)
    key = replace(UnitKey.of(TINY, CLUSTER, layout), model=model)
    found = evaluate(model, CLUSTER, layout, captured_once(key), "megatron-none").found
    fused = captured_once(replace(key, model=replace(TINY, gated=True)))
    assert found.step_ns >= evaluate(model, CLUSTER, layout, fused, "megatron-none").found.step_ns


def test_megatrons_full_recompute_runs_layers_whole():
    """Every forward op of a layer runs twice; what nobody needs again, too."""
    problem = captured_once(key(TINY, Layout(2, 1, 2, 1))).problem
    again = {solver: solve(problem, solver).recomputed for solver in ("full", "megatron-full")}
    assert set(again["full"]) < set(again["megatron-full"])
    forward = {op.name for op in problem.trace.ops if op.is_forward}
    once = forward - set(again["megatron-full"])
    # Views of weights take no time; a layer's input is kept.
    assert sum(problem.cost(name).compute_ns > 0 for name in once) < len(forward) / 30


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_the_size_in_their_name(name):
    model = PRESETS[name]
    size = re.search(r"-([\d.]+)b(-|$)", name)
    if name == "mixtral-8x7b":
        assert model.parameters() == pytest.approx(46.7e9, rel=0.01)
    elif size is not None:
        assert model.parameters() == pytest.approx(float(size[1]) * 1e9, rel=0.1)
    assert model.flops_per_token() > 0


def test_megatrons_bytes_of_weights_gradients_and_optimizer():
    """18 bytes a parameter, and 6 + 12 / dp with a distributed optimizer."""
    for name in ("gpt-7b", "gpt-13b", "gpt-175b"):
        model = PRESETS[name]
        (alone,) = static_bytes(model, Layout(1, 1, 1, 1))
        assert alone == 18 * model.parameters()
        (shared,) = static_bytes(model, Layout(1, 1, 8, 1))
        assert shared == pytest.approx(7.5 * model.parameters(), rel=1e-6)


def test_layouts_divide_everything():
    found = list(layouts(EXPERTS, CLUSTER))
    assert len(found) == len(set(found)) > 10
    for layout in found:
        assert layout.tp * layout.pp * layout.dp == CLUSTER.gpus
        assert CLUSTER.global_batch % (layout.dp * layout.microbatch) == 0
        assert sum(stage_layers(EXPERTS, layout.pp)) == EXPERTS.layers
    # Ranks divide the experts evenly, and a tensor-parallel group is within a node.
    for gpus, model in ((12, PRESETS["mixtral-8x7b"]), (40, PRESETS["gpt-13b"])):
        for layout in layouts(model, replace(CLUSTER, gpus=gpus, global_batch=gpus)):
            assert model.experts % max(1, layout.ep) == 0
            assert layout.tp * layout.dp % max(1, layout.ep) == 0
            assert CLUSTER.gpus_per_node % layout.tp == 0
    assert {layout.tp for layout in layouts(TINY, CLUSTER, Fixed(tp=2))} == {2}
    assert all(layout.sequence == (layout.tp > 1) for layout in layouts(TINY, CLUSTER))
    assert not any(layout.sequence for layout in layouts(TINY, CLUSTER, Fixed(sequence=False)))
    odd = replace(TINY, seq=255)
    assert not any(layout.sequence for layout in layouts(odd, CLUSTER))


@pytest.mark.parametrize(
    ("model", "every"),
    [
        (TINY, 31),
        pytest.param(TINY, 11, marks=pytest.mark.slow),
        pytest.param(EXPERTS, 11, marks=pytest.mark.slow),
    ],
)
def test_no_plan_beats_the_bounds(model, every):
    tried = 0
    for layout in list(layouts(model, CLUSTER))[::every]:
        unit = captured_once(key(model, layout))
        for solver in ("none", "full", "heu"):
            found = evaluate(model, CLUSTER, layout, unit, solver).found
            if found.fits:
                tried += 1
                placed = solver == "heu"
                bounds = [
                    bound(model, CLUSTER, layout, unit, placed=placed)
                    for bound in (lower_bound, memory_bound)
                ]
                assert sorted(bounds) == bounds
                assert found.step_ns >= bounds[1]
                assert found.step_ns >= first_bound(model, CLUSTER, layout)
                assert max(found.peak_bytes) <= CLUSTER.memory_bytes
            else:
                assert found.smallest_bytes > CLUSTER.memory_bytes
    assert tried > 3


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True])
def test_where_a_baseline_fits_so_do_we_and_are_no_slower(sequence):
    """Beside the head, too, whose scores take most of what a small model may take."""
    layout = Layout(2, 1, 2, 4, sequence=sequence)
    unit = captured_once(key(TINY, layout))
    static = max(static_bytes(TINY, layout))
    most = max(evaluate(TINY, CLUSTER, layout, unit, "none").found.peak_bytes)
    fitted = 0
    for percent in range(20, 101, 8):
        size = static + (most - static) * percent // 100
        cluster = replace(CLUSTER, memory_bytes=size)
        # Microbatches one by one, as the baselines have them: merging them only helps.
        ours = evaluate(TINY, cluster, layout, unit, "heu", below_ns=0).found
        for baseline in ("none", "full", "selective", "megatron"):
            theirs = evaluate(TINY, cluster, layout, unit, baseline).found
            if theirs.fits:
                fitted += 1
                assert ours.fits, (percent, baseline)
                assert ours.step_ns <= theirs.step_ns, (percent, baseline)
                assert max(theirs.peak_bytes) <= size
    assert fitted > 8


def test_shared_sequences_take_less_memory():
    for model in (TINY, EXPERTS):
        found = []
        for sequence in (False, True):
            layout = Layout(2, 1, 2, 4, sequence=sequence)
            unit = captured_once(key(model, layout))
            found.append(evaluate(model, CLUSTER, layout, unit, "none").found.peak_bytes)
            lanes = {
                op.signature.split(".")[1] for op in unit.problem.trace.ops if op.lane != "compute"
            }
            assert ("all_reduce" in lanes) != sequence
            assert ({"all_gather_into_tensor", "reduce_scatter_tensor"} <= lanes) == sequence
        assert found[1] < found[0]


@pytest.fixture
def in_this_process(monkeypatch):
    """Plan one after the other here: other processes take seconds to start, captures seconds."""
    monkeypatch.setattr("overlapc.search.running.make_units", captured_alone)
    monkeypatch.setattr("overlapc.search.search.planners", lambda count=0: ThreadPoolExecutor(1))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.slow
@pytest.mark.parametrize("fixed", [Fixed(tp=2), Fixed()])
def test_the_winner_is_that_of_trying_all_and_is_kept(fixed, tmp_path):
    quick = search(TINY, PAIR, fixed, cache=tmp_path, rivals=["full"])
    every = search(TINY, PAIR, fixed, prune=False)
    (rival,) = quick.rivals
    assert rival == search(TINY, PAIR, fixed, solver="full", prune=False).best
    for folder in tmp_path.iterdir():  # the baseline's
        if '"solver": "full"' in next(folder.iterdir()).read_text():
            shutil.rmtree(folder)
    assert quick.best == every.best
    assert quick.bound_ns <= min(f.bound_ns for f in every.tried if f.fits)
    assert every.pruned == 0
    assert sum(found.fits for found in quick.tried) >= 3  # to compare it with
    (folder,) = tmp_path.iterdir()
    known = {file: file.read_text() for file in folder.iterdir()}
    again = search(TINY, PAIR, fixed, cache=tmp_path)
    assert (again.best, again.less) == (quick.best, quick.less)
    assert len(quick.less) == 3
    most = max(quick.best.peak_bytes)
    for found in quick.less:  # what less memory costs the best layout
        assert found.layout == quick.best.layout
        assert found.smallest_bytes or max(found.peak_bytes) < most
        assert found.smallest_bytes or found.step_ns >= quick.best.step_ns
    assert {file: file.read_text() for file in folder.iterdir()}.items() >= known.items()
    for file, text in known.items():  # broken, of another kind, a pipe: planned anew
        file.unlink()
        if "tp=2" in file.name:
            os.mkfifo(file)
        else:
            file.write_text(text.replace('"step_ns": ', '"step_ns": null, "was": '))
    assert search(TINY, PAIR, Fixed(tp=2), cache=tmp_path).best is not None


@pytest.mark.usefixtures("in_this_process")
def test_a_search_says_what_it_does_when_all_layouts_are_planned():
    said: list[str] = []

    def note(progress: Progress) -> None:
        assert progress.left == 0 or not progress.doing
        said.append(re.sub(r"\d+", "N", progress.doing))

    fixed = Fixed(pp=2, microbatch=1, schedule="1f1b")
    assert search(TINY, PAIR, fixed, rivals=["full"], progress=note).best is not None
    assert list(dict.fromkeys(said)) == [
        "",
        "planning layouts to list beside the fastest",
        "dividing the layers of the fastest among its stages",
        "searching layouts of N baselines, N planned, N left",
        "planning the fastest with less memory, and by other solvers",
    ]
    said.clear()
    small = replace(PAIR, memory_bytes=10_000_000)
    assert search(TINY, small, fixed, progress=note).best is None
    assert said[-1] == "looking for the least memory that works"


@pytest.mark.usefixtures("in_this_process")
def test_searches_at_the_same_time_lose_nothing(tmp_path):
    """Each knows of the cache what was there when it began, and adds what it plans."""
    both = [PlannedLayouts(tmp_path, TINY, PAIR, "heu") for _ in range(2)]
    layouts = [Layout(1, 1, 2, m) for m in (1, 2)]
    for each, layout in zip(both, layouts, strict=True):
        each.put(Found(layout, "heu", step_ns=layout.microbatch))
    for each in [*both, PlannedLayouts(tmp_path, TINY, PAIR, "heu")]:
        assert [each.get(layout).step_ns for layout in layouts] == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_what_does_not_fit_says_what_would():
    small = replace(PAIR, memory_bytes=10_000_000)
    result = search(TINY, small)
    assert result.best is None
    least = min(found.smallest_bytes for found in result.tried)
    assert search(TINY, replace(small, memory_bytes=least)).best is not None
    with pytest.raises(OptionError, match=r"no layout .* has --tp 3 --no-seq"):
        search(TINY, CLUSTER, Fixed(tp=3, sequence=False))


def test_a_config_of_huggingface(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = find_model(str(tmp_path))
    assert found.parameters() == find_model("llama-7b").parameters()
    small = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_ctx": 1024}
    path.write_text(json.dumps(small | {"vocab_size": 50257}))
    gpt2 = from_config(path)
    assert (gpt2.vocab, gpt2.tied) == (50304, True)
    path.write_text(json.dumps(config | {"hidden_size": "wide"}))
    with pytest.raises(FileError, match="hidden_size is 'wide'"):
        from_config(path)


def test_the_command_prints_and_writes_what_it_found(tmp_path, capsys, request):
    config = tmp_path / "config.json"
    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config.write_text(json.dumps(small | {"vocab_size": 512, "max_position_embeddings": 256}))
    argv = ["search", str(config), "--gpus", "2", "--batch", "8", "--pp", "2", "--memory", "1.55GB"]
    argv += ["--schedule", "zero-bubble"]
    argv += ["--cache", str(tmp_path / "cache"), "--compare", "none,full,heu"]
    argv += ["--solver", "heu"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == GOOD
    out, err = capsys.readouterr()
    assert "the fastest: tp=1 pp=2 dp=1" in out
    assert "Et*2|t*2L" in out
    assert "rank 1: " in out
    assert all(line.startswith("overlapc: ") for line in err.splitlines())  # what takes long
    folder = tmp_path / "out"
    names = "report.html search.json schedule.txt trace.json problem.txt plan.txt"
    assert {p.name for p in folder.iterdir()} == set(names.split())
    assert main(["explain", str(folder / "problem.txt"), str(folder / "plan.txt")]) == GOOD
    again = tmp_path / "again.html"
    assert main(["report", str(folder / "search.json"), "--out", str(again)]) == GOOD
    assert again.read_text() == (folder / "report.html").read_text()
    check_page(again.read_text())
    assert main(["simulate", str(tmp_path / "out" / "schedule.txt"), "--picture"]) == GOOD
    chosen = load_search(folder / "search.json")
    assert format_schedule(chosen.schedule) == (folder / "schedule.txt").read_text()
    assert (chosen.tp, chosen.pp, chosen.dp, chosen.layers) == (1, 2, 1, (2, 2))
    assert chosen.microbatch * chosen.microbatches == 8
    assert all(100_000_000 < budget < 250_000_000 for budget in chosen.memory_budgets)
    document = json.loads((folder / "search.json").read_text())
    best, ours = document["best"], document["ours"]
    assert ours["found"] == best
    assert "solver heu" in document["explain"]
    assert document["answer"]["headline"] in out
    assert document["answer"]["memory"] in out
    assert "of 1.6 GB" in document["answer"]["memory"]
    for broken in (
        {},
        document | {"ours": None},
        *(
            document | {"ours": ours | {"found": best | change}}
            for change in (
                {"layers": [4]},
                {"microbatches": 10**9},  # would take all memory
                {"layout": best["layout"] | {"pp": 10**9}},
                {"solver": "greedy"},
            )
        ),
    ):
        (folder / "search.json").write_text(json.dumps(broken))
        with pytest.raises(FileError, match="expected the search"):
            load_search(folder / "search.json")
    request.getfixturevalue("in_this_process")
    assert main([*argv, "--json"]) == GOOD
    out, _ = capsys.readouterr()
    found = json.loads(out[out.index("{") :])
    assert [row["solver"] for row in found["compared"]] == ["none", "full", "heu"]
    exposed = found["best"]["exposed_ns"]
    assert set(exposed) >= {"dp", "p2p"}
    assert 0 < exposed["p2p"] < found["best"]["step_ns"] * (1 - found["best"]["bubble"])
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()  # cannot be written
    argv[argv.index("none,full,heu")] = "none"
    argv += ["--out", str(folder)]
    assert main(argv) == USAGE
    out, err = capsys.readouterr()
    assert "the fastest: tp=1 pp=2 dp=1" in out
    assert re.search("cannot write .*report.html", err)
    assert main(["search", str(config), "--gpus", "1", "--memory", "3MB", "--no-cache"]) == FAILED
    assert "smallest memory that works" in capsys.readouterr().out


def test_captures_measure_nothing_and_leave_the_default_dtype_alone():
    unit = make_unit(key(TINY, Layout(2, 1, 2, 1)))
    problems = unit.problem, unit.head
    assert {c.source for p in problems for c in p.profile.costs.values()} == {"estimated"}
    assert torch.get_default_dtype() == torch.float32
    modules = unit.problem.trace.modules  # of forward and backward, for `explain`
    starts = {op.piece.letter: op.name for op in unit.problem.trace.ops if op.role == "start"}
    assert (modules[starts["F"]], modules[starts["I"]]) == ("blocks.3.mlp", "blocks.0.attn")


@pytest.mark.slow
def test_the_best_partition_is_the_best_of_all():
    layout = Layout(1, 3, 1, 4)
    model = replace(TINY, layers=7)
    unit = captured_once(key(model, layout))
    room = max(static_bytes(model, layout)) + 24_000_000  # early stages must recompute
    cluster = Cluster(CLUSTER.hardware, 3, 8, room, 16)
    with planners() as pool:
        split, best = partitioned(model, cluster, layout, unit, pool)
    slowest = {}
    for first in range(1, 6):
        for second in range(1, 7 - first):
            layers = (first, second, 7 - first - second)
            outcome = evaluate(model, cluster, layout, unit, layers=layers)
            if outcome.found.fits:
                slowest[layers] = outcome.slowest.microbatch_ns
    assert best.optimal
    assert best.slowest_ns == slowest[best.layers] == min(slowest.values())
    assert split.slowest_ns == slowest.get(split.layers)


@pytest.mark.parametrize(
    ("pp", "name"), [(2, "1f1b"), (8, "1f1b"), (2, "interleaved"), (2, "zero-bubble-v")]
)
def test_memory_is_that_of_the_layers_there_are(pp, name):
    """Captured are four blocks; ranks of one layer, of five, or of two and three hold what these
    make."""
    model = replace(TINY, layers=pp if pp == 8 else 10)
    layout = Layout(1, pp, 1, 1, name)
    cluster = replace(CLUSTER, gpus=pp, memory_bytes=10**10)
    unit = captured_once(key(model, layout))
    found = evaluate(model, cluster, layout, unit, "none")
    static = static_bytes(model, layout)
    each = saved_bytes(unit.problem, found.stages[0].report.plan.saved) / unit.blocks
    schedule = make_schedule(name, pp, 4 * pp)
    for rank in range(pp):
        stages = layout.stages_of(rank)
        if layout.stages - 1 in stages:
            continue  # has a head
        layers = {stage: found.found.layers[stage] for stage in stages}
        inputs = schedule.held(rank, dict.fromkeys(stages, 1)) + len(stages)
        peak = found.stages[rank].peak_bytes - static[rank] - unit.boundary_bytes * inputs
        alone = simulate(
            replace(unit.problem, in_flight=1), found.stages[rank].report.plan
        ).peak_bytes
        held = schedule.held(rank, layers)
        curve = found.timeline.peak_bytes[rank]  # drawn on the page, counted in another way
        assert curve == pytest.approx(found.found.peak_bytes[rank], rel=0.1)
        assert peak == pytest.approx(alone + (held - unit.blocks) * each, abs=4)


def test_stages_of_a_rank_are_those_of_its_row():
    for layout in layouts(TINY, CLUSTER):
        count = CLUSTER.global_batch // layout.dp // layout.microbatch
        rows = layout.rows(count)
        assert rows.stages == layout.stages
        for rank in range(layout.pp):
            mine = {stage for stage, holder in rows.rank_of.items() if holder == rank}
            assert mine == set(layout.stages_of(rank))
    assert {layout.schedule for layout in layouts(TINY, CLUSTER)} == set(SCHEDULES)


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_of_a_rank_are_what_was_asked_for(chunks):
    asked = set(layouts(TINY, CLUSTER, Fixed(pp=2, schedule="interleaved", chunks=chunks)))
    assert asked
    assert {layout.stages for layout in asked} == {2 * chunks}
    every = set(layouts(TINY, CLUSTER))
    assert asked <= every
    assert "chunks=4" in {str(layout).split()[-1] for layout in every}
    for wrong in ({"chunks": 1}, {"chunks": 2, "schedule": "1f1b"}):
        with pytest.raises(OptionError, match="chunks="):
            Fixed(**wrong)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_rows_are_those_that_a_pipeline_would_place(name):
    layout = Layout(1, 2, 1, 1, name)
    cluster = replace(PAIR, global_batch=8)
    unit = captured_once(key(TINY, layout))
    found = evaluate(TINY, cluster, layout, unit)
    plain = evaluate(TINY, cluster, layout, unit, below_ns=0)
    schedule = layout.rows(8)
    peaks = simulate_pipeline(schedule, found.costs).peak_bytes
    limits = [
        peak + cluster.memory_bytes - stage.peak_bytes
        for peak, stage in zip(peaks, found.stages, strict=True)
    ]
    random = any(op.random for op in unit.problem.trace.ops)
    figures = [[StageFigures(cost, 0, 0, random)] for cost in found.costs]
    for rank, limit in enumerate(limits):
        figures[rank] = [replace(figures[rank][0], limit=limit)]  # its first stage
    _, rows, timeline = plan_rows(schedule, figures)
    assert found.found.schedule == rows != schedule
    spans = [[(ran.step, ran.start_ns, ran.end_ns) for ran in row] for row in found.timeline.ran]
    assert spans == [[(ran.step, ran.start_ns, ran.end_ns) for ran in row] for row in timeline.ran]
    update = Update.of(TINY, cluster, layout)
    assert found.found.step_ns == timeline.step_ns + update.optimizer_ns
    assert max(found.found.peak_bytes) <= cluster.memory_bytes
    # What placing can win at most was known before.
    assert not plain.found.rows
    assert plain.found.least_ns <= found.found.step_ns < plain.found.step_ns
    again = evaluate(TINY, cluster, layout, unit, known=found.found.rows)
    assert again.found == found.found
    theirs = evaluate(TINY, cluster, layout, unit, "full").found  # as its authors run it
    assert (theirs.rows, theirs.least_ns) == ("", theirs.step_ns)


def test_microbatches_are_merged_where_a_train_step_would_merge_them():
    layout = Layout(2, 1, 2, 2)
    unit = captured_once(key(TINY, layout))
    found = evaluate(TINY, CLUSTER, layout, unit)
    plain = evaluate(TINY, CLUSTER, layout, unit, below_ns=0)
    (stage,) = plain.stages
    problem = stage.report.problem
    plan = stage.report.plan
    lone, merged = solve_step(problem, plan.solver, lambda: plan, 4)
    alone = simulate(problem, lone)
    both = simulate(merge(problem), merged)
    times = TINY.layers // unit.blocks
    head = sum(unit.head_ran.phase_ns)
    words = sum(embedding_ns(CLUSTER, layout, unit, load_hardware(CLUSTER.hardware)))
    step_ns = times * (alone.step_ns + 3 * both.step_ns) + 4 * (head + words)
    update = Update.of(TINY, CLUSTER, layout)
    told = step_ns + sum(update.reduce_ns) + update.after_ns
    assert found.found.step_ns == pytest.approx(told, abs=8)
    assert found.found.merged
    assert not plain.found.merged
    assert plain.found.least_ns <= found.found.step_ns < plain.found.step_ns
    assert max(found.found.peak_bytes) <= CLUSTER.memory_bytes
    exposed = alone.exposed_ns + 3 * both.exposed_ns
    assert found.found.exposed_ns["tp"] == pytest.approx(times * exposed, abs=99)
    for other, batch in (("full", 16), ("heu", 4)):  # a baseline, and a lone microbatch
        cluster = replace(CLUSTER, global_batch=batch)
        assert not evaluate(TINY, cluster, layout, unit, other).found.merged


def test_rows_of_a_v_are_made_for_what_its_stages_take():
    layout = Layout(1, 4, 1, 1, "zero-bubble-v")
    unit = captured_once(key(TINY, layout))
    found = evaluate(TINY, CLUSTER, layout, unit)
    plain = simulate_pipeline(layout.rows(16), found.costs)
    assert found.timeline.step_ns < 0.95 * plain.step_ns
    assert max(found.found.peak_bytes) <= CLUSTER.memory_bytes
    assert found.found.step_ns >= lower_bound(TINY, CLUSTER, layout, unit)


def test_what_the_rows_leave_of_a_reduction_is_exposed():
    """Gradients of stages that end early are on their way while the rank goes on."""
    for name in ("1f1b", "zero-bubble-v"):
        layout = Layout(1, 2, 2, 1, name)
        unit = captured_once(key(TINY, layout))
        outcome = evaluate(TINY, CLUSTER, layout, unit, "none")
        update = Update.of(TINY, CLUSTER, layout, outcome.found.layers)
        rows = outcome.timeline
        assert {one.stage for one in rows.reductions} == set(range(layout.stages))
        ends = max(ran.end_ns for row in rows.ran for ran in row)
        exposed = outcome.found.exposed_ns["dp"]
        assert exposed == rows.step_ns - ends + update.gather_ns
        assert exposed >= min(update.reduce_ns) + update.gather_ns
    alone = Layout(1, 2, 1, 1)
    outcome = evaluate(TINY, PAIR, alone, captured_once(key(TINY, alone)), "none")
    assert (outcome.found.exposed_ns["dp"], outcome.timeline.reductions) == (0, ())


def test_what_two_stages_of_a_rank_may_take():
    layout = Layout(1, 2, 1, 1, "zero-bubble-v")
    found = Found(layout, "heu", step_ns=1, layers=(1, 1, 1, 5), microbatches=8)
    budgets = memory_budgets(TINY, PAIR, found)
    static = static_bytes(TINY, layout, found.layers)
    parameters = stage_parameters(TINY, layout, found.layers)
    for rank in range(2):
        mine = layout.stages_of(rank)
        activations = sum(budgets[s] - 4 * sum(parameters[s]) for s in mine)
        # They need not be at their worst at the same time.
        assert activations >= PAIR.memory_bytes - static[rank] - len(mine)
    assert all(0 < budget < PAIR.memory_bytes for budget in budgets)


def as_tiny(tensor, expert):
    """TINY as if it were a user's own model."""
    block = Block(TINY, Ranks(tensor), Ranks(expert), False)
    return Repeats(block, TINY.layers, TINY.width, TINY.seq, TINY.vocab, heads=TINY.heads)


def as_experts(tensor, expert):
    block = Block(replace(EXPERTS, moe_every=1), Ranks(tensor), Ranks(expert), True)
    heads, experts = EXPERTS.heads, EXPERTS.experts
    return Repeats(block, EXPERTS.layers, EXPERTS.width, EXPERTS.seq, EXPERTS.vocab, heads, experts)


@pytest.mark.parametrize(
    ("name", "preset"), [("as_tiny", TINY), ("as_experts", replace(EXPERTS, moe_every=1))]
)
def test_a_block_of_the_users_own_is_searched_as_a_preset_is(name, preset):
    own = find_model(f"{__name__}:{name}")
    assert own.parameters() == preset.parameters()
    for seq in (preset.seq, 2 * preset.seq):
        longer = replace(own, seq=seq), replace(preset, seq=seq)
        assert longer[0].flops_per_token() == longer[1].flops_per_token()
    found = list(layouts(own, CLUSTER))
    assert found == list(layouts(preset, CLUSTER, Fixed(sequence=False)))
    for layout in found:
        assert static_bytes(own, layout) == static_bytes(preset, layout)
    layout = next(one for one in found if (one.tp, one.dp) == (2, 2))
    ours, theirs = (make_unit(UnitKey.of(model, CLUSTER, layout)) for model in (own, preset))
    assert first_bound(own, CLUSTER, layout) == first_bound(preset, CLUSTER, layout)
    assert ours.problem.profile.costs == theirs.problem.profile.costs
    found = [
        evaluate(model, CLUSTER, layout, unit, below_ns=0).found
        for model, unit in ((own, ours), (preset, theirs))
    ]
    assert found[0] == found[1]


def nothing(tensor, expert):
    return Repeats(torch.nn.Identity(), 4, 64, 16, 64)


@pytest.mark.usefixtures("in_this_process")
def test_a_block_that_does_nothing_takes_no_time():
    found = search(find_model(f"{__name__}:nothing"), PAIR)
    assert found.best is not None


def no_module(tensor, expert):
    return Repeats(lambda x: x, 1, 8, 8, 8)


def other_shape(tensor, expert):
    return Repeats(torch.nn.Linear(8, 4), 1, 8, 8, 8)


def other_width(tensor, expert):
    return Repeats(torch.nn.Linear(4, 4), 1, 8, 8, 8)


def no_layers(tensor, expert):
    return Repeats(torch.nn.Linear(8, 8), 0, 8, 8, 8)


def takes_nothing():
    return None


def gives_nothing(tensor, expert):
    return None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_module", "expected an nn.Module"),
        ("other_shape", "expected the same"),
        ("other_width", "block failed on a tensor of shape"),
        ("no_layers", "layers=0, expected a whole number from 1"),
        ("takes_nothing", "expected it to take"),
        ("gives_nothing", "expected a Repeats"),
        ("is_not_there", "expected module:function from here"),
    ],
)
def test_a_wrong_function_is_told_what_was_expected(name, said):
    with pytest.raises(OptionError, match=said):
        find_model(f"{__name__}:{name}")


def test_slices_that_no_layout_has_are_warned_of():
    listed = [Found(Layout(1, 1, 1, size), "heu") for size in (1, 2)]
    with pytest.warns(RuntimeWarning, match="in 3 slices: microbatches of 1, 2 sequences"):
        warn_of_uncut([3], listed, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_uncut([1, 2], listed, [2])


def test_a_unit_bounds_its_problems_and_is_unpacked_once():
    layout = Layout(2, 2, 1, 1, sequence=True)
    unit = captured_once(key(TINY, layout))
    packed = Packed.of(unit)
    assert packed.unit is Packed(bytes(packed.data)).unit is not unit
    peak = simulate(unit.problem, solve(unit.problem, "none")).peak_bytes
    for of in (unit.problem, unit.with_head):
        for in_flight, budget in ((1, peak // 2), (3, 2 * peak), (Fraction(1, 2), peak // 3)):
            problem = replace(of, in_flight=in_flight, budget_bytes=budget)
            assert packed.unit.bound_ns(problem) == bound_ns(problem)
