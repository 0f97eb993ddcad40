from __future__ import annotations

fused_topk_with_score_function = fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = None
