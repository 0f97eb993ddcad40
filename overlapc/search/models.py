"""A model is shapes of a transformer, by preset or HuggingFace config, or a user's own block
(`search/own.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from overlapc.errors import FileError, OptionError
from overlapc.files import printable, read_json

if TYPE_CHECKING:
    from overlapc.search.own import OwnModel


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
    kv_heads: int = 0  # 0: as many as heads
    gated: bool = False  # SwiGLU and RMSNorm, as Llama has them
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    moe_every: int = 1
    unfused: str = ""  # of attention, softmax, norm: what its framework runs op by op
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
        if self.width % self.heads or (self.kv_heads and self.heads % self.kv_heads):
            raise OptionError(
                f"model {self.name}: width {self.width}, heads {self.heads}, kv_heads "
                f"{self.kv_heads}: expected each to divide the one before"
            )
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_width > 0):
            raise OptionError(
                f"model {self.name}: {self.experts} experts, top_k {self.top_k}, expert_width "
                f"{self.expert_width}: expected 1 to {self.experts} for top_k, and a width"
            )

    @property
    def whole(self) -> bool:
        return False  # its ends are not those of a user's module

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def moe_layers(self) -> int:
        return self.layers // self.moe_every if self.experts else 0

    @property
    def period(self) -> int:
        """After how many blocks the kinds of block repeat."""
        return self.moe_every if self.experts else 1

    @property
    def attention_parameters(self) -> int:
        return 2 * self.width * self.width + 2 * self.width * self.kv_width

    @property
    def norm_parameters(self) -> int:
        return self.width * (1 if self.gated else 2)

    def mlp_parameters(self, inner: int) -> int:
        return (3 if self.gated else 2) * self.width * inner

    def splits(self, tp: int) -> bool:
        """Whether so many tensor-parallel ranks each get a whole part of everything."""
        if self.kv_heads and self.kv_heads % tp and tp % self.kv_heads:
            return False
        return not (self.heads % tp or self.vocab % tp or self.ffn % tp)

    def held(self, layers: int, tp: int, expert_ranks: int) -> tuple[int, int]:
        """(dense, of experts) parameters of so many layers on one rank."""
        moe = layers // self.period if self.experts else 0
        dense = layers * (self.attention_parameters // tp + 2 * self.norm_parameters)
        dense += (layers - moe) * self.mlp_parameters(self.ffn) // tp
        dense += moe * self.experts * self.width
        here = moe * (self.experts // expert_ranks)
        return dense, here * self.mlp_parameters(self.expert_width)

    def hint(self) -> str:
        """Says in an error what the model's layouts must obey."""
        return (
            f"a tp that divides a node, {self.heads} heads, {self.ffn} hidden units and "
            f"{self.vocab} words"
        )

    def shares_sequence(self, tp: int) -> bool:
        """Whether so many ranks can each have a part of a sequence between the matrices."""
        return tp > 1 and self.seq % tp == 0

    def blocks(self, count: int, tensor: Any, expert: Any, sequence: bool = False) -> Any:
        """Make the first so many blocks, as modules of one rank in these process groups."""
        from overlapc.search.modules import Blocks

        return Blocks(self, count, tensor, expert, sequence)

    def parameters(self) -> int:
        """How many parameters the whole model has."""
        dense = self.layers - self.moe_layers
        blocks = self.layers * (self.attention_parameters + 2 * self.norm_parameters)
        blocks += dense * self.mlp_parameters(self.ffn)
        experts = self.experts * (self.mlp_parameters(self.expert_width) + self.width)
        ends = self.vocab * self.width * (1 if self.tied else 2) + self.norm_parameters
        return blocks + self.moe_layers * experts + ends

    def flops_per_token(self) -> int:
        """Flops of forward and backward, without recompute, as MFU counts them: six for each weight
        of a matrix that a token meets, and attention without a mask."""
        dense = self.layers - self.moe_layers
        met = self.layers * self.attention_parameters + dense * self.mlp_parameters(self.ffn)
        routed = self.top_k * self.mlp_parameters(self.expert_width) + self.experts * self.width
        met += self.moe_layers * routed + self.vocab * self.width
        return 6 * met + 12 * self.layers * self.width * self.seq


Model: TypeAlias = "Transformer | OwnModel"


def _gpt(name: str, layers: int, width: int, heads: int, source: str) -> Transformer:
    return Transformer(name, layers, width, heads, 4 * width, 51200, 2048, source=source)


def _llama(name: str, layers: int, width: int, heads: int, ffn: int, **more: Any) -> Transformer:
    source = more.pop("source", "Llama 2's config.json")
    more = {"vocab": 32000, "seq": 4096, "gated": True} | more
    return Transformer(name, layers, width, heads, ffn, source=source, **more)


_LYNX = "shape as Lynx (2024) gives or implies it; vocabulary padded as Megatron does"
_MEGATRON = "Narayanan et al. 2021; vocabulary padded as Megatron does"
_LANCET = "shape as Lancet (2024) gives or implies it; 16 ranks of two experts"

PRESETS = {
    model.name: model
    for model in (
        _gpt("gpt-1.3b", 24, 2048, 16, _LYNX),
        _gpt("gpt-4.7b", 40, 3072, 24, _LYNX),
        _gpt("gpt-7b", 32, 4096, 32, _LYNX),
        _gpt("gpt-13b", 40, 5120, 40, _LYNX),
        _gpt("gpt-20b", 44, 6144, 48, _LYNX),
        _gpt("gpt-23b", 50, 6144, 48, _LYNX),
        _gpt("gpt-175b", 96, 12288, 96, _MEGATRON),
        _llama("llama-7b", 32, 4096, 32, 11008),
        _llama("llama-13b", 40, 5120, 40, 13824),
        _llama("llama-70b", 80, 8192, 64, 28672, kv_heads=8),
        _llama(
            "mixtral-8x7b", 32, 4096, 32, 14336, kv_heads=8, experts=8, top_k=2,
            expert_width=14336, source="Mixtral 8x7B's config.json",
        ),
        Transformer(
            "lancet-s", 12, 768, 12, 3072, 50304, 512, experts=32, top_k=1, expert_width=3072,
            moe_every=2, source=_LANCET,
        ),
        Transformer(
            "lancet-l", 24, 1024, 16, 4096, 50304, 512, experts=32, top_k=1, expert_width=4096,
            moe_every=2, source=_LANCET,
        ),
        _llama(
            "deepseek-like", 28, 2048, 16, 10944, vocab=102400, experts=64, top_k=6,
            expert_width=1408, source="DeepSeekMoE 16B's shape without its shared experts",
        ),
    )
}  # fmt: skip


def find_model(name: str) -> Model:
    """Find a preset by name, or the model of a HuggingFace `config.json` or "module:function"."""
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" and ":" in name:
        from overlapc.search.own import OwnModel

        return OwnModel.find(name)
    if path.suffix != ".json":
        raise OptionError(
            f"model {name!r}: expected a preset ({', '.join(PRESETS)}), a config.json, or "
            "module:function of your own"
        )
    return from_config(path)


_PADDED = 128  # to a multiple of which Megatron pads vocabularies
# our name -> what HuggingFace's families call it
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx"),
}


_GATED = ("silu", "swiglu", "geglu")
_GATED_TYPES = ("gemma", "gemma2", "gemma3", "gemma3_text")  # whatever their activation is called
_TIED_TYPES = ("gpt2", "gemma", "gemma2", "gemma3", "gemma3_text", "bloom", "opt")
# What changes the model's size or work and has no counterpart here, with values that change nothing
_UNKNOWN = {
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "kv_lora_rank": 0,
}


def _named(path: Path) -> str:
    """A config by its file, or by its folder where every file has that name."""
    called = path.resolve().parent.name if path.stem == "config" else path.stem
    return printable(called) or "model"


def from_config(path: str | Path) -> Transformer:
    """Read the model that a HuggingFace `config.json` describes, its vocabulary padded as Megatron
    does."""
    name, path = _named(Path(path)), Path(path)
    shown = printable(str(path))
    try:
        found = read_json(path, "config")
    except FileError as error:
        raise FileError(f"{error}; expected a HuggingFace config.json") from None
    if not isinstance(found, dict):
        raise FileError(f"{shown}: found {type(found).__name__}, expected a JSON object")

    def number(key: str, *names: str, default: int | None = None) -> int:
        for name in names:
            value = found.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
                raise FileError(f"{shown}: {name} is {value!r}, expected a number")
            return value
        if default is None:
            raise FileError(f"{shown}: no {' or '.join(names)}, expected the model's {key}")
        return default

    for key, harmless in _UNKNOWN.items():
        if found.get(key) not in (None, harmless):
            raise FileError(
                f"{shown}: {key} is {found[key]!r}, which the search has no model of; expected "
                "none: without that line it is a model near yours that is searched"
            )
    known = {key: number(key, *names) for key, names in _NAMES.items()}
    head = number("head width", "head_dim", default=0)
    if head and head * known["heads"] != known["width"]:
        raise FileError(
            f"{shown}: {known['heads']} heads of {head} are not the width, {known['width']}; the "
            "search has no model of that: without head_dim it is a model near yours"
        )
    known["vocab"] += -known["vocab"] % _PADDED
    kind = str(found.get("model_type") or "")
    experts = number("experts", "num_local_experts", "n_routed_experts", "num_experts", default=0)
    ffn = number("ffn", "intermediate_size", "n_inner", "ffn_dim", default=4 * known["width"])
    model = Transformer(
        name,
        ffn=ffn,
        kv_heads=number(
            "kv_heads",
            "num_key_value_heads",
            "num_kv_heads",
            default=1 if found.get("multi_query") is True else 0,
        ),
        gated=str(found.get("hidden_act", "")) in _GATED or kind in _GATED_TYPES,
        tied=bool(found.get("tie_word_embeddings", kind in _TIED_TYPES)),
        experts=experts,
        top_k=number("top_k", "num_experts_per_tok", default=2 if experts else 0),
        expert_width=number("expert width", "moe_intermediate_size", default=ffn) if experts else 0,
        source=shown,
        **known,
    )
    return replace(model, seq=min(model.seq, 8192)) if model.seq > 8192 else model
