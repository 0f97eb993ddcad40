"""What Dynamo says of a function that it cannot trace, as a CaptureError."""

from __future__ import annotations

import re
from pathlib import Path
from traceback import extract_tb

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from overlapc.core.errors import CaptureError
from overlapc.passes.capture.model_files import is_models

_CONTEXT = "Developer debug context:"  # marks the details in Dynamo's errors
_RAISED = "Observed exception"  # Dynamo's words for what a function raises
_GOT = re.compile(r"with fake tensors: .*: got (.*)")  # ... and for what an op raises
# Dynamo's words for what training code often does, and a user's.
_BY_VALUE = "Python looks at a value of a tensor (data-dependent: `.item()`, `if` of a tensor)"
_IN_WORDS = {
    "builtin print": "it calls print",
    "Module-level backwards hooks": "a module has a full backward hook",
    "Could not guard on data-dependent": _BY_VALUE,
    "Tensor.tolist() with non-integer": _BY_VALUE,
}
# PyTorch's words for a kernel, of an extension say, that is given a tensor without values.
_OF_KERNELS = ("FunctionalTensor on its own", "data pointer of Tensor")


class Raised(CaptureError):
    """The function itself raises when it is traced."""


class SwitchedOff(CaptureError):
    """Dynamo traces nothing now; it may at the next call."""


def refuse_switched_off() -> None:
    """Raise where Dynamo would run a function instead of tracing it."""
    stance = getattr(torch._dynamo.eval_frame, "_stance", None)
    if dynamo_config.disable or getattr(stance, "stance", "") == "force_eager":
        raise SwitchedOff("torch.compile is switched off")
    for mode in _get_current_dispatch_mode_stack():
        if not mode.is_infra_mode() and not mode.ignore_compile_internals():
            raise SwitchedOff(
                f"within a {type(mode).__name__}, as in any TorchDispatchMode, torch.compile "
                "traces nothing"
            )


def untraced(error: Exception) -> CaptureError:
    """The CaptureError for what Dynamo raised, or passed on of an op or of the function."""
    reason, place = _reason(error)
    if not isinstance(error, (TorchDynamoException, GuardOnDataDependentSymNode)):
        return Raised(f"{type(error).__name__}: {reason}", place)
    raised = isinstance(error, TorchRuntimeError) or _RAISED in str(error)
    reason = reason.removeprefix(f"{_RAISED}: raised exception ")
    return Raised(reason, place) if raised else CaptureError(reason, place)


def _reason(error: Exception) -> tuple[str, str]:
    """Extract what Dynamo could not trace, and the line of the user's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    about = [line.partition(_CONTEXT)[2].strip() for line in lines if line.startswith(_CONTEXT)]
    about += [found[1] for line in lines if (found := _GOT.search(line))]
    reason = ": ".join([*lines[:1], *[details for details in about if details][:1]])
    reason = next((said for words, said in _IN_WORDS.items() if words in reason), reason)
    frames = list(getattr(error, "real_stack", None) or ())
    frames = [frame for frame in frames if is_models(frame.filename)] or frames
    place = f'File "{frames[-1].filename}", line {frames[-1].lineno}' if frames else ""
    return re.sub(r" at 0x\w+", "", reason) or type(error).__name__, place  # the same on all ranks


def said_of(error: BaseException) -> str:
    """What an error says that came up in a trace; a kernel that no trace enters is named by the
    line that calls it."""
    if not any(words in str(error) for words in _OF_KERNELS):
        return str(error)
    frames = [each for each in extract_tb(error.__traceback__) if is_models(each.filename)]
    if not frames:
        return "it calls a kernel that no trace enters"
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
    return f"it calls a kernel that no trace enters, in {frames[-1].name} ({place})"
