"""The fused loss of a cache as a module of torch.

    loss_fn = DistillationLoss(opened, alpha=0.1)
    loss = loss_fn(hidden_states, model.lm_head.weight, batch)

Shapes: B sequences, L positions of a sequence, N positions with a target, D hidden width, V
vocabulary (V' >= V where the model pads its own).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kd.cached.decoding import IGNORED
from kd.cached.opening import OpenCache
from kd.config.loss import Divergence
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import LossTerms, compute_distillation_loss
from kd.loss.objective import Objective
from kd.models.lm_head import LMHead
from kd.text.batches import Batch, find_packed_rows


class DistillationLoss(nn.Module):
    """Distillation and cross-entropy in one pass over the LM head, which never builds (B, L, V).

    It is the loss of our own training loop (``kd.loss.fused``), without its correction for the
    noise of sampled tails (``loss.tail_control``): (1 - alpha) T^2 KL(teacher, student) + alpha CE,
    both at ``temperature`` T and averaged over the targets. Value and gradients are exact. The
    other options are the fields of ``kd.config.loss`` with the same names; the weights of
    ``entropy_weighting`` have mean 1 in each batch, where our loop's have it in each step.
    ``chunk_size`` is how many positions have logits at a time. Raises ``ValueError`` if the
    profile of the cache cannot serve them.
    """

    def __init__(
        self,
        opened: OpenCache,
        alpha: float = 0.0,
        temperature: float = 1.0,
        *,
        divergence: Divergence = "forward_kl",
        beta: float = 0.5,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        entropy_weighting: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must lie in [0, 1], but got {alpha}.")
        if temperature <= 0.0:
            raise ValueError(f"temperature must be above 0, but got {temperature}.")
        if why := opened.codec.why_unsupported(divergence, (temperature,)):
            raise ValueError(f"{why}.")
        if entropy_weighting and (why := opened.codec.why_unweighted()):
            raise ValueError(f"{why}.")
        self.store = opened.store
        self.vocabulary = opened.codec.vocabulary_size
        self.temperature = temperature
        self.chunk_size = chunk_size
        weights = (beta, label_smoothing, z_loss, entropy_weighting)
        self.objective = Objective(alpha, divergence, *weights)
        self._decoders: dict[torch.device, TargetDecoder] = {}

    def forward(
        self,
        hidden_states: Tensor,
        lm_head: Tensor | LMHead,
        batch: Mapping[str, Any],
        num_targets: int | Tensor | None = None,
    ) -> Tensor:
        """Return the loss of ``batch``, the mean over its targets in nats, as a scalar.

        ``hidden_states`` (B, L, D) are those after the last norm. ``lm_head`` is the weight (V', D)
        of the LM head; for a head with a bias, a scale or a soft-cap give what
        ``kd.models.lm_head.find_student_head`` returns. ``batch`` has the form ``records`` and lies
        on their device. ``num_targets`` divides the sum in place of the batch's own number, where
        several batches make one step. Raises ``ValueError`` if the shapes do not fit.
        """
        made = make_training_batch(batch)
        if hidden_states.shape[:2] != made.tokens_BL.shape:
            raise ValueError(
                f"hidden_states must be (B, L, D) with (B, L) = {tuple(made.tokens_BL.shape)}, "
                f"but got {tuple(hidden_states.shape)}."
            )
        total = self.sum_terms(hidden_states.flatten(0, 1)[made.rows_N], lm_head, made).total
        return total / (max(len(made), 1) if num_targets is None else num_targets)

    def sum_terms(self, hidden_ND: Tensor, lm_head: Tensor | LMHead, batch: Batch) -> LossTerms:
        """Return the terms of the loss, summed over the N targets of ``batch``.

        Raises ``ValueError`` if the LM head has fewer rows than the vocabulary of the cache.
        """
        if isinstance(lm_head, Tensor):
            lm_head = LMHead(lm_head, None, 1.0, None, len(lm_head))
        if len(lm_head.weight) < self.vocabulary:
            raise ValueError(
                f"lm_head must have at least {self.vocabulary} rows, as the cache's vocabulary "
                f"has, but got {len(lm_head.weight)}."
            )
        device = hidden_ND.device
        if device not in self._decoders:
            self._decoders[device] = TargetDecoder.of(self.store.open(), device)
        targets = self._decoders[device].decode(batch.gold_N, batch.teacher, self.temperature)
        # The pass has its own precision: sums in float32, products in that of the hidden states.
        options = (self.objective, self.chunk_size)
        with torch.autocast(device.type, enabled=False):
            return compute_distillation_loss(hidden_ND, lm_head, targets, *options)


def make_training_batch(batch: Mapping[str, Any]) -> Batch:
    """Return a batch of form ``records`` as our own loop has it, on the same device.

    Raises ``ValueError`` for another form.
    """
    if "records" not in batch:
        raise ValueError(
            f"The batch must have the form records, but it has the keys {', '.join(batch)}. "
            'Open the cache with form="records", and keep all keys of the batch.'
        )
    tokens_BL: Tensor = batch["input_ids"]
    labels_BL: Tensor = batch["labels"]
    target_BL = torch.zeros_like(labels_BL, dtype=torch.bool)
    target_BL[:, :-1] = labels_BL[:, 1:] != IGNORED
    rows_N = target_BL.flatten().nonzero().flatten()
    positions_BL = batch["position_ids"]
    packed = find_packed_rows(positions_BL.cpu(), target_BL.cpu().numpy())
    return Batch(
        tokens_BL=tokens_BL,
        packed=packed and packed.map(lambda each: each.to(positions_BL.device)),
        rows_N=rows_N,
        gold_N=tokens_BL.flatten()[rows_N + 1],
        columns=batch["records"],
    )
