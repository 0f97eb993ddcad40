"""Random models that FSDP2 shards, trained for a few steps: by FSDP2 itself, or through a front
door of overlapc's. `compare` says what is different, and whether it was planned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, SEQ, STEPS = 48, 32, 3
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICIES = {
    "": {},
    "bf16": {"param_dtype": BF16, "reduce_dtype": FP32},
    "bf16 all": {"param_dtype": BF16, "reduce_dtype": BF16},
    "fp16": {"param_dtype": FP16, "reduce_dtype": FP16},
    "out": {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32},
}


@dataclass(frozen=True)
class Case:
    """How a model is built, sharded and trained."""

    seed: int = 0
    width: int = 16
    layers: int = 2
    policy: str = ""
    mesh: str = "flat"  # or "replicas", "columns" (2-D, with tensor parallelism)
    groups: str = "blocks"  # or "nested", "root", "end", "rows" (sharded along another dimension)
    tied: bool = False
    frozen: bool = False
    spare: bool = False  # a layer that no loss reads
    tint: bool = False  # a frozen parameter of another type in each block
    twice: bool = False
    checkpoints: bool = False
    unsaid: bool = False  # no attribute of the model says that it checkpoints
    reshard: bool | int | None = None
    sgd: bool = False
    clip: bool = False
    evaluates: bool = False
    microbatches: int = 1
    door: str = "optimize"
    budget: float | None = None
    together: bool = False  # one reduction for all microbatches of a step
    ragged: bool = False  # lengths differ from rank to rank and from batch to batch

    @staticmethod
    def drawn(seed: int, ranks: int) -> Case:
        random = Random(f"sharded {seed} {ranks}")
        pick: Callable[[Sequence[Any]], Any] = random.choice

        def rare() -> bool:
            return random.random() < 0.2

        case = Case(
            seed,
            width=pick((12, 16, 18, 20)),
            layers=pick((1, 2, 3)),
            policy=pick(("", "", *POLICIES)),
            mesh=pick(("flat", "replicas", "columns")) if ranks == 4 else "flat",
            groups=pick(("blocks", "blocks", "nested", "root", "end", "rows")),
            tied=rare(),
            frozen=rare(),
            spare=rare(),
            tint=rare(),
            twice=rare(),
            checkpoints=rare(),
            unsaid=rare(),
            reshard=pick((None, None, True, False)),
            sgd=rare(),
            clip=rare(),
            evaluates=rare(),
            microbatches=pick((1, 2, 3, 4)),
            door=pick(("optimize", "TrainStep")),
            budget=pick((None, None, 0.7)),
            together=random.random() < 0.5,
            ragged=random.random() < 0.3,
        )
        if case.mesh == "columns" or case.twice:
            case = replace(case, together=False)
        if case.door == "TrainStep" or case.mesh == "columns":
            case = replace(case, ragged=False)
        if case.ragged:  # the first batch may be the shortest
            case = replace(case, budget=None)
        if case.layers == 1:  # gathers take more than activations
            case = replace(case, budget=None)
        if case.groups == "rows":  # FSDP2 takes sizes that divide there
            case = replace(case, width=24)
        if case.mesh == "columns":
            case = replace(case, width=16, tied=False, groups="blocks", frozen=False)
            case = replace(case, clip=False)  # eager adds no norms of two meshes
        if case.tied:
            case = replace(case, groups=pick(("root", "end")))
        if case.policy == "out" and case.groups != "root":  # eager's norms take one type
            case = replace(case, policy="bf16")
        return case


class Block(nn.Module):
    def __init__(self, width: int, tint: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
        self.tint = (
            nn.Parameter(torch.rand(width, dtype=FP16) + 0.5, requires_grad=False) if tint else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = y.unflatten(-1, (2, -1)).transpose(1, 2)
        z = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + self.mix(z.transpose(1, 2).flatten(-2))
        if self.tint is not None:
            x = x * self.tint.to(x.dtype)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.twice, self.checkpoints = case.twice, case.checkpoints
        self.embed = nn.Embedding(VOCAB, case.width)
        self.blocks = nn.ModuleList(Block(case.width, case.tint) for _ in range(case.layers))
        self.norm, self.head = nn.LayerNorm(case.width), nn.Linear(case.width, VOCAB, bias=False)
        self.spare = nn.Linear(case.width, 4) if case.spare else None
        # What people's models say of themselves.
        self.gradient_checkpointing = case.checkpoints and not case.unsaid
        if case.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            for _ in range(1 + self.twice):
                if self.checkpoints and torch.is_grad_enabled():
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
        scores = self.head(self.norm(x)).float()
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def built(case: Case) -> tuple[Model, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(case.seed)
    model, ranks = Model(case), dist.get_world_size()
    if case.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".up." in name or ".norm." in name or name == "norm.weight")
    mesh: Any = init_device_mesh("cpu", (ranks,))
    if case.mesh != "flat":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))
    if case.mesh == "columns":
        for block in model.blocks:
            ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["inner"], ways)
        mesh = mesh["outer"]
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(**POLICIES[case.policy]),
    }
    if case.reshard is not None:
        options["reshard_after_forward"] = case.reshard
    if case.groups == "rows":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim > 1 else Shard(0)
    if case.groups == "nested":
        for block in model.blocks:
            fully_shard(block.up, **options)
            fully_shard(block.mix, **options)
    if case.groups != "root":
        for block in model.blocks:
            fully_shard(block, **options)
    if case.groups == "end":
        fully_shard([model.embed, model.norm, model.head], **options)
    fully_shard(model, **options)
    chosen = [p for p in model.parameters() if p.requires_grad]
    kind: Any = torch.optim.SGD if case.sgd else torch.optim.AdamW
    return model, kind(chosen, lr=1e-2, foreach=False)


def batches(case: Case, step: int) -> list[Tensor]:
    rank = dist.get_rank() // 2 if case.mesh == "columns" else dist.get_rank()
    made = torch.Generator().manual_seed(1000 * step + rank + case.seed)
    lengths = [SEQ] * case.microbatches
    if case.ragged:
        random = Random(f"{step} {rank} {case.seed}")
        lengths = [random.randint(3, SEQ) for _ in lengths]
    return [torch.randint(VOCAB, (2, length), generator=made) for length in lengths]


def trained(case: Case, model: nn.Module, optimizer: Any, run: Any) -> dict[str, Any]:
    """What a few steps leave behind, by name. `run` adds the gradients of a step's batches."""
    seen: dict[str, Any] = {}
    for step in range(STEPS):
        for i, loss in enumerate(run(batches(case, step))):
            seen[f"loss {i} of step {step}"] = loss.detach().clone()
        if case.clip:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            seen[f"norm of step {step}"] = norm.full_tensor().clone()
        for name, p in model.named_parameters():
            gradient: Any = p.grad
            local = None if gradient is None else gradient.to_local().clone()
            seen[f"gradient of {name} in step {step}"] = local
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluates:
            with torch.no_grad():
                seen[f"evaluation after step {step}"] = model(batches(case, 99)[0]).clone()
    states: dict[str, Any] = model.state_dict()
    return seen | {name: value.to_local().clone() for name, value in states.items()}


def one_by_one(call: Any, sharded: Any = None) -> Any:
    """Forward and backward of each batch; given the `sharded` model, with one reduction for all."""

    def run(each: Sequence[Tensor]) -> list[Tensor]:
        losses = []
        for i, batch in enumerate(each):
            if sharded is not None:
                sharded.set_requires_gradient_sync(i == len(each) - 1)
            losses.append(call(batch))
            losses[-1].backward()
        return losses

    return run


def different(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """The first thing that is not bitwise the same, or ""."""
    if list(expected) != list(found):
        return "other names"
    for name, value in expected.items():
        other = found[name]
        if (value is None) != (other is None):
            return f"{name} is {'missing' if other is None else 'there'}"
        if value is not None and not (value.dtype == other.dtype and torch.equal(value, other)):
            return f"{name} is off by {(value.float() - other.float()).abs().max()}"
    return ""


def compare(case: Case) -> tuple[str, int, list[str], list[str]]:
    """What is different from FSDP2, how many graphs are planned, what runs plain, differences."""
    import overlapc

    torch.compiler.reset()
    model, optimizer = built(case)
    whole = model if case.together else None
    expected = trained(case, model, optimizer, one_by_one(model, whole))
    model, optimizer = built(case)
    options: dict[str, Any] = {"profile": "estimate", "solver": "heu", "timeout_s": 120}
    options["memory_budget"] = case.budget
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.door == "optimize":
            twin: Any = overlapc.optimize(model, **options)
            whole = model if case.together else None
            found = trained(case, model, optimizer, one_by_one(twin, whole))
            return different(expected, found), len(twin.graphs), twin.fallbacks, twin.differences
        step = overlapc.TrainStep(model, reduce="last" if case.together else "each", **options)
        found = trained(case, model, optimizer, step)
        planned = int(step.report is not None)
    return different(expected, found), planned, step.fallbacks, step.differences


def compared(_rank: int, _ranks: int, cases: Sequence[Case]) -> list[Any]:
    """`compare` of each, or the error."""
    dist.init_process_group("gloo")
    found: list[Any] = []
    for case in cases:
        try:
            found.append((case, *compare(case)))
        except Exception as error:  # named beside its case
            found.append((case, f"{type(error).__name__}: {error}", 0, [], []))
            if isinstance(error, overlapc_error()):
                break  # the other ranks may be elsewhere
    dist.destroy_process_group()
    return found


def overlapc_error() -> type[Exception]:
    from overlapc.core.errors import RankError

    return RankError
