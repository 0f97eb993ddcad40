from __future__ import annotations


class SwiGLU: ...


class Sequential: ...
