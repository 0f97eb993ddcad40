"""What PyTorch's FSDP asks its communicator for, as the search counts it: one list for the oracle
of the search's times and for the test that reads it off a real run."""

from __future__ import annotations

ENDS = -1  # the module around all layers: words, scores, last norm


def asked(layers: int, again: bool) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(forward, backward) of a microbatch: each collective, and `run` where a layer's kernels are
    launched, in the order in which the host asks for them."""
    forward = [("gather", ENDS)]
    for layer in range(layers):
        forward += [("gather", layer), ("run", layer)]
    backward = [("gather", layers - 1)] if again else []
    for layer in reversed(range(layers)):
        if again and layer > 0:
            backward += [("gather", layer - 1)]
        backward += [("run", layer), ("scatter", layer)]
    return forward, [*backward, ("scatter", ENDS)]
