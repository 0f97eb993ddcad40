"""A language model that sees: as Megatron-Bridge's models of pictures do it, features of a vision
model take the places of some tokens' embeddings, before the language model runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PICTURE = 7  # the token in whose places features come
PIXELS = 12


def seeing(language_model: Any) -> Any:
    from megatron.core.transformer.module import MegatronModule

    class Seeing(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config=language_model.config)
            width = self.config.hidden_size
            self.model_type = language_model.model_type
            self.pre_process = language_model.pre_process
            self.post_process = language_model.post_process
            self.share_embeddings_and_output_weights = (
                language_model.share_embeddings_and_output_weights
            )
            if self.pre_process:
                first, norm = nn.Linear(PIXELS, width), nn.LayerNorm(width)
                self.visual = nn.Sequential(first, nn.GELU(), norm)
            self.language_model = language_model

        def set_input_tensor(self, input_tensor: Any) -> None:
            self.language_model.set_input_tensor(input_tensor)

        def shared_embedding_or_output_weight(self) -> Any:
            return self.language_model.shared_embedding_or_output_weight()

        def forward(
            self, tokens: Tensor, places: Any, mask: Any, labels: Any, pixels: Tensor
        ) -> Any:
            embedded = None
            if self.pre_process:
                embedded = self.language_model.embedding(input_ids=tokens, position_ids=None)
                embedded = embedded.transpose(0, 1).contiguous()
                here = (tokens == PICTURE)[..., None].expand_as(embedded)
                embedded = embedded.masked_scatter(here, self.visual(pixels).to(embedded.dtype))
                embedded = embedded.transpose(0, 1).contiguous()
                if self.config.sequence_parallel:
                    from megatron.core import tensor_parallel

                    embedded = tensor_parallel.scatter_to_sequence_parallel_region(embedded)
            return self.language_model.forward(
                input_ids=None,
                position_ids=places,
                attention_mask=mask,
                decoder_input=embedded,
                labels=labels,
            )

    return Seeing()


def pixels_of(tokens: Tensor) -> Tensor:
    """As many rows as there are places for them."""
    drawn = torch.Generator().manual_seed(int(tokens.sum()))
    return torch.randn(int((tokens == PICTURE).sum()), PIXELS, generator=drawn)
