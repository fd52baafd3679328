"""TRL's trainer for supervised fine-tuning, with a cache; it needs the extra trl."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from kd.cached.datasets import Order
from kd.cached.items import collate
from kd.cached.loss import DistillationLoss
from kd.cached.opening import OpenCache
from kd.cached.trainer import CachedLoss

try:
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer
except ImportError as error:
    raise ImportError(
        "CachedDistillationSFTTrainer needs TRL, which is not installed. "
        "Install it: pip install 'potstill[trl]'."
    ) from error


class CachedDistillationSFTTrainer(CachedLoss, SFTTrainer):
    """TRL's ``SFTTrainer`` whose student learns from a cache, as ``CachedDistillationTrainer``.

    The sequences come from the cache, tokenised and packed: settings of ``SFTConfig`` that prepare
    text (packing, max_length, chat_template_path) and its ``loss_type`` change nothing. All else is
    as in ``SFTTrainer``, ``peft_config`` included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: SFTConfig,
        *,
        opened: OpenCache,
        loss_fn: DistillationLoss | None = None,
        order: Order = "windows",
        **options: Any,
    ) -> None:
        args.dataset_kwargs = {"skip_prepare_dataset": True}
        # SFTTrainer takes only data sets of the library datasets. This one has the numbers of the
        # sequences; the loader reads the cache.
        train, held_out = (
            Dataset.from_dict({"number": list(each.numbers)})
            for each in (opened.train, opened.validation)
        )
        measured = held_out if len(held_out) else None
        super().__init__(model, args, collate, train, measured, **options)
        self.train_dataset = opened.train
        self.eval_dataset = opened.validation if len(held_out) else None
        self.learn_from(opened, loss_fn, order)
