"""Experts whose tokens are exchanged by kernels of DeepEP or HybridEP (Megatron's "flex"
dispatcher) are one op of a graph, from the dispatch to the combine.

Such a kernel returns as many rows as came, and a handle that its combine and both backwards read.
No trace can hold either. So a trace has a stand-in for the object that calls the kernels: it hands
hidden states on as they are, until the experts run as one op, which calls the kernels itself. A
plan does not see the exchange, and keeps or recomputes all of it with the experts.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overlapc.core.errors import CaptureError
from overlapc.megatron.fused import UNFUSED
from overlapc.passes.opaque.calls import tensors_of
from overlapc.passes.opaque.op import called

_RECOMPUTES = "activation_recompute"  # attribute of Megatron's grouped experts
_MANAGERS = {"_DeepepManager": "DeepEP", "_HybridEPManager": "HybridEP"}


def stand_ins(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, its value in a trace)."""
    for layer in model.modules():
        dispatcher: Any = getattr(layer, "token_dispatcher", None)
        manager = getattr(dispatcher, "_comm_manager", None)
        if manager is None:
            continue
        name = type(manager).__name__
        if name not in _MANAGERS:
            raise CaptureError(f"its experts exchange tokens by a {name}, which is not known")
        experts = layer.experts
        label = f"expert layer with {_MANAGERS[name]}'s exchange, which no plan sees,"
        routed = _Routed(manager, experts.forward, label)
        handed_on = _HandedOn()
        yield dispatcher, "_comm_manager", handed_on
        yield experts, "forward", _as_one_op(experts, routed, handed_on)
        # Megatron fuses it by torch.compile. It moves values, and computes none.
        prepare = type(dispatcher).dispatch_preprocess
        if plain := getattr(prepare, UNFUSED, None):
            yield dispatcher, "dispatch_preprocess", plain.__get__(dispatcher)


class _HandedOn:
    """In the place of a manager, with its methods."""

    token_probs: Tensor
    dispatched_probs: Tensor
    routing_map: Tensor

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        self.routing_map, self.token_probs = routing_map, probs

    def dispatch(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        self.dispatched_probs = self.token_probs
        return hidden

    def get_permuted_hidden_states_by_experts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> None: ...

    def get_restored_hidden_states_by_experts(self, hidden: Tensor) -> Tensor:
        return hidden

    def combine(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def _as_one_op(experts: nn.Module, routed: _Routed, given: _HandedOn) -> Callable[..., Any]:
    lasting = tensors_of(experts)

    def forward(hidden: Tensor, _: None, probs: Tensor) -> tuple[Tensor, None]:
        args = hidden, given.routing_map, probs
        return called(experts, routed, lasting, tensors_of(experts), args, {}), None

    return forward


@dataclass(frozen=True, eq=False)
class _Routed:
    """Experts with their dispatch and combine, as a function of what a router says."""

    manager: Any
    experts: Callable[..., Any]
    __name__: str

    def __call__(
        self, module: nn.Module, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> Tensor:
        own = copy.copy(self.manager)  # what it notes until the combine belongs to this call
        own.setup_metadata(routing_map, probs)
        sent = own.dispatch(hidden, async_finish=True, allocate_on_comm_stream=True)
        came, weights = own.get_permuted_hidden_states_by_experts(sent)
        with _without_recompute(module):
            made, _bias = self.experts(came, own.get_number_of_tokens_per_expert(), weights)
        made = own.get_restored_hidden_states_by_experts(made)
        back: Tensor = own.combine(made, async_finish=True, allocate_on_comm_stream=True)
        return back

    @property
    def exchanges_in(self) -> Any:
        return self.manager.group

    def on_noise(self, module: nn.Module, hidden: Tensor, _: Tensor, probs: Tensor) -> Tensor:
        """The op as it is tried out and measured: all experts get as many tokens, as far as that
        goes."""
        config, tokens = self.manager.config, len(probs)
        experts, topk = config.num_moe_experts, config.moe_router_topk
        rows = torch.arange(tokens, device=probs.device)[:, None]
        chosen = rows + torch.arange(topk, device=probs.device) * (experts // topk)
        routed = torch.zeros(tokens, experts, dtype=torch.bool, device=probs.device)
        routed = routed.scatter(1, chosen % experts, True)
        copies = self.manager.num_experts // experts  # tensor parallel ranks get the same tokens
        routed = routed.view(tokens, -1, 1, probs.shape[-1]).expand(-1, -1, copies, -1)
        routed = routed.reshape(probs.shape)
        return self(module, hidden, routed, (1 + probs.sigmoid()) * routed)


@contextlib.contextmanager
def _without_recompute(experts: nn.Module) -> Iterator[None]:
    """Within the block they recompute no activation by themselves ("moe_act"): that is the plan's
    choice, and Megatron's own needs a backward of the whole model."""
    own = vars(experts)
    before = own.get(_RECOMPUTES)
    if before:
        own[_RECOMPUTES] = False  # unnoticed by who watches for changes
    try:
        yield
    finally:
        if before:
            own[_RECOMPUTES] = before
