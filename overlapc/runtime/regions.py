"""Several calls in one region of autocast.

Eager's autocast casts a parameter once in its region, for all calls in it: the gradients of these
are added up in the lower precision. A graph casts for itself.
"""

from __future__ import annotations

import torch

_DEVICES = ("cpu", "cuda")


class Region:
    """The region of autocast that a model was called in last."""

    def __init__(self) -> None:
        self._open = False

    def entered_again(self) -> bool:
        """Is this call, which begins, another one in the region of the call before?"""
        if not torch.is_autocast_cache_enabled() or not any(
            torch.is_autocast_enabled(device) for device in _DEVICES
        ):
            return False
        if not self._open:
            self._open = True
            self._watch_for_the_end()
            return False
        return True

    def _watch_for_the_end(self) -> None:
        """Autocast clears its cache when the outermost region ends."""
        clear = torch.clear_autocast_cache

        def cleared() -> None:
            self._open = False
            if torch.clear_autocast_cache is cleared:
                torch.clear_autocast_cache = clear
            clear()

        torch.clear_autocast_cache = cleared
