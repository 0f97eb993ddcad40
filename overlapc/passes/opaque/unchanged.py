"""What a module that is tried out may not do, for in a graph it might run twice, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from overlapc.core.errors import CaptureError
from overlapc.passes.opaque.reached import Reached
from overlapc.state.known import known_of, refuse_unserved, settled_by
from overlapc.state.snapshot import names_of, random_restores, restore_of, value_of

SETS = "changes its attribute"


@contextlib.contextmanager
def unchanged(module: nn.Module, lasting: Mapping[str, Tensor], reached: Reached) -> Iterator[None]:
    """Refuse a module if its state changes in the block, or what it reaches, and restore that. What
    layers of Transformer Engine in it settle is no change."""
    for each in module.modules():
        if known_of(each) is not None:
            refuse_unserved(each)
    attributes = {each: dict(vars(each)) for each in module.modules()}
    own = {id(each) for each in (*attributes, *lasting.values())}
    values = [value_of(tensor) for tensor in lasting.values()]
    names = {id(value): name for before in attributes.values() for name, value in before.items()}
    restores = [
        (names.get(number, ""), restore)
        for number, each in reached.objects.items()
        if number not in own and (restore := restore_of(each)) is not None
    ]
    restores += [("", names_of(*each)) for each in reached.globals.values()]
    numbers = random_restores()
    try:
        yield
    finally:
        changed = []
        for each, before in attributes.items():
            now = vars(each)
            settled = settled_by(each)
            changed += [
                name
                for name in now
                if name not in settled and before.get(name, now) is not now[name]
            ]
            now.clear()
            now.update(before)
        written = [restore() for restore in values]
        held = [name for name, restore in restores if restore()]
        changed += filter(None, held)
        drawn = [restore() for restore in numbers]
    if any(drawn):
        raise CaptureError("it draws from Python's or NumPy's random, and might run twice")
    if changed:
        raise CaptureError(f"it {SETS} {changed[0]!r}, and might run twice")
    if any(written):
        raise CaptureError("it changes a parameter or buffer, and might run twice")
    if held:
        raise CaptureError("it changes what it holds, or what its code names, and might run twice")
