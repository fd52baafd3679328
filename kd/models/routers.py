"""The balance loss of a mixture of experts: it keeps the routers from choosing few experts.

Each layer's router gives every token a probability for each of E experts, and the token goes to the
k most probable. With f_i the share of tokens that go to expert i and P_i its mean probability, the
loss is E sum_i f_i P_i (Fedus et al. 2021, arXiv 2101.03961). It is k where all experts get equally
many tokens, and grows as they get fewer. Only its gradient matters, so k is subtracted here: the
loss of a balanced student is that of the student without the term.

f and P are means over a micro-batch, and their product is no mean over tokens: the same step in
other micro-batches, or on other numbers of devices, has another balance loss.

Shapes: B sequences, L positions of a sequence, N positions with a target, D hidden width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.errors import ConfigError
from kd.models.layers import run_body
from kd.models.precision import Precision
from kd.text.batches import Batch

#: The arguments of transformers' usual load_balancing_loss_func.
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class RouterBalance:
    """The balance loss of a student with ``experts`` experts, of which each token gets ``chosen``.

    ``measure`` is the function with which transformers computes it for this family of models.
    """

    weight: float
    experts: int
    chosen: int
    measure: Callable[..., Tensor]

    def run(
        self, student: PreTrainedModel, batch: Batch, precision: Precision
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states (N, D) of positions with a target, and the weighted loss.

        The loss is a mean over these positions, times N: the losses of tokens are summed too. It is
        0 where N is 0.
        """
        with precision.autocast():
            output = run_body(student, batch.tokens_BL, batch.packed, output_router_logits=True)
        hidden_BLD: Tensor = output.last_hidden_state
        hidden_ND = hidden_BLD.flatten(0, 1)[batch.rows_N].to(precision.dtype)
        if not len(batch):
            # transformers divides by the number of positions.
            return hidden_ND, torch.zeros((), device=hidden_ND.device)
        mask = torch.zeros(batch.tokens_BL.numel(), device=batch.tokens_BL.device)
        mask[batch.rows_N] = 1.0
        logits = tuple(each.float() for each in output.router_logits)
        loss = self.measure(logits, self.experts, self.chosen, mask.view_as(batch.tokens_BL))
        return hidden_ND, self.weight * len(batch) * (loss - self.chosen)


def find_router_balance(student: PreTrainedModel, weight: float | None) -> RouterBalance | None:
    """Return the balance loss of ``student``; None if it has none, or its weight is 0.

    ``weight`` None means that of the student's configuration, router_aux_loss_coef. Raises
    ``ConfigError`` for a weight where the student has no balance loss.
    """
    measure = _find_measure(student)
    experts = getattr(student, "num_experts", None)
    chosen = getattr(student, "num_experts_per_tok", None)
    if measure is None or not isinstance(experts, int) or not isinstance(chosen, int):
        if weight:
            what = f"a {type(student).__name__} has no balance loss for routers."
            raise ConfigError.of_field("/loss/router_balance", what, "Leave it out.")
        return None
    own = getattr(student.config, "router_aux_loss_coef", None) or 0.0
    weight = own if weight is None else weight
    return RouterBalance(weight, experts, chosen, measure) if weight > 0 else None


def _find_measure(student: PreTrainedModel) -> Callable[..., Tensor] | None:
    """Return the function with which transformers computes the balance loss of ``student``.

    None if its layers have no routers, although its class may, or if the function takes other
    arguments: Doge's routers pick pairs of keys.
    """
    measure = getattr(sys.modules[type(student).__module__], "load_balancing_loss_func", None)
    if measure is None or list(inspect.signature(measure).parameters) != _ARGUMENTS:
        return None
    recorded = (getattr(student, "_can_record_outputs", None) or {}).get("router_logits")
    recorders = recorded if isinstance(recorded, list) else [recorded]
    kinds: list[Any] = [getattr(each, "target_class", each) for each in recorders]
    if None in kinds:  # the class does not say which modules are its routers
        return measure
    return measure if any(isinstance(each, tuple(kinds)) for each in student.modules()) else None
