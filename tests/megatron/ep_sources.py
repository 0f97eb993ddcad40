"""Compare the stand-in for DeepEP with DeepEP's own sources.

    python tests/megatron/ep_sources.py FILE...   # its buffer.py, or buffers/legacy.py, and others

Nothing of DeepEP is imported: `ast` reads both. It says what differs, and ends with 1 if anything
does: a method that a class of these files lacks, arguments in another order or of other defaults.
What the stand-in leaves out, as Megatron does not pass it, is no difference.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

OWN = Path(__file__).parent / "ep_stand_in" / "deep_ep" / "__init__.py"


def main() -> int:
    theirs = {name: each for path in sys.argv[1:] for name, each in _classes(Path(path))}
    shared = [(name, own, theirs[name]) for name, own in _classes(OWN) if name in theirs]
    found = [line for name, own, their in shared for line in differences(name, own, their)]
    print("\n".join(found) or f"nothing differs in {', '.join(name for name, *_ in shared)}")
    return bool(found) or not shared


def differences(name: str, own: ast.ClassDef, theirs: ast.ClassDef) -> Iterator[str]:
    known = dict(_methods(theirs))
    for method, args in _methods(own):
        if method not in known:
            yield f"{name}.{method}: DeepEP has none"
            continue
        expected = [each for each in known[method] if each in args]
        if [*args] != expected:
            yield f"{name}.{method}: {[*args]}, expected {expected}"
        for each in expected:
            if args[each] != known[method][each]:
                yield f"{name}.{method}: {each}={args[each]}, expected {known[method][each]}"


def _classes(path: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node


def _methods(node: ast.ClassDef) -> Iterator[tuple[str, dict[str, str]]]:
    """(name, arguments with their defaults, or "" for none)."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            plain, named = [*reversed(each.args.args)], each.args.kwonlyargs
            pairs = [*zip_longest(plain, reversed(each.args.defaults))][::-1]
            pairs += zip(named, each.args.kw_defaults, strict=True)
            yield each.name, {a.arg: ast.unparse(d) if d else "" for a, d in pairs if a}


if __name__ == "__main__":
    sys.exit(main())
