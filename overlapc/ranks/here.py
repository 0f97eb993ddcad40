"""Where a rank is: the line of its script, and the collective it waits in."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import CodeType
from typing import Any

from overlapc.tools.frames import calls_of, local

_OVERLAPC = str(Path(__file__).parents[1]) + "/"
_LIBRARIES = (*{sysconfig.get_path(name) + "/" for name in ("stdlib", "purelib", "platlib")}, "<")
_C10D = "/torch/distributed/distributed_c10d.py"
# Parts of torch in which a rank does not wait for another, however long it takes.
_ALONE = ("/torch/utils/data/", "/torch/serialization.py", "/torch/distributed/checkpoint/")
_TO_ONE = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list")


def place_of(thread: int) -> dict[str, Any]:
    """What the thread does now.

    at          the line of the script, and its function
    within      the collective of torch.distributed that it is in, and `group`, that one's name
    computes    is it in torch, in a graph, or in overlapc, where a collective may hold it?
    """
    calls = calls_of(thread)
    if not calls:
        return {"at": "an unknown place", "within": "", "group": None, "computes": False}
    files = [code.co_filename for code, _ in calls]
    own = next((i for i, file in enumerate(files) if not _is_library(file)), 0)
    code, line = calls[own]
    within, group = _collective(thread, [code for code, _ in calls])
    return {
        "at": f"{Path(code.co_filename).name}:{line} in {code.co_name}",
        "within": within,
        "group": group,
        "computes": own > 0
        and (("/torch/" in files[0]) or files[0].startswith((_OVERLAPC, "<eval_with_key")))
        and not any(part in file for file in files[:own] for part in _ALONE),
    }


def described(place: dict[str, Any]) -> str:
    """`train.py:31 in load`, `train.py:40 in main, in barrier`."""
    return f"{place['at']}, in {place['within']}" if place["within"] else str(place["at"])


def _is_library(file: str) -> bool:
    return file.startswith((_OVERLAPC, *_LIBRARIES)) or "/site-packages/" in file


def _collective(thread: int, codes: list[CodeType]) -> tuple[str, str | None]:
    """The outermost collective among the calls, and the name of its group ("" is the default)."""
    for depth, code in reversed([*enumerate(codes)]):
        name = code.co_name
        if _C10D in code.co_filename and "group" in code.co_varnames:
            if name.startswith("_") or name in _TO_ONE or name == "new_group":
                return name, None
            group = local(thread, depth, "group")
            return name, "" if group is None else str(getattr(group, "group_name", ""))
    return "", None
