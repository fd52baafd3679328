"""What the records and the student must have for a loss, found before the first step."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from cache.codec import Codec
from cache.rounding import UNKNOWN_ENTROPY
from kd.config.loss import LossConfig
from kd.errors import ConfigError, Problem
from kd.models.routers import find_router_balance
from kd.models.stages.cut import require_cuttable
from kd.text.batches import Source

#: Sequences whose records are read to find out whether a cache holds entropies: it holds all of
#: them or none.
ENTROPY_SAMPLE = 8


def require_served(loss: LossConfig, codec: Codec | None) -> None:
    """Raise ``ConfigError`` if records of ``codec`` cannot serve the loss."""
    if loss.hard_labels_only or codec is None:
        return
    if problems := loss.list_unserved(codec):
        raise ConfigError(problems)


def require_entropies(loss: LossConfig, source: Source) -> None:
    """Raise ``ConfigError`` if the loss needs the teacher's entropies and the records hold none."""
    if loss.entropy_weighting == 0.0 or source.codec is None:
        return
    _, records = source.read(np.arange(min(source.train_count, ENTROPY_SAMPLE)))
    if records is not None and len(records) and (records["entropy"] == UNKNOWN_ENTROPY).all():
        detail = "it needs the teacher's entropy, which the records of this cache do not hold."
        remedy = "Set it to 0, or capture with a local teacher."
        raise ConfigError([Problem("/loss/entropy_weighting", detail, remedy)])


def require_stages(loss: LossConfig, student: PreTrainedModel, stages: int) -> None:
    """Raise ``ModelError`` or ``ConfigError`` where ``student`` cannot be trained in ``stages``.

    It may be hollow. What only its numbers show is found when it is cut.
    """
    require_cuttable(student, stages)
    if find_router_balance(student, loss.router_balance) is not None:
        detail = (
            "train.strategy is pipeline, but no stage sees the routers of all layers of a "
            f"{type(student).__name__}."
        )
        remedy = "Set it to 0, or train.strategy to ddp or fsdp."
        raise ConfigError([Problem("/loss/router_balance", detail, remedy)])
