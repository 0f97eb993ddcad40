"""Where fake results have other strides than real ones, a trace has the real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import overlapc
from overlapc.passes.exact.as_eager import as_eager

aten = torch.ops.aten


class Transposed(nn.Module):
    """Batch norm over channels that lie last: its gradient comes transposed."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), norm, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(x).pow(2).mean()


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (lambda: nn.BatchNorm1d(16), {}),
        (lambda: nn.BatchNorm1d(16), {"profile": "measure"}),
        (lambda: nn.BatchNorm1d(16), {"dynamic": True}),
        (nn.LogSigmoid, {}),
        (nn.ELU, {}),
    ],
)
def test_a_model_whose_real_strides_are_not_the_fake_ones(
    norm: Callable[[], nn.Module], options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    model, x = Transposed(norm()), torch.randn(4, 6, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(x).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.load_state_dict(before)
    model.zero_grad()
    twin = overlapc.optimize(model, **({"profile": "estimate"} | options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin(x).backward()
    assert twin.graphs
    assert not twin.fallbacks
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, expected[name]), name


def _laid_out(x: Tensor) -> list[Tensor]:
    """The tensor, and such that lie otherwise in memory."""
    found = [x]
    for a, b in ((0, 1), (-2, -1)) if x.dim() > 1 else ():
        found.append(x.transpose(a, b).contiguous().transpose(a, b))
    if x.dim() == 4:
        found.append(x.contiguous(memory_format=torch.channels_last))
    return found


X, Y = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
IMAGE, ROWS = torch.randn(2, 6, 4, 4), torch.randn(4, 6)
SIX = torch.ones(6)
FORWARD: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "batch_norm": (lambda x: F.batch_norm(x, None, None, SIX, SIX, True), (X,)),
    "batch_norm of images": (lambda x: F.batch_norm(x, None, None, SIX, SIX, True), (IMAGE,)),
    "group_norm": (lambda x: F.group_norm(x, 2, SIX, SIX), (IMAGE,)),
    "layer_norm": (lambda x: F.layer_norm(x, (5,)), (X,)),
    "rms_norm": (lambda x: F.rms_norm(x, (5,)), (X,)),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (IMAGE, torch.randn(6, 6, 3, 3))),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=6), (IMAGE, torch.randn(6, 1, 3, 3))),
    "conv_transpose": (lambda x, w: F.conv_transpose2d(x, w), (IMAGE, torch.randn(6, 2, 3, 3))),
    "max_pool": (lambda x: F.max_pool2d(x, 2), (IMAGE,)),
    "avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 2), (IMAGE,)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,)),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (IMAGE,)),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (IMAGE,)),
    "index_put": (lambda x, v: x.index_put((torch.tensor([0, 2]),), v), (X, torch.randn(2, 6, 5))),
    "index": (lambda x: x[:, torch.tensor([0, 2])], (X,)),
    "gather": (lambda x: x.gather(1, torch.zeros(4, 2, 5, dtype=torch.long)), (X,)),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 2], [1, 1]]), w), (ROWS,)),
    "cumsum": (lambda x: x.cumsum(1), (X,)),
    "sort": (lambda x: x.sort(1)[0], (X,)),
    "topk": (lambda x: x.topk(2, 1)[0], (X,)),
    "log_softmax": (lambda x: x.log_softmax(1), (X,)),
    "softmax": (lambda x: x.softmax(1), (X,)),
    "dropout": (lambda x: aten.native_dropout(x, 0.5, True)[0], (X,)),
    "mse_loss": (F.mse_loss, (X, Y)),
    "smooth_l1_loss": (F.smooth_l1_loss, (X, Y)),
    "logsigmoid": (F.logsigmoid, (X,)),
    "hardswish": (F.hardswish, (X,)),
    "elu": (F.elu, (X,)),
    "gelu": (F.gelu, (X,)),
    "softplus": (F.softplus, (X,)),
    "cat": (lambda x, y: torch.cat((x, y), 1), (X, Y)),
    "matmul": (lambda x, y: x @ y.mT, (X, Y)),
    "relu6": (F.relu6, (X,)),
    "logit": (lambda x: torch.logit(x, 0.2), (X,)),
    "glu": (lambda x: F.glu(x, 1), (X,)),
    "xlogy": (torch.xlogy, (X, Y)),
    "xlog1py": (torch.special.xlog1py, (X, Y)),
    "max_unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (IMAGE,)),
    "fft": (lambda x: torch.view_as_real(torch.fft.fft(x, dim=1)), (X,)),
    "irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=6, dim=1), (X,)),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y[:2], 0, 1, 3), (X, Y)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (IMAGE,)),
    "floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (X, Y)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_fake_strides_are_those_of_real_results_and_gradients(name: str) -> None:
    function, inputs = FORWARD[name]

    def strides(x: Tensor, others: tuple[Tensor, ...], fake: bool) -> list[list[tuple[int, ...]]]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        into = mode.from_tensor if fake else Tensor.detach
        given = [into(t.detach()).requires_grad_() for t in (x, *others)]
        result = function(*given)
        found = [[result.stride()]]
        for gradient in _laid_out(torch.ones(result.shape)) if result.requires_grad else ():
            made = torch.autograd.grad(result, given, into(gradient), retain_graph=True)
            found.append([gradient_of.stride() for gradient_of in made])
        return found

    for x in _laid_out(inputs[0]):
        real = strides(x, inputs[1:], fake=False)
        with as_eager():
            assert strides(x, inputs[1:], fake=True) == real
