"""`from_config` makes a model of a HuggingFace `config.json`.

A field that changes a model's size or work and has no counterpart in `Transformer` is an error that
names it. Fields that change only the work, and only a little, are named in the model's source
instead: windows of attention are planned as whole sequences, and heads that predict further tokens
are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapc.core.errors import FileError
from overlapc.core.files import printable, read_json
from overlapc.search.models import families
from overlapc.search.models.transformer import Transformer

_PADDED = 128  # Megatron pads vocabularies to a multiple of it
_LONGEST = 8192  # default sequence length, even if the model could take more
# our name -> HuggingFace's names
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"),
}
# Fields without a counterpart here, with the values at which they change nothing
_UNKNOWN: dict[str, Any] = {
    "ffn_config": None,
    "layer_pattern": None,
    "hybrid_override_pattern": None,
    "ssm_cfg": None,
    "ssm_state_size": None,
    "state_size": None,
    "mamba_d_state": None,
    "linear_num_key_heads": None,
    "index_topk": None,
    "hc_mult": None,
    "altup_num_inputs": None,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "cross_attention_layers": None,
    "is_encoder_decoder": False,
    "moe_layer_freq": 1,
    "moe_layer_frequency": 1,
    "moe_layers_enum": None,
    "parallel_attn_mlp_res": False,
    "zero_expert_num": 0,
    "block_types": None,
    "block_configs": None,
    "linear_attn_config": None,
    "use_cla": False,
    "global_head_dim": None,
    "index_n_heads": None,
    "H_cycles": None,
    "num_layers_per_stack": None,
    "gating": False,
    "per_layer_config": {},
}
_NEVER_ZERO = ("head_dim", "kv_channels")  # which a file may leave out
# Parts of a model beside its text model
_OTHERS = ("vision_config", "audio_config", "audio_encoder_config")


def from_config(path: str | Path, seq: int = 0) -> Transformer:
    """Read the model of a `config.json`, with its vocabulary padded as by Megatron. For a model of
    text and pictures this is the text model. `seq` is taken where the file names no length of
    sequences."""
    path = Path(path)
    shown = printable(str(path))
    try:
        found = read_json(path, "config", finite=False)  # a limit of time steps may be Infinity
    except FileError as error:
        raise FileError(f"{error}; expected a HuggingFace config.json") from None
    if not isinstance(found, dict):
        raise FileError(f"{shown}: found {type(found).__name__}, expected a JSON object")
    notes = []
    if found.get("text_config") is not None:
        if not isinstance(found["text_config"], dict):
            kind = type(found["text_config"]).__name__
            raise FileError(f"{shown}: text_config is a {kind}, expected a JSON object")
        outer = {key: value for key, value in found.items() if key == "tie_word_embeddings"}
        found = outer | found["text_config"]
        notes.append("its text model alone")
    kind = _text(shown, found, "model_type")
    given = families.DEFAULTS.get(kind, {}) | found
    if seq and all(given.get(name) is None for name in _NAMES["seq"]):
        given |= {_NAMES["seq"][0]: seq}
    config = _Config(shown, given, kind)
    config.refuse_unknown()
    shape = config.ends() | config.attention() | config.experts() | config.small()
    notes += config.left_out()
    return Transformer(_named(path), source="; ".join((shown, *notes)), **shape)


def _named(path: Path) -> str:
    """The name of a model: its file's, or its folder's if the file is called `config.json`."""
    called = path.resolve().parent.name if path.stem == "config" else path.stem
    return printable(called) or "model"


def _text(shown: str, found: Mapping[str, Any], *names: str) -> str:
    """The text that the file has under the first of these names that is there; or none."""
    name = next((name for name in names if name in found), names[0])
    value = found.get(name)
    if value is not None and not isinstance(value, str):
        raise FileError(f"{shown}: {name} is {value!r:.40}, expected a text")
    return value or ""


@dataclass(frozen=True)
class _Config:
    shown: str
    found: Mapping[str, Any]
    kind: str  # the model family

    def refuse_unknown(self) -> None:
        self.refuse_family()
        for key, harmless in _UNKNOWN.items():
            if self.found.get(key) not in (None, harmless):
                raise FileError(
                    f"{self.shown}: {key} is {self.found[key]!r}, which the search has no model "
                    "of; expected none: without that line the search is of a model near yours"
                )
        values, keys = self.found.get("v_head_dim"), self.found.get("head_dim")
        if not self.found.get("kv_lora_rank") and keys and values not in (None, keys):
            raise FileError(
                f"{self.shown}: v_head_dim is {values!r} beside a head_dim of {keys!r}, which the "
                "search has a model of in latent attention alone; expected the same"
            )
        mixed = self.found.get("attn_type_list") or []  # MiniMax's: 1 is softmax's
        if mixed and not (isinstance(mixed, list) and set(map(str, mixed)) == {"1"}):
            raise FileError(
                f"{self.shown}: attn_type_list has layers of another attention than softmax's (1), "
                "which the search has no model of; expected none"
            )
        self.refuse_layers()

    def refuse_family(self) -> None:
        if self.kind in families.ENCODERS:
            raise FileError(f"{self.shown}: model_type is {self.kind!r}; expected a decoder")
        if self.kind in families.REFUSED:
            raise FileError(
                f"{self.shown}: model_type is {self.kind!r}, which has "
                f"{families.REFUSED[self.kind]}, which the search has no model of; expected none"
            )

    def refuse_layers(self) -> None:
        kinds = self.found.get("layer_types")
        if kinds is None:
            return
        if not isinstance(kinds, list):
            raise FileError(
                f"{self.shown}: layer_types is {kinds!r:.40}, expected a list of the kinds of "
                "all layers"
            )
        for kind in kinds:
            if kind not in families.ATTENTIONS:
                raise FileError(
                    f"{self.shown}: layer_types has {kind!r}, which the search has no model of; "
                    f"expected some of {', '.join(families.ATTENTIONS)}"
                )
        layers = self.number("layers", *_NAMES["layers"])
        if len(kinds) < layers:
            raise FileError(
                f"{self.shown}: layer_types has {len(kinds)} entries for {layers} layers, expected "
                "one for each"
            )

    def number(self, key: str, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.found.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
                told = f"{name} is {value!r:.40}, expected a whole number below 2^40"
                raise FileError(f"{self.shown}: {told}")
            if value == 0 and (default is None or name in _NEVER_ZERO):
                raise FileError(f"{self.shown}: {name} is 0, expected a number from 1 on")
            return value
        if default is None:
            what = "length of sequences; say it with --seq" if key == "seq" else key
            raise FileError(f"{self.shown}: no {' or '.join(names)}, expected the model's {what}")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.found.get(name)
        if value is not None and not isinstance(value, bool):
            found = f"{value!r:.40}"
            raise FileError(f"{self.shown}: {name} is {found}, expected true or false")
        return default if value is None else value

    def ends(self) -> dict[str, Any]:
        shape: dict[str, Any] = {key: self.number(key, *names) for key, names in _NAMES.items()}
        shape["vocab"] += -shape["vocab"] % _PADDED
        shape["seq"] = min(shape["seq"], _LONGEST)
        names = (
            "intermediate_size_mlp",
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
        )
        shape["ffn"] = self.number("ffn", *names, default=4 * shape["width"])
        act = _text(self.shown, self.found, "hidden_act", "hidden_activation")
        if act and act not in (*families.GATED, *families.NOT_GATED):
            known = ", ".join((*families.GATED, *families.NOT_GATED))
            raise FileError(f"{self.shown}: the activation is {act!r}, expected one of {known}")
        shape["gated"] = act in families.GATED or self.kind in families.GATED_TYPES
        if self.guesses_gate(act):
            shape["gated"] = True
        shape["tied"] = self.flag("tie_word_embeddings", self.kind in families.TIED_TYPES)
        if self.kind in families.POSITIONS:
            rows = self.number("seq", *_NAMES["seq"])
            shape["positions"] = rows + families.POSITIONS[self.kind]
        return shape

    def guesses_gate(self, act: str = "") -> bool:
        """Is nothing known of the MLP's gate: neither the activation nor the family? Decoders of
        the last years have one."""
        known = (*families.GATED_TYPES, *families.COMPARED, *families.TIED_TYPES)
        named = act or _text(self.shown, self.found, "hidden_act", "hidden_activation")
        return not named and self.kind not in known

    def attention(self) -> dict[str, Any]:
        heads, width = (self.number(key, *_NAMES[key]) for key in ("heads", "width"))
        if self.number("latent rank", "kv_lora_rank", default=0):
            return {
                "q_rank": self.number("queries' rank", "q_lora_rank", default=0),
                "kv_rank": self.number("keys' rank", "kv_lora_rank"),
                "head_width": self.number("key width", "qk_nope_head_dim"),
                "rope_width": self.number("turning width", "qk_rope_head_dim"),
                "value_width": self.number("value width", "v_head_dim"),
            }
        one = self.flag("multi_query")
        names = "num_key_value_heads", "num_kv_heads", "multi_query_group_num"
        counted = any(self.found.get(name) is not None for name in names)
        kv_heads = self.number("kv_heads", *names) if counted else int(one)
        if one and self.kind == "falcon" and not self.flag("new_decoder_architecture"):
            kv_heads = 1  # whatever num_kv_heads is, in its family's code
        head = self.number("head width", "head_dim", "kv_channels", default=0)
        return {
            "kv_heads": kv_heads,
            "head_width": 0 if head * heads == width else head,
            "head_norms": self.kind in families.HEAD_NORMS or self.flag("use_qk_norm"),
            "post_norms": self.kind in families.POST_NORMS,
        }

    def experts(self) -> dict[str, Any]:
        experts = self.number(
            "experts",
            "num_local_experts",
            "n_routed_experts",
            "num_experts",
            "moe_num_experts",
            default=0,
        )
        if not experts:
            self.refuse_other_experts()
            return {}
        ffn = self.ends()["ffn"]
        of_one = self.number("expert width", "moe_intermediate_size", default=0)
        if not of_one:
            of_one = self.number("expert width", "intermediate_size", default=ffn)
        each = self.number(
            "shared experts",
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
            default=0,
        )
        shared = self.number("shared", "shared_expert_intermediate_size", default=each * of_one)
        step = "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"
        without = self.found.get("mlp_only_layers")
        without = [] if without is None else without
        if not isinstance(without, list) or without != list(range(len(without))):
            raise FileError(
                f"{self.shown}: mlp_only_layers is {without!r}, which the search has no model of; "
                "expected the first layers, as in [0, 1]"
            )
        sparse = max(1, self.number("step of experts", *step, default=1))
        layers = self.number("layers", *_NAMES["layers"])
        first = self.first_dense(layers, len(without))
        if first + sparse > layers:
            raise FileError(
                f"{self.shown}: of {layers} layers none has one of its {experts} experts: found "
                f"{first} first layers without them, and one in {sparse} of the others with them; "
                "expected fewer first layers, or more with experts"
            )
        return {
            "experts": experts,
            "top_k": self.number("top_k", "num_experts_per_tok", "moe_topk", "moe_k", default=2),
            "expert_width": of_one,
            "moe_every": sparse,
            "dense_first": first,
            "shared_width": of_one if self.kind == "llama4_text" else shared,
        }

    def first_dense(self, layers: int, default: int) -> int:
        """The number of first layers without experts."""
        last = self.found.get("moe_layer_end_index")
        if last not in (None, -1, layers - 1):
            raise FileError(
                f"{self.shown}: moe_layer_end_index is {last!r}, which the search has no model of; "
                f"expected the last of {layers} layers, -1"
            )
        first = self.number(
            "first layers",
            "first_k_dense_replace",
            "num_dense_layers",
            "moe_layer_start_index",
            default=default,
        )
        kinds = self.found.get("mlp_layer_types")
        if not isinstance(kinds, list):
            return first
        first = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if any(kind != "sparse" for kind in kinds[first:]):
            raise FileError(
                f"{self.shown}: mlp_layer_types has other kinds behind its first sparse layer, "
                "which the search has no model of; expected dense layers, then sparse ones"
            )
        return first

    def refuse_other_experts(self) -> None:
        """Raise FileError if experts have names that are not known here: no model with experts is
        taken for one without."""
        for key, value in self.found.items():
            if "num_experts" in key and "per_tok" not in key and value not in (None, 0, 1):
                raise FileError(
                    f"{self.shown}: {key} is {value!r}, which the search does not read; expected "
                    "num_local_experts, n_routed_experts or num_experts"
                )

    def small(self) -> dict[str, Any]:
        """Parameters that are no matrices: biases, and a family's own."""
        given = {**self.ends(), **self.attention(), **self.experts()}
        heads, width, experts = given["heads"], given["width"], given.get("experts", 0)
        if given.get("kv_rank"):
            score = "topk_method", "noaux_tc"
            return {"expert_extra": experts if self.found.get(score[0]) == score[1] else 0}
        head = given["head_width"] or width // heads
        rows = (heads + 2 * (given["kv_heads"] or heads)) * head
        every = self.flag("attention_bias")
        biases = rows if every or self.kind in families.QKV_BIASES else 0
        extra = {"layer_extra": biases, "expert_extra": 0}
        if self.kind == "llama4_text":  # its norms of heads have no weights
            extra["layer_extra"] -= 2 * head if given["head_norms"] else 0
        if self.kind == "gpt_oss":  # sinks, and biases of everything
            extra["layer_extra"] += heads + width
            extra["expert_extra"] = experts * (1 + 2 * given["expert_width"] + width)
        elif self.kind in ("gpt2", "opt", "bloom"):
            extra["layer_extra"] = rows + 2 * width + given["ffn"]
        elif self.kind in families.ROUTER_BIASES:
            extra["expert_extra"] = experts
        elif self.kind == "qwen2_moe":
            extra["expert_extra"] = width  # the shared expert's gate
        return extra

    def left_out(self) -> list[str]:
        notes = []
        if self.guesses_gate():
            notes.append(
                "guessed: its MLP has a gate (SwiGLU), since the file names no hidden_act and its "
                'family is unknown; without one it says "hidden_act": "gelu"'
            )
        window = self.found.get("sliding_window")
        if window and self.found.get("use_sliding_window") is not False:
            notes.append(f"its windows of {window} tokens are planned as whole sequences")
        if self.found.get("num_nextn_predict_layers") or self.found.get("num_mtp_modules"):
            notes.append("without its heads that predict further tokens")
        if other := [key for key in _OTHERS if isinstance(self.found.get(key), dict)]:
            notes.append(f"without what its {' and '.join(other)} describes")
        if self.kind not in families.COMPARED:
            family = printable(self.kind) or "which its file does not name"
            notes.append(
                f"its family, {family}, is taken for a plain decoder: parameters were not compared "
                "with those of its code"
            )
        return notes
