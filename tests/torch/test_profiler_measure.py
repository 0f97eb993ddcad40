"""`measure` runs the real graph, finds what it costs and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from overlapc.core.errors import CaptureError, OptionError
from overlapc.core.ir import Cost, Profile, Slowdown
from overlapc.emulate import Link, init_fabric
from overlapc.passes.capture.front import capture
from overlapc.passes.trace import Captured, trace_joint
from overlapc.profiler import links
from overlapc.profiler import measure as measure_module
from overlapc.profiler.cache import Cache
from overlapc.profiler.link_model import Curve, LinkModel
from overlapc.profiler.measure import measure, retime
from overlapc.profiler.memory import measure_peak
from overlapc.profiler.replay import Replay
from tests.torch.names import scatter_single
from tests.torch.zoo import KINDS

WIDTH, ROWS = 64, 32


class Block(nn.Module):
    """Dropout, a mutated buffer, a split, attention and matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.reshape(1, 4, ROWS, -1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).reshape(ROWS, WIDTH)
        return x + F.dropout(self.out(mixed), 0.5)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def primals_of(model: nn.Module, *inputs: Any) -> list[Any]:
    return [*model.parameters(), *model.buffers(), *inputs]


def captured_by_compile(
    fn: Callable[..., Any], *inputs: Any, then: Callable[[Captured, list[Any]], Any], **options: Any
) -> Any:
    """Front end A: hand the joint graph and the real inputs to `then` while torch compiles."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import default_partition

    found: list[Any] = []
    primals: list[Any] = []

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        found.append(then(trace_joint(joint, num_fwd_outputs), primals))
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)

    def backend(gm: Any, example_inputs: list[Any]) -> Any:
        primals[:] = example_inputs
        return aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition
        )(gm, example_inputs)

    torch.compile(fn, backend=backend, fullgraph=True, **options)(*inputs)
    assert len(found) == 1
    return found[0]


def test_every_op_gets_a_cost_and_every_value_a_size(block: Block) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    captured = capture(block, x)
    profile, sizes = measure(captured, primals_of(block, x))
    trace = captured.trace
    assert set(profile.costs) == set(trace.op)
    assert set(sizes) == set(trace.value)
    assert all(cost.source == "measured" and not cost.comm_ns for cost in profile.costs.values())
    assert sum(cost.compute_ns for cost in profile.costs.values()) > 0
    assert {v.name: v.bytes for v in trace.values} == sizes  # all are known without running
    assert "aliasing" not in profile.conditions
    assert profile.conditions["torch"] == torch.__version__
    assert profile.slowdown == Slowdown()
    same: dict[str, set[int]] = {}
    for op in trace.ops:
        same.setdefault(op.signature, set()).add(profile.costs[op.name].compute_ns)
    assert all(len(costs) == 1 for costs in same.values())


def test_nothing_of_the_callers_changes(block: Block) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    captured = capture(block, x)
    state = {name: value.clone() for name, value in block.state_dict().items()}
    before, rng = x.detach().clone(), torch.get_rng_state()
    text = captured.joint.code
    measure(captured, primals_of(block, x), passes=1)
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())
    assert torch.equal(x, before)
    assert x.grad is None
    assert all(p.grad is None for p in block.parameters())
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert captured.joint.code == text


def test_dear_ops_cost_more_than_cheap_ones() -> None:
    x = torch.randn(256, 256, requires_grad=True)
    captured = capture(nn.Sequential(nn.Linear(256, 2048), nn.Linear(2048, 16), nn.ReLU()), x)
    profile, _ = measure(captured)  # primals are made up
    cost = {op.signature.split()[0]: 0 for op in captured.trace.ops}
    for op in captured.trace.ops:
        cost[op.signature.split()[0]] += profile.costs[op.name].compute_ns
    assert cost["aten.mm.default"] > 5 * cost["aten.relu.default"] > 0
    assert cost["aten.mm.default"] > 5 * cost["aten.t.default"]


def test_workspace_is_what_an_op_holds_beyond_its_results() -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(x.t(), 0).logsumexp(0) * 2

    x = torch.randn(1000, 100, requires_grad=True)
    captured = capture(Sorted(), x)
    profile, _ = measure(captured, [x], passes=1)
    held = {
        op.signature.split()[0]: profile.costs[op.name].workspace_bytes for op in captured.trace.ops
    }
    assert held["aten.mul.Tensor"] <= 8  # the number as a tensor
    assert held["aten.logsumexp.default"] >= x.nbytes  # exp(x - max)


def test_the_users_own_profiler_may_be_running(block: Block) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    captured = capture(block, x)
    with torch.autograd.profiler.profile():
        profile, sizes = measure(captured, primals_of(block, x), passes=1)
    assert set(sizes) == set(captured.trace.value)
    assert all(cost.workspace_bytes == 0 for cost in profile.costs.values())


def test_inputs_must_be_real_and_complete(block: Block) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    captured = capture(block, x)
    good = primals_of(block, x)
    with pytest.raises(CaptureError, match=r"takes \d+ primals, \d+ were given"):
        measure(captured, good[:-1])
    with pytest.raises(CaptureError, match=r'profile="estimate".*primals_'):
        measure(captured, [*good[:-1], x.detach().to("meta")])
    with pytest.raises(OptionError, match="passes=0"):
        measure(captured, good, passes=0)


def test_what_is_not_given_or_fake_is_made_up(block: Block) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    captured = capture(block, x)
    good = primals_of(block, x)
    fake = FakeTensorMode().from_tensor(x.detach())
    for primals, count in ((good, 1), ([*good[:-1], fake], 2), (None, len(good) + 1)):
        profile, sizes = measure(captured, primals, passes=1)  # the last one is the tangent
        assert profile.conditions["made_up"] == f"{count} of the graph's inputs"
        assert sizes == {value.name: value.bytes for value in captured.trace.values}
    tangent = torch.ones(ROWS, WIDTH)
    assert "made_up" not in measure(captured, good, tangents=[tangent], passes=1)[0].conditions


def test_an_op_that_refuses_is_named() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table(tokens).sum()

    model = Lookup()
    captured = capture(model, torch.zeros(3, dtype=torch.int64))
    rng = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"cannot be run.*embedding") as caught:
        measure(captured, [model.table.weight, torch.full((3,), 99)])
    assert caught.value.place == "embedding"
    assert torch.equal(rng, torch.get_rng_state())


def test_within_torch_compile_with_mutation_and_dynamic_sizes() -> None:
    x, state = torch.randn(48, WIDTH, requires_grad=True), torch.zeros(48, WIDTH)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x.detach())
        return F.dropout(x @ weight, 0.5)

    def look(captured: Captured, primals: list[Any]) -> tuple[Captured, Profile, dict[str, int]]:
        # Other sizes than the graph was traced with: what counts is what is given.
        longer = [
            (p if p.shape[0] != 48 else torch.randn(96, WIDTH))
            if isinstance(p, torch.Tensor)
            else 96
            for p in primals
        ]
        measure(captured, primals, passes=1)
        return captured, *measure(captured, longer, passes=2)

    captured, profile, sizes = captured_by_compile(step, x, weight, state, then=look, dynamic=True)
    assert set(profile.costs) == set(captured.trace.op)
    mm = next(op for op in captured.trace.ops if op.signature.startswith("aten.mm"))
    assert sizes[mm.outputs[0]] == 96 * WIDTH * 4
    assert torch.equal(state, x.detach())  # once, by the step itself


class Routed(nn.Module):
    """How many rows are kept is known only by running."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[x[:, 0] > 0]
        return (kept * 3).exp()


@pytest.mark.parametrize("inputs", ["given", "made up"])
def test_sizes_known_only_by_running(inputs: str) -> None:
    x = torch.randn(100, 8, requires_grad=True)

    def look(captured: Captured, primals: list[Any]) -> tuple[Captured, dict[str, int]]:
        return captured, measure(captured, primals if inputs == "given" else None, passes=1)[1]

    from torch._dynamo import config

    with config.patch(capture_dynamic_output_shape_ops=True):
        captured, sizes = captured_by_compile(Routed(), x, then=look)
    (exp,) = (op for op in captured.trace.ops if op.signature.startswith("aten.exp"))
    if inputs == "given":
        assert sizes[exp.outputs[0]] == int((x[:, 0] > 0).sum()) * 8 * 4
    else:
        assert 0 < sizes[exp.outputs[0]] < 100 * 8 * 4


# --------------------------------------------------------------------------- cache


@pytest.fixture
def no_running(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*args: Any) -> None:
        raise AssertionError("the graph was run")

    return lambda: monkeypatch.setattr(Replay, "run", refuse)


def test_with_every_figure_cached_nothing_runs(
    block: Block, tmp_path: Path, no_running: Callable[[], None]
) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    captured, primals = capture(block, x), primals_of(block, x)
    first, sizes = measure(captured, primals, passes=2, cache=Cache(tmp_path / "cache"))
    no_running()
    again, same = measure(captured, primals, cache=Cache(tmp_path / "cache"))
    assert same == sizes
    assert again.conditions["passes"] == "cached"
    for name, cost in again.costs.items():
        assert cost.compute_ns == first.costs[name].compute_ns
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(AssertionError, match="was run"):  # other threads, other figures
            measure(captured, primals, cache=Cache(tmp_path / "cache"))
    finally:
        torch.set_num_threads(threads)


def test_sizes_known_only_by_running_are_never_from_the_cache(tmp_path: Path) -> None:
    from torch._dynamo import config

    def look(captured: Captured, primals: list[Any]) -> list[dict[str, int]]:
        caches = [Cache(tmp_path / "cache"), Cache(tmp_path / "cache")]
        runs = [measure(captured, primals, passes=1, cache=cache) for cache in caches]
        assert "cached" not in runs[1][0].conditions["passes"]
        return [sizes for _, sizes in runs]

    with config.patch(capture_dynamic_output_shape_ops=True):
        one, two = captured_by_compile(Routed(), torch.randn(100, 8, requires_grad=True), then=look)
    assert one == two


# --------------------------------------------------------------------------- collectives


@pytest.fixture
def fabric() -> Iterator[None]:
    init_fabric(Link(alpha_s=0.003, bytes_per_s=100e6), world_size=4)
    yield
    dist.destroy_process_group()


class Reduced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scatter_single(x * 2, "sum", 0, dist.group.WORLD).relu()


@pytest.mark.usefixtures("fabric")
def test_collectives_take_what_the_link_takes() -> None:
    x = torch.randn(1 << 12, 16, requires_grad=True)  # 256 KiB
    captured = capture(Reduced(), x)
    profile, _ = measure(captured, [x])
    starts = [op for op in captured.trace.ops if op.role == "start"]
    assert len(starts) == 2  # reduce-scatter forward, all-gather backward
    expected_ns = 3e6 + 3 / 4 * x.nbytes / 100e6 * 1e9
    for op in starts:
        cost = profile.costs[op.name]
        assert 0.8 * expected_ns < cost.comm_ns < 2 * expected_ns
        assert 0 < cost.compute_ns < expected_ns  # the launch alone, though it ran to its end
    assert profile.conditions["links.backend"] == "overlapc_fabric"
    least, most = measure_module._MIN_PASSES, measure_module._PASSES_TOGETHER
    passes = [f"median of {number}" for number in range(least, most + 1)]
    assert profile.conditions["passes"] in passes
    waits = [profile.costs[op.name] for op in captured.trace.ops if op.role == "wait"]
    assert all(cost.compute_ns < expected_ns / 4 for cost in waits)


@pytest.mark.usefixtures("fabric")
def test_collectives_run_for_their_launches_and_memory_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[bool] = []
    run = Replay.run

    def counted(replay: Replay, watcher: Any, alone: bool = False) -> None:
        ran.append(alone)
        run(replay, watcher, alone)

    monkeypatch.setattr(Replay, "run", counted)
    x = torch.randn(64, 16, requires_grad=True)
    captured = capture(Reduced(), x)
    profile, _ = measure(captured, [x])
    later = int(profile.conditions["passes"].removeprefix("median of ")) - 1
    assert measure_module._MIN_PASSES - 1 <= later < measure_module._PASSES_TOGETHER
    # the warm-up, one with launches, the others, and one that measures memory
    assert ran == [True, False, *[True] * later, False]
    starts = [op.name for op in captured.trace.ops if op.role == "start"]
    assert all(profile.costs[name].compute_ns > 0 for name in starts)


class Results:
    """Watches what the starts of a replay give."""

    def __init__(self) -> None:
        self.of: list[torch.Tensor] = []

    def before(self, step: Any) -> None: ...

    def after(self, step: Any, result: Any) -> None:
        if step.is_start:
            self.of.append(result)


@pytest.mark.usefixtures("fabric")
def test_alone_a_collective_gives_this_ranks_own_data_in_its_form() -> None:
    x = torch.randn(64, 16, requires_grad=True)
    captured = capture(Reduced(), x)
    replay = Replay(captured, [x])
    assert replay.runs_alone
    own, real = Results(), Results()
    with torch.no_grad():
        replay.run(own, alone=True)
        replay.run(real)
    assert [(t.shape, t.dtype) for t in own.of] == [(t.shape, t.dtype) for t in real.of]
    scattered, gathered = own.of
    assert torch.equal(scattered, (x * 2)[:16])  # the first of four parts
    assert gathered.shape == (64, 16)
    assert torch.equal(gathered, gathered[:16].repeat(4, 1))


def test_where_sizes_depend_on_data_collectives_run_each_time() -> None:
    def look(captured: Captured, primals: list[Any]) -> tuple[Captured, bool]:
        return captured, Replay(captured, primals).runs_alone

    from torch._dynamo import config

    with config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.randn(100, 8, requires_grad=True)
        _, runs_alone = captured_by_compile(Routed(), x, then=look)
    assert not runs_alone


@pytest.mark.usefixtures("fabric")
def test_links_may_be_given() -> None:
    x = torch.randn(64, 16, requires_grad=True)
    captured = capture(Reduced(), x)
    (group,) = captured.trace.lanes
    links = LinkModel(
        (
            Curve(group, "reduce_scatter", "float32", 4, ((x.nbytes, 7),), "measured"),
            Curve(group, "all_gather", "", 4, ((x.nbytes, 8),), "measured"),
        ),
        Slowdown(1100, 1200),
    )
    profile, _ = measure(captured, [x], passes=1, links=links)
    found = [profile.costs[op.name].comm_ns for op in captured.trace.ops if op.role == "start"]
    assert found == [7, 8]
    assert profile.slowdown == Slowdown(1100, 1200)


def test_fake_groups_cannot_be_measured() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        x = torch.randn(64, 16, requires_grad=True)
        captured = capture(Reduced(), x)
        with pytest.raises(OptionError, match=r"is fake.*estimate"):
            measure(captured, [x], passes=1)
    finally:
        dist.destroy_process_group()


def test_retiming_changes_compute_times_and_nothing_else(block: Block) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    captured = capture(block, x)
    names = [op.name for op in captured.trace.ops]
    before = Profile(dict.fromkeys(names, Cost(0, 7, 11, "default")), Slowdown(1100, 1050))
    now = retime(captured, primals_of(block, x), before)
    assert set(now.costs) == set(names)
    assert sum(cost.compute_ns for cost in now.costs.values()) > 0
    assert {(c.comm_ns, c.workspace_bytes) for c in now.costs.values()} == {(7, 11)}
    assert now.slowdown == before.slowdown


def test_an_uneven_all_to_all_counts_what_crosses_the_link(monkeypatch: Any) -> None:
    """Of 10 rows this rank, number 1 of 4, keeps 4: it sends 6 and is sent 7."""
    monkeypatch.setattr(links, "group_of", lambda node: "group")
    monkeypatch.setattr(links, "ranks_in", lambda group: 4)
    monkeypatch.setattr(links, "rank_in", lambda group: 1)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(10, 8)
    received, sent = [3, 4, 2, 2], [1, 4, 3, 2]
    op = torch.ops._c10d_functional.all_to_all_single.default
    node = graph.call_function(op, (x, received, sent, "group"))
    node.meta["val"] = torch.empty(11, 8)
    row = 8 * 4
    assert links.collective_of(node, int).bytes == 7 * row * 4 // 3
    assert links.collective_of(node).bytes == 11 * row


class Watched:
    """Notes which nodes ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def before(self, step: Any) -> None: ...

    def after(self, step: Any, result: Any) -> None:
        self.ran.append(step.node.name)


@pytest.mark.parametrize("name", KINDS)
def test_a_replay_may_drop_what_the_forward_keeps(name: str) -> None:
    kind = KINDS[name]
    with kind.world():
        torch.manual_seed(1)
        model, batch = kind.make(), kind.batches()[0]
        try:
            captured = capture(model, *batch.args, **batch.kwargs)
        except CaptureError:
            pytest.skip("it is several graphs")
        ran = []
        for drops in (False, True):
            replay, watched = Replay(captured, drops=drops), Watched()
            with torch.no_grad():
                for _ in range(2):
                    replay.run(watched)
            ran.append(watched.ran)
    assert ran[0] == ran[1]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).exp()
        return x.sum()


def test_a_graph_that_fits_with_recompute_alone_is_measured(monkeypatch: Any) -> None:
    model, x = Deep(), torch.randn(512, 32)
    captured = capture(model, x)
    given = primals_of(model, x)
    peaks, costs = [], []
    for available in (1 << 40, 1 << 20):
        monkeypatch.setattr("overlapc.profiler.replay.available_bytes", lambda *_, n=available: n)
        replay = Replay(captured, given)
        assert replay.drops == (available == 1 << 20)
        with torch.no_grad():
            peaks.append(measure_peak(lambda r=replay: r.run(Watched())))
        profile, sizes = measure(captured, given, passes=1)
        assert ("dropped" in profile.conditions) == replay.drops
        assert "aliasing" not in profile.conditions
        costs.append(({n: c.workspace_bytes for n, c in profile.costs.items()}, sizes))
    assert peaks[1] < 0.25 * peaks[0]
    assert costs[0] == costs[1]
