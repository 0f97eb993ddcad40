from __future__ import annotations


class FusibleOperation: ...


class SwiGLU: ...


class Sequential: ...
