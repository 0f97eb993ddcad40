"""Compare the stand-ins for DeepEP and mamba-ssm with their own sources.

    python tests/megatron/stand_in_sources.py FILE...

of DeepEP `buffers/legacy.py` (or `buffer.py` and `hybrid_ep_buffer.py` of its branch hybrid-ep), of
mamba-ssm `ssd_combined.py` and `layernorm_gated.py`. Nothing of them is imported: `ast` reads both.
It says what differs, and ends with 1 if anything does: a method that a class of these files lacks,
arguments in another order or of other defaults. What a stand-in leaves out, as Megatron does not
pass it, is no difference.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

OWN = Path(__file__).parent / "stand_ins"
Signatures = dict[str, dict[str, str]]  # by function: its arguments with their defaults, or ""


def main() -> int:
    theirs = dict(each for path in sys.argv[1:] for each in signatures(Path(path)))
    own = dict(each for path in OWN.rglob("*.py") for each in signatures(path))
    shared = own.keys() & theirs.keys()
    found = [line for name in shared for line in differences(name, own[name], theirs[name])]
    print("\n".join(found) or f"nothing differs in {', '.join(sorted(shared))}")
    return bool(found) or not shared


def differences(name: str, own: Signatures, theirs: Signatures) -> Iterator[str]:
    for function, args in own.items():
        known = theirs.get(function)
        if known is None:
            yield f"{name} has no {function}"
            continue
        expected = [each for each in known if each in args]
        if [*args] != expected:
            yield f"{name} {function}: {[*args]}, expected {expected}"
        for each in expected:
            if args[each] != known[each]:
                yield f"{name} {function}: {each}={args[each]}, expected {known[each]}"


def signatures(path: Path) -> Iterator[tuple[str, Signatures]]:
    """By class, and by function outside of classes, that is not private."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            yield node.name, {each.name: arguments(each) for each in inner}
        elif isinstance(node, ast.FunctionDef) and node.name[0] != "_":
            yield node.name, {"": arguments(node)}


def arguments(function: ast.FunctionDef) -> dict[str, str]:
    plain, named = [*reversed(function.args.args)], function.args.kwonlyargs
    pairs = [*zip_longest(plain, reversed(function.args.defaults))][::-1]
    pairs += zip(named, function.args.kw_defaults, strict=True)
    return {a.arg: ast.unparse(default) if default else "" for a, default in pairs if a}


if __name__ == "__main__":
    sys.exit(main())
