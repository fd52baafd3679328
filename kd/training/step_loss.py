"""The loss of one micro-batch, from the student's hidden states and the teacher's records.

Shapes: N positions that have a target, D hidden width. T is the temperature.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.checks.parity import check_parity
from kd.checks.verdict import Verdict
from kd.config.loss import LossConfig
from kd.loss.decoder import TargetDecoder
from kd.loss.features import FeatureLoss
from kd.loss.fused import LossTerms, compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.ramps import evaluate_ramp
from kd.loss.sparse_targets import SparseTarget
from kd.loss.tail_control import TailControl
from kd.loss.temperature import TemperatureControl
from kd.loss.token_weights import measure_mean_weight
from kd.models.lm_head import LMHead
from kd.models.precision import Precision, compute_target_hidden_states
from kd.models.routers import RouterBalance
from kd.parallel.group import Group
from kd.text.batches import Batch
from kd.tracking.stopwatch import Stopwatch


@dataclass(frozen=True)
class StepLoss:
    """Everything that turns a micro-batch into a loss.

    ``steps`` is the length of the run, which schedules need; ``logits_chunk`` the positions whose
    logits exist at once (None: chosen by the free memory); ``control`` corrects for the noise of
    sampled tails. ``device`` is that of batches and hidden states; parameters may lie elsewhere
    between the passes (``train.fsdp_offload``).
    """

    config: LossConfig
    student: PreTrainedModel
    device: torch.device
    lm_head: LMHead
    decoder: TargetDecoder
    objective: Objective
    temperature: TemperatureControl
    features: FeatureLoss | None
    routers: RouterBalance | None
    precision: Precision
    logits_chunk: int | None
    steps: int
    clock: Stopwatch
    control: TailControl | None = None

    @property
    def live_head(self) -> LMHead:
        """The LM head with the weights as they are now."""
        return self.lm_head.refresh(self.student)

    def alpha_at(self, step: int) -> float:
        """The weight of the hard labels at ``step``."""
        return evaluate_ramp(self.config.alpha, step, self.steps)

    def measure_mean_weight(self, batches: Iterable[Batch], group: Group) -> float | None:
        """The mean of the tokens' weights before they are scaled, over a step's micro-batches.

        ``batches`` are those of this rank, on the host. None where the entropies weigh nothing.
        """
        exponent = self.config.entropy_weighting
        if exponent == 0.0 or self.decoder.codec is None:
            return None
        return measure_mean_weight((each.teacher for each in batches), exponent, group)

    def compute(
        self, batch: Batch, alpha: float, T: float | Tensor, mean_weight: float | None = None
    ) -> LossTerms:
        """The loss of ``batch``, summed over its tokens; the batch is on the student's device.

        ``mean_weight`` is that of the step (``measure_mean_weight``); None = of the batch alone.
        """
        with self.clock.phase("forward"):
            inputs = (self.student, batch, self.precision)
            if self.routers is None:
                hidden_ND, balance = compute_target_hidden_states(*inputs), None
            else:
                hidden_ND, balance = self.routers.run(*inputs)
        with self.clock.phase("head"):
            targets = self.decoder.decode(batch.gold_N, batch.teacher, T)
            objective = self.objective.with_alpha(alpha).with_mean_weight(mean_weight)
            correction = None
            if self.control is not None and isinstance(targets.teacher, SparseTarget):
                self.control.observe(hidden_ND)
                if self.control.applies:
                    correction = self.control.correct(targets.teacher)
            terms = compute_distillation_loss(
                hidden_ND, self.live_head, targets, objective, self.logits_chunk, correction
            )
            extra = [] if balance is None else [balance]
            if self.features is not None:
                extra.append(self.features(hidden_ND, targets))
            return terms._replace(total=sum(extra, terms.total))

    def rehearse(self, batch: Batch) -> Tensor:
        """The loss of ``batch`` as at the first step, without a gradient of the temperature."""
        batch = batch.to(self.device)
        return self.compute(batch, self.alpha_at(0), self.temperature.evaluate(0)).total

    def check_parity(self, batch: Batch, step: int, tokens: int) -> Verdict:
        """Compare the fused loss of ``tokens`` tokens of ``batch`` at ``step`` with a dense one."""
        device = self.device
        batch = batch.to(device)
        # The random state is restored, so that a run with this check draws the same dropout as one
        # without it.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            hidden_ND = compute_target_hidden_states(self.student, batch, self.precision)
        targets = self.decoder.decode(batch.gold_N, batch.teacher, self.temperature.track(step))
        objective = self.objective.with_alpha(self.alpha_at(step))
        return check_parity(hidden_ND, self.live_head, targets, objective, tokens)
