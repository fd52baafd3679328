"""A trainer of transformers that learns from a cache.

    trainer = CachedDistillationTrainer(model, args, opened=opened)
    trainer.train()

Shapes: N positions with a target, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer

from kd.cached.datasets import Order
from kd.cached.decoding import Item
from kd.cached.items import collate
from kd.cached.loss import DistillationLoss, make_training_batch
from kd.cached.opening import OpenCache
from kd.models.attention.causality import require_causal
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states, train_all_rows
from kd.models.lm_head import LMHead, find_student_head
from kd.text.batches import Batch


class CachedLoss:
    """What makes a ``Trainer`` read a cache and compute its loss; it is the first base class.

    The trainer's own data set, collator and loss are not used. A batch is divided by the targets of
    the whole step, as in our own loop.
    """

    model: Any
    args: Any
    accelerator: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    get_tp_size: Callable[[], int]
    _train_batch_size: int

    def learn_from(self, opened: OpenCache, loss_fn: DistillationLoss | None, order: Order) -> None:
        """Prepare the model of the trainer for ``opened``; call it once the trainer is made.

        Raises ``ModelError`` for a model whose documents cannot be kept apart or whose logits are
        not those of its LM head, ``TokenizerMismatch`` if it has fewer tokens than the cache,
        and ``ValueError`` for several GPUs in one process, for FSDP and DeepSpeed, and for a cache
        of another form than ``records``.
        """
        if opened.decoding.form != "records":
            raise ValueError(
                f"opened must have the form records, but got {opened.decoding.form}. "
                'Open the cache with form="records".'
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                f"{type(self).__name__} trains a whole copy of the model on each rank: FSDP and "
                "DeepSpeed are not supported. Use DDP, or kd run with train.strategy fsdp."
            )
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{type(self).__name__} needs one process for each GPU, but this one sees "
                f"{self.args.n_gpu}. Start the script with torchrun or accelerate launch, or set "
                "CUDA_VISIBLE_DEVICES."
            )
        self.opened = opened
        self.order: Order = order
        self.loss_fn = loss_fn if loss_fn is not None else DistillationLoss(opened)
        student = find_student(self.model)
        train_all_rows(student)
        require_causal(student, opened.sequence_length)
        self.lm_head = find_student_head(student, opened.codec.vocabulary_size)
        if opened.packed:
            autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
            isolate_documents(student, autocast.get(self.accelerator.mixed_precision))
        # ``compute_loss`` hands the forward pass what it is to compute.
        own = self.model.forward

        def forward(*inputs: Any, compute: Callable[[], Tensor] | None = None, **named: Any) -> Any:
            return own(*inputs, **named) if compute is None else compute()

        self.model.forward = forward
        # Labels are then counted over all micro-batches of a step.
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Item,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss per target, in nats."""
        batch = make_training_batch(inputs)
        student = find_student(self.model)
        # In the forward pass of the outermost module, so that DDP sees it.
        total = model(compute=partial(sum_loss, student, self.lm_head, self.loss_fn, batch))
        if num_items_in_batch is None:
            loss = total / max(len(batch), 1)
        else:
            loss = total / num_items_in_batch
            # The targets of all ranks are counted, but the gradients of ranks are averaged.
            if self.args.average_tokens_across_devices:
                loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Item,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a held-out batch; there are no logits."""
        moved = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        with torch.no_grad():
            return self.compute_loss(model, moved).detach().float(), None, None

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training sequences in the order of our own loop with the same seed."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return self._make_loader(
            self.opened.train,
            self._train_batch_size,
            sampler=self.opened.sampler(seed=seed, order=self.order),
            drop_last=self.args.dataloader_drop_last,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the held-out sequences of the cache, in order."""
        chosen = eval_dataset if eval_dataset is not None else self.opened.validation
        return self._make_loader(chosen, self.args.eval_batch_size)

    def _make_loader(self, sequences: Any, batch_size: int, **options: Any) -> DataLoader[Any]:
        args = self.args
        loader = DataLoader(
            sequences,
            batch_size,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            **options,
        )
        return self.accelerator.prepare(loader)


class CachedDistillationTrainer(CachedLoss, Trainer):
    """``transformers.Trainer`` whose student learns from a cache.

    ``opened`` is a cache of form ``records``; ``loss_fn`` is by default only distillation at
    T = 1. ``order`` is that of the sequences: windows or shuffled. All else is as in ``Trainer``,
    but ``train_dataset`` and ``data_collator`` are those of the cache. Several ranks train by DDP;
    FSDP and DeepSpeed are refused. Raises as ``learn_from`` does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: Any = None,
        *,
        opened: OpenCache,
        loss_fn: DistillationLoss | None = None,
        order: Order = "windows",
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            args,
            data_collator=collate,
            train_dataset=opened.train,
            eval_dataset=opened.validation if len(opened.validation) else None,
            **options,
        )
        self.learn_from(opened, loss_fn, order)


def find_student(model: Any) -> PreTrainedModel:
    """Return the model below adapters of peft, whose layers hold the adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def sum_loss(
    student: PreTrainedModel, lm_head: LMHead, loss_fn: DistillationLoss, batch: Batch
) -> Tensor:
    """Return the loss of ``batch``, summed over its targets."""
    hidden_BLD = compute_hidden_states(student, batch.tokens_BL, batch.packed)
    hidden_ND = hidden_BLD.flatten(0, 1)[batch.rows_N]
    kind = hidden_ND.device.type
    if torch.is_autocast_enabled(kind):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(kind))
    return loss_fn.sum_terms(hidden_ND, lm_head.refresh(student), batch).total
