from __future__ import annotations

import torch


class QuantizedTensor(torch.Tensor): ...
