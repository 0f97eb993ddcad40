"""(Megatron runs its own permutation where these are not.)"""

from __future__ import annotations
