"""A model to search for: the shapes of a transformer, or a user's own block (`own.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from overlapc.core.errors import OptionError

if TYPE_CHECKING:
    from overlapc.search.models.own import OwnModel


_MOST_PARAMETERS = 10**15  # more is a mistake


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal blocks; every `moe_every`-th has experts, if there are any."""

    name: str
    layers: int
    width: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int = 0  # 0: equal to heads
    gated: bool = False  # SwiGLU and RMSNorm, as in Llama
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    moe_every: int = 1
    dense_first: int = 0  # layers without experts, before all others, which have them
    shared_width: int = 0  # width of the experts that every token meets, together
    head_width: int = 0  # 0: the model's width divided by heads
    # Latent attention: queries, and keys and values, are made by two thin matrices one after the
    # other. `head_width` is then the width of a key without its rotary part.
    q_rank: int = 0  # 0: queries are made by one matrix
    kv_rank: int = 0  # 0: no latent attention
    rope_width: int = 0
    value_width: int = 0
    head_norms: bool = False  # norms of queries and keys
    post_norms: bool = False  # norms of the results of attention and MLP
    layer_extra: int = 0  # a layer's parameters that are no matrix: biases, sinks
    expert_extra: int = 0  # more parameters of a layer with experts
    positions: int = 0  # rows of a table of positions that is learned
    unfused: str = ""  # which of attention, softmax, norm, loss, bias run op by op
    fused_gate: bool = False  # one kernel gates, which keeps what it reads and nothing else
    dropout: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "ffn", "vocab", "seq", "moe_every"):
            value = getattr(self, name)
            most = 10_000 if name == "layers" else 1 << 32
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise OptionError(
                    f"model {self.name}: {name}={value!r}, expected a whole number from 1 to {most}"
                )
        divided = self.head_width or self.width % self.heads == 0
        if not divided or (self.kv_heads and self.heads % self.kv_heads):
            raise OptionError(
                f"model {self.name}: width {self.width}, heads {self.heads}, kv_heads "
                f"{self.kv_heads}: expected each to divide the one before"
            )
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_width > 0):
            raise OptionError(
                f"model {self.name}: {self.experts} experts, top_k {self.top_k}, expert_width "
                f"{self.expert_width}: expected 1 to {self.experts} for top_k, and 1 or more for "
                "expert_width"
            )

        if self.parameters() > _MOST_PARAMETERS:
            raise OptionError(
                f"model {self.name}: {self.parameters():,} parameters, expected "
                f"{_MOST_PARAMETERS:,} at most: is one of its sizes wrong?"
            )

    @property
    def whole(self) -> bool:
        return False  # its ends are not those of a user's module

    @property
    def head(self) -> int:
        """The width of a head's query."""
        return (self.head_width or self.width // self.heads) + self.rope_width

    @property
    def moe_layers(self) -> int:
        behind = max(0, self.layers - self.dense_first)
        return behind // self.moe_every if self.experts else 0

    @property
    def of_first(self) -> Transformer | None:
        """The first layers, if they have no experts and others have."""
        if not (self.experts and self.dense_first):
            return None
        none = replace(self, experts=0, top_k=0, expert_width=0, shared_width=0, dense_first=0)
        return replace(none, layers=self.dense_first)

    @property
    def period(self) -> int:
        """The number of blocks after which the kinds of block repeat."""
        return self.moe_every if self.experts else 1

    @property
    def attention_parameters(self) -> int:
        """Parameters of attention's matrices that tensor-parallel ranks divide."""
        queries = self.heads * self.head
        if not self.kv_rank:
            kv = (self.kv_heads or self.heads) * self.head
            return self.width * (2 * queries + 2 * kv)
        given = self.heads * (self.head_width + self.value_width)
        out = self.heads * self.value_width * self.width
        return (self.q_rank or self.width) * queries + self.kv_rank * given + out

    @property
    def thin_parameters(self) -> int:
        """Parameters of latent attention's first matrices, which every rank has whole."""
        return self.width * (self.q_rank + self.kv_rank + self.rope_width) if self.kv_rank else 0

    @property
    def norm_parameters(self) -> int:
        return self.width * (1 if self.gated else 2)

    @property
    def position_parameters(self) -> int:
        """Parameters of the first stage beside its words, which every rank has whole."""
        return self.positions * self.width

    @property
    def small_parameters(self) -> int:
        """Parameters of a layer's norms, and others that are no matrices."""
        norms = self.norm_parameters * (4 if self.post_norms else 2)
        norms += 2 * self.head if self.head_norms else 0
        return norms + (self.q_rank + self.kv_rank if self.kv_rank else 0) + self.layer_extra

    @property
    def expert_bias(self) -> int:
        """Parameters of an expert that are no matrix."""
        return self.expert_extra // max(1, self.experts)

    def mlp_parameters(self, inner: int) -> int:
        return (3 if self.gated else 2) * self.width * inner

    @property
    def gate_parameters(self) -> int:
        """Parameters of the router and the shared experts of a layer with experts."""
        router = self.experts * self.width + self.expert_extra
        return router + self.mlp_parameters(self.shared_width)

    def splits(self, tp: int) -> bool:
        """Can so many tensor-parallel ranks divide everything evenly?"""
        if self.kv_heads and self.kv_heads % tp and tp % self.kv_heads:
            return False
        if self.shared_width % tp:
            return False
        return not (self.heads % tp or self.vocab % tp or self.ffn % tp)

    def splits_experts(self, tp: int) -> bool:
        """Can so many ranks divide each expert's matrices evenly?"""
        return self.experts > 0 and self.expert_width % tp == 0

    def held(
        self, layers: int, tp: int, expert_ranks: int, dense_first: int = 0, etp: int = 1
    ) -> tuple[int, int]:
        """(dense, of experts) parameters of so many layers on one rank, the first of them without
        experts."""
        moe = (layers - dense_first) // self.period if self.experts else 0
        each = self.attention_parameters // tp + self.thin_parameters + self.small_parameters
        dense = layers * each + (layers - moe) * self.mlp_parameters(self.ffn) // tp
        bias = self.expert_bias
        dense += moe * (self.experts * (self.width - bias) + self.expert_extra)
        dense += moe * self.mlp_parameters(self.shared_width) // tp
        here = moe * (self.experts // expert_ranks)
        return dense, here * (self.mlp_parameters(self.expert_width) // etp + bias)

    def hint(self) -> str:
        """For errors: the conditions on the model's layouts."""
        return (
            f"a tp that divides a node, {self.heads} heads, {self.ffn} hidden units and "
            f"{self.vocab} words"
        )

    def shares_sequence(self, tp: int, cp: int = 1) -> bool:
        """Can so many ranks divide sequences between the matrices, each of which is one of `cp`
        parts already?"""
        return tp > 1 and self.seq // cp % tp == 0

    def splits_sequence(self, cp: int) -> bool:
        """Can so many ranks divide sequences everywhere? Each has two pieces, one from the begin
        and one from the end, so that all have as many scores under the causal mask."""
        return cp == 1 or (self.seq % (2 * cp) == 0 and "attention" not in self.unfused.split())

    def splits_heads(self, ranks: int) -> bool:
        """Can so many ranks each attend with a part of all heads? Transformer Engine cannot with
        latent attention."""
        each = self.heads, self.kv_heads or self.heads
        return not self.kv_rank and all(heads % ranks == 0 for heads in each)

    def scales(self, words: int) -> bool:
        """Are all of a rank's sizes in proportion to its sequences, each of so many words? Experts
        take equal numbers of words, rounded down."""
        return not self.experts or words * self.top_k % self.experts == 0

    def blocks(
        self,
        count: int,
        tensor: Any,
        expert: Any,
        sequence: bool = False,
        context: Any = None,
        shares_experts: bool = False,
    ) -> Any:
        """Make the first `count` blocks, as modules of one rank in these process groups."""
        from overlapc.search.models.modules import Blocks

        return Blocks(self, count, tensor, expert, sequence, context, shares_experts)

    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        dense = self.layers - self.moe_layers
        each = self.attention_parameters + self.thin_parameters + self.small_parameters
        blocks = self.layers * each + dense * self.mlp_parameters(self.ffn)
        experts = self.experts * self.mlp_parameters(self.expert_width) + self.gate_parameters
        ends = self.vocab * self.width * (1 if self.tied else 2) + self.norm_parameters
        return blocks + self.moe_layers * experts + ends + self.position_parameters

    def flops_per_token(self) -> int:
        """Flops of forward and backward, without recompute, as MFU counts them: six for each weight
        of a matrix that a token meets, and attention without a mask."""
        dense = self.layers - self.moe_layers
        met = self.layers * (self.attention_parameters + self.thin_parameters)
        met += dense * self.mlp_parameters(self.ffn)
        routed = self.top_k * self.mlp_parameters(self.expert_width) + self.gate_parameters
        met += self.moe_layers * routed + self.vocab * self.width
        mixed = self.heads * (self.head + (self.value_width or self.head))
        return 6 * met + 6 * self.layers * mixed * self.seq


Model: TypeAlias = "Transformer | OwnModel"
