"""`OwnModel` is a model whose blocks a user's function builds for a layout's ranks.

    def for_search(tensor, expert):
        return Repeats(Block(config, tensor), layers=32, width=4096, seq=2048, vocab=51200)

`tensor` and `expert` are process groups, or None for one rank. The embedding before the blocks, and
norm, scores and loss behind them, are assumed to be a GPT's. If the function gives them, too, the
winner is planned whole, as `Pipeline` plans it (`search/whole.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

from overlapc.core.errors import OptionError, OverlapcError
from overlapc.passes.capture.front import capture
from overlapc.profiler.estimate import forward_flops
from overlapc.search.groups import fake_groups
from overlapc.tools.functions import find_function

EXAMPLE = "examples.gpt.model:for_search"


@dataclass
class Repeats:
    """The return value of a user's function: this rank's part of a block, which maps (batch, seq,
    width) to the same shape, and how many such blocks the model has. Tensor-parallel ranks must
    divide `heads`; `experts` are divided over replicas. `first` makes a block's input of tokens
    (batch, seq). `last` makes the first argument of `loss(output, targets)` of a block's output;
    targets have the shape of tokens."""

    block: nn.Module
    layers: int
    width: int
    seq: int
    vocab: int
    heads: int = 1
    experts: int = 0
    tied: bool = False
    first: nn.Module | None = None
    last: nn.Module | None = None
    loss: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if len({self.first is None, self.last is None, self.loss is None}) > 1:
            raise OptionError(
                "Repeats: expected first, last and loss, or none of them; found "
                f"first={self.first!r:.60}, last={self.last!r:.60}, loss={self.loss!r:.60}"
            )
        if not isinstance(self.block, nn.Module):
            raise OptionError(
                f"Repeats: the block is a {type(self.block).__name__}, expected an nn.Module"
            )
        for key in ("layers", "width", "seq", "vocab", "heads", "experts"):
            value, least = getattr(self, key), int(key != "experts")
            most = 10_000 if key == "layers" else 1 << 32
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise OptionError(
                    f"Repeats: {key}={value!r}, expected a whole number from {least} to {most}"
                )


@dataclass(frozen=True)
class OwnModel:
    """A model like `Transformer`, whose blocks a function named `name` makes."""

    name: str
    layers: int
    width: int
    heads: int
    vocab: int
    seq: int
    experts: int
    tied: bool
    source: str = "the function's own block; embedding and head as a GPT's"
    period: int = 1
    dense_first: int = 0
    gated: bool = False
    whole: bool = False  # has it `first`, `last` and `loss`?

    @staticmethod
    def find(where: str) -> OwnModel:
        return _sizes(where)[0]

    @property
    def norm_parameters(self) -> int:
        return 2 * self.width

    @property
    def position_parameters(self) -> int:
        return 0

    def splits(self, tp: int) -> bool:
        return self.heads % tp == 0 and self.vocab % tp == 0

    def held(
        self, layers: int, tp: int, expert_ranks: int, dense_first: int = 0, etp: int = 1
    ) -> tuple[int, int]:
        """(dense, of experts) parameters of so many layers on one rank: parameters that the
        experts' ranks divide count as experts."""
        here, alone = (_counts(self.name, tp, ranks) for ranks in (expert_ranks, 1))
        experts = sum(count for name, count in here.items() if count != alone.get(name))
        return layers * (sum(here.values()) - experts), layers * experts

    def parameters(self) -> int:
        ends = self.vocab * self.width * (1 if self.tied else 2) + self.norm_parameters
        return self.layers * sum(_counts(self.name, 1, 1).values()) + ends

    def flops_per_token(self) -> int:
        """Three times the flops counted in a forward of the blocks on one rank, and those of the
        scores."""
        return self.layers * _sizes(self.name, self.seq)[1] + 6 * self.vocab * self.width

    def hint(self) -> str:
        return f"a tp that divides a node, {self.heads} heads and {self.vocab} words"

    def shares_sequence(self, tp: int, cp: int = 1) -> bool:
        return False  # a block takes whole sequences, whatever it does inside

    def splits_experts(self, tp: int) -> bool:
        return False  # how a block divides its experts is its own

    def splits_sequence(self, cp: int) -> bool:
        return cp == 1

    def scales(self, words: int) -> bool:
        return False  # what a block does with more sequences is its own

    def blocks(
        self,
        count: int,
        tensor: ProcessGroup | None,
        expert: ProcessGroup | None,
        sequence: bool = False,
        context: object = None,
        shares_experts: bool = False,
    ) -> nn.Module:
        assert not sequence
        assert context is None
        assert not shares_experts
        return nn.Sequential(*(_made(self.name, tensor, expert).block for _ in range(count)))

    def stage(
        self,
        layers: int,
        is_first: bool,
        is_last: bool,
        tokens: Tensor,
        tensor: ProcessGroup | None,
        expert: ProcessGroup | None,
    ) -> tuple[nn.Module, Tensor]:
        """Make the blocks and the ends of a stage, and an example of its input."""
        made = _made(self.name, tensor, expert)
        assert made.first is not None
        assert made.last is not None
        blocks = [made.block, *(_made(self.name, tensor, expert).block for _ in range(layers - 1))]
        parts = [*[made.first][:is_first], *blocks, *[made.last][:is_last]]
        return _Stage(parts, made.loss if is_last else None), made.first(tokens).detach()


class _Stage(nn.Module):  # type: ignore[misc]
    """Runs parts one after the other; with a loss, on their result and the targets."""

    def __init__(self, parts: Sequence[nn.Module], loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.parts, self.loss = nn.ModuleList(parts), loss

    def forward(self, x: Tensor, *targets: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.contiguous() if self.loss is None else self.loss(x, *targets)


def _made(where: str, tensor: ProcessGroup | None, expert: ProcessGroup | None) -> Repeats:
    make = find_function(where, EXAMPLE)
    try:
        made = make(tensor, expert)
    except OverlapcError:
        raise
    except Exception as error:
        raise OptionError(
            f"{where} failed: {error!r}; expected it to take a tensor-parallel and an experts' "
            "process group (or None) and to return a Repeats"
        ) from error
    if not isinstance(made, Repeats):
        raise OptionError(f"{where} returned a {type(made).__name__}, expected a Repeats")
    return made


@lru_cache
def _sizes(where: str, seq: int = 0) -> tuple[OwnModel, int]:
    """The model, and the flops of a token in one block, forward and backward, for this sequence
    length, by default the model's own."""
    with FakeTensorMode():
        made = _made(where, None, None)
        x = torch.zeros(1, seq or made.seq, made.width, requires_grad=True)
        shape = tuple(x.shape)
        try:
            out = made.block(x)
        except Exception as error:
            raise OptionError(
                f"{where}: its block failed on a tensor of shape {shape}: {error!r}"
            ) from error
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != shape:
            found = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise OptionError(
                f"{where}: its block made {found} of a tensor of shape {shape}, expected the same"
            )
        flops = forward_flops(capture(made.block, x))
    known = {field.name for field in fields(OwnModel)} & {field.name for field in fields(Repeats)}
    sizes = {key: getattr(made, key) for key in known}
    model = OwnModel(name=where, whole=made.first is not None, **sizes)
    return model, 3 * flops // x.shape[1]


@lru_cache
def _counts(where: str, tp: int, expert_ranks: int) -> Mapping[str, int]:
    """Parameters of a block on one rank, by name."""
    with fake_groups(tp * expert_ranks, tp, expert_ranks) as (*groups, _), FakeTensorMode():
        block = _made(where, *groups).block
        return {name: parameter.numel() for name, parameter in block.named_parameters()}
