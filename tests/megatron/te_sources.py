"""Compare the stand-in for Transformer Engine, and the product's table, with TE's own sources.

    python tests/megatron/te_sources.py FOLDER 2.9  # or 2.18

FOLDER has `transformer_engine/pytorch` in it. Nothing of TE is imported: `ast` reads both. It says
what differs, and ends with 1 if anything does: signatures of classes and functions, attributes that
TE's classes do not have, attributes that TE sets in a forward and the table does not name, and what
the table names and TE does not have.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from overlapc.state import known

OWN = Path(__file__).parent / "te_stand_in" / "transformer_engine" / "pytorch"
CLASSES = {
    "Linear": "module/linear.py",
    "LayerNormLinear": "module/layernorm_linear.py",
    "LayerNormMLP": "module/layernorm_mlp.py",
    "GroupedLinear": "module/grouped_linear.py",
    "DotProductAttention": "attention/dot_product_attention/dot_product_attention.py",
    "RMSNorm": "module/rmsnorm.py",
    "LayerNorm": "module/layernorm.py",
}
BASES = ("module/base.py", "module/_common.py", "ops/op.py")
OPS = ("ops/basic/rmsnorm.py", "ops/basic/layer_norm.py")
FUNCTIONS = {
    "module/base.py": ("get_dummy_wgrad",),
    "attention/rope.py": ("apply_rotary_pos_emb",),
    "permutation.py": (
        *("moe_permute", "moe_permute_with_probs", "moe_unpermute"),
        *("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"),
    ),
}
# Set by options that Megatron does not pass, or outside of a forward.
ELSEWHERE = {
    *("tp_group", "tp_group_initialized", "next_iter_when_debug_should_be_run"),
    *("_output_quantizer_role", "_grad_input_quantizer_role"),
    *("cp_comm_type", "cp_global_ranks", "cp_group", "cp_stream"),
    *("_custom_dpa_local_recipes_cache", "_custom_dpa_local_recipes_cache_key"),
    *("_qkv_capabilities_quantizer", "_qkv_capabilities_cache"),
}
OF_MEGATRON = {"current_max_attn_logits", "kept_packed_seq_params"}
SINCE = {"_is_fsdp2", "debug_enabled_in_this_iteration"}  # in releases behind 2.9


def main() -> int:
    folder, release = Path(sys.argv[1]) / "transformer_engine" / "pytorch", sys.argv[2]
    found = [*signatures(folder, release), *attributes(folder, release), *table(folder, release)]
    print("\n".join(found) or f"nothing differs from {release}")
    return bool(found)


def signatures(folder: Path, release: str) -> Iterator[str]:
    own = _own(release)
    base = _classes([*OWN.rglob("linears.py"), *OWN.rglob("dot_product_attention/__init__.py")])
    for name, file in CLASSES.items():
        theirs = _classes([folder / file])[name]
        for method in ("__init__", "forward"):
            expected = _method(theirs, method)
            mine = _method(own[name], method) or (name in base and _method(base[name], method))
            if expected is not None and _given(mine) != _given(expected):
                yield f"{name}.{method}: {_given(mine)}, expected {_given(expected)}"
    for file, names in FUNCTIONS.items():
        pair = [_functions(where / file) for where in (OWN, folder)]
        if release != "2.9" and file == "permutation.py":
            pair[0] |= _functions(OWN / "later_permutation.py")
        for name in names:
            mine, expected = (_given(each[name]) for each in pair)
            if mine != expected:
                yield f"{name}: {mine}, expected {expected}"


def attributes(folder: Path, release: str) -> Iterator[str]:
    """Those of the stand-in that TE's classes have not."""
    theirs = set[str]()
    for file in (*CLASSES.values(), *BASES, *OPS):
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        theirs |= _set_in(tree, ("setattr", "register_parameter"))
    for name, node in _own(release).items():
        if name in (*CLASSES, "TransformerEngineBaseModule") and (more := _set_in(node) - theirs):
            yield f"{name}: sets {sorted(more)}, which TE's classes do not have"


def table(folder: Path, release: str) -> Iterator[str]:
    """What the product knows, against what TE does."""
    base = _classes([folder / "module/base.py"])["TransformerEngineBaseModule"]
    everywhere = set[str]()
    for path in folder.rglob("*.py"):
        everywhere |= _set_in(ast.parse(path.read_text(encoding="utf-8")))
    for name, each in known.TABLE.items():
        later = set[str]()
        for node in (_classes([folder / CLASSES[name]])[name], base):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            for method in methods:
                if method.name not in ("__init__", "reset_parameters"):
                    later |= _set_in(method)
        of_ops = name in ("RMSNorm", "LayerNorm")
        if (more := later - each.settles - ELSEWHERE) and not of_ops:
            yield f"{name}: TE sets {sorted(more)} in a forward, which the table lacks"
        of_others = OF_MEGATRON if release != "2.9" else OF_MEGATRON | SINCE
        if more := each.settles - everywhere - of_others:
            yield f"{name}: the table has {sorted(more)}, which this release does not set"
    for where, names in known._FUNCTIONS.items():
        file = folder.joinpath(*where.split(".")[2:]).with_suffix(".py")
        if where.startswith(known.PACKAGE):
            text = file.read_text(encoding="utf-8")
            if more := {name for name in names if name not in text}:
                yield f"{where}: the table has {sorted(more)}, which TE has not"


def _own(release: str) -> dict[str, ast.ClassDef]:
    later = OWN / "module" / "later.py"
    found = _classes(path for path in OWN.rglob("*.py") if path != later)
    return found | (_classes([later]) if release != "2.9" else {})


def _classes(files: Iterator[Path] | list[Path]) -> dict[str, ast.ClassDef]:
    found = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
    return found


def _functions(file: Path) -> dict[str, ast.FunctionDef]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    found = (each for each in node.body if isinstance(each, ast.FunctionDef))
    return next((each for each in found if each.name == name), None)


def _given(function: ast.FunctionDef | bool | None) -> list[str]:
    """The names of a function's arguments, with =… where they have a default."""
    if not isinstance(function, ast.FunctionDef):
        return []
    args = function.args
    plain = [each.arg for each in (*args.posonlyargs, *args.args)]
    first = len(plain) - len(args.defaults)
    named = [name + "=" * (i >= first) for i, name in enumerate(plain)]
    return [*named, *(each.arg for each in args.kwonlyargs)]


def _set_in(tree: ast.AST, by: tuple[str, ...] = ("setattr",)) -> set[str]:
    """The attributes of `self` that are set, also by calls such as `fast_setattr`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            sets = getattr(node.func, "attr", "").endswith(by)
            found |= {str(node.args[0].value)} if sets else set()
    return found


if __name__ == "__main__":
    sys.exit(main())
