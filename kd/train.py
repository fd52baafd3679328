"""The training loop: batches -> loss -> step, flat, top to bottom, no callbacks.

Everything that happens in a step is in ``train``. What it needs is made by the functions below it, in the order of
use. State lives in a checkpoint; called again with the same folder the loop goes on from the newest whole one.
"""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, get_scheduler

from kd import checkpoint
from kd.batches import Source, training_batches
from kd.checkpoint import Progress, TrainState
from kd.config.job import JobConfig
from kd.config.train import TrainConfig
from kd.errors import TrainingError
from kd.evaluate import evaluate
from kd.losses import distillation_loss
from kd.metrics import MetricsLog
from kd.models import head_of, require_context, require_document_isolation
from kd.precision import Precision, pick_device, target_hidden_states
from kd.progress import Meter, Monitor
from kd.targets import TargetDecoder


def train(
    config: JobConfig, source: Source, student: PreTrainedModel, vocabulary: int, run_dir: Path, monitor: Monitor
) -> Progress:
    """Train ``student`` in place on ``source``; returns where it ended. ``student`` holds the final (or best) weights.

    Raises ``TrainingError`` on a NaN loss and ``Interrupted`` after a checkpoint when asked to stop.
    """
    options, alpha = required(config.train), config.loss.alpha
    device, precision = pick_device(), Precision.choose(options.precision, pick_device())
    folder, steps = run_dir / "checkpoints", total_steps(options, source.train_count)

    # ---- model, optimiser, schedule
    nn.Module.to(student, device)
    require_context(student, config.data.sequence_length)
    head = head_of(student, vocabulary)
    decoder = TargetDecoder.of(source, config.loss.temperature, device)
    if config.data.packing:
        require_document_isolation(student)
    forward = prepare_forward(student, options)
    optimizer = make_optimizer(student, options, device)
    scheduler = make_scheduler(optimizer, options, steps)
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scales_loss)
    progress = Progress()
    state = TrainState(student, optimizer, scheduler, scaler, progress)

    # ---- resume
    torch.manual_seed(options.seed)
    identity = resume_identity(config, source)
    for problem in checkpoint.load_newest(folder, state, identity):
        monitor.emit("warning", message=problem)
    last = progress.step if ran_out_of_patience(progress, options) else steps
    log = MetricsLog(run_dir / "metrics.jsonl", monitor, progress.step)
    meter = Meter(steps, "steps", done=progress.step)
    batches = training_batches(
        source, options.batch_size, options.gradient_accumulation_steps, options.seed, range(progress.step, last)
    )

    def evaluate_now() -> dict[str, Any]:
        found = evaluate(forward, head, source, decoder, options.batch_size, precision, device)
        log.evaluation(progress.step, found)
        return found

    if progress.first_evaluation is None:
        progress.first_evaluation = evaluate_now()

    for micro_batches in batches:
        began = time.monotonic()
        # ---- forward and backward over the micro-batches; the mean is over the tokens of all of them
        student.train()
        count = sum(len(batch) for batch in micro_batches)
        sums = torch.zeros(3, device=device, dtype=torch.float64)
        for batch in micro_batches:
            batch = batch.to(device)
            hidden_ND = target_hidden_states(forward, batch, precision)
            targets = decoder.targets(batch.gold_N, batch.teacher)
            terms = distillation_loss(hidden_ND, head, targets, alpha)
            scaler.scale(terms.total / max(count, 1)).backward()
            sums += torch.stack([terms.total.detach(), terms.kd, terms.ce]).double()
        loss, kd_loss, ce_loss = (sums / max(count, 1)).tolist()

        # ---- step
        scaler.unscale_(optimizer)
        grad_norm = float(nn.utils.clip_grad_norm_(student.parameters(), options.max_grad_norm or math.inf))
        # The loss scaler skips a step whose gradients overflow, so in float16 an infinite norm is no error.
        if not math.isfinite(loss if precision.scales_loss else loss + grad_norm):
            raise TrainingError(
                f"At step {progress.step + 1} the loss is {loss} and the gradient's norm {grad_norm}.",
                "The last checkpoint is whole. Lower train.learning_rate, add warmup_steps, or use precision fp32.",
            )
        learning_rate = scheduler.get_last_lr()[0]
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:  # it falls where the gradients overflowed and the step was skipped
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += count
        progress.seconds += time.monotonic() - began

        # ---- report
        monitor.emit("progress", **meter.advance(1, count))
        if progress.step % options.logging_steps == 0 or progress.step == steps:
            log.training(
                step=progress.step,
                loss=loss,
                kd_loss=kd_loss if source.has_records else None,
                ce_loss=ce_loss,
                perplexity=perplexity(ce_loss),
                temperature=config.loss.temperature,
                learning_rate=learning_rate,
                grad_norm=grad_norm,
                tokens=progress.tokens,
            )

        # ---- evaluate, save, stop
        improved = False
        if progress.step % options.eval_steps == 0 or progress.step == steps:
            improved = note_evaluation(progress, evaluate_now())
        exhausted = ran_out_of_patience(progress, options)
        keep_best = improved and options.early_stopping_patience is not None
        stopping = monitor.should_stop()
        if progress.step % options.save_steps == 0 or progress.step == steps or keep_best or exhausted or stopping:
            path = checkpoint.save(folder, state, identity)
            checkpoint.prune(folder, options.save_total_limit, best_step(progress, options))
            monitor.emit("checkpoint", step=progress.step, path=str(path))
        if exhausted:
            break
        if stopping and progress.step < steps:
            monitor.check(f"at step {progress.step} of {steps}")

    if (step := best_step(progress, options)) is not None:
        checkpoint.load_model(folder / f"step-{step:08d}", student)
    return progress


# ---------------------------------------------------------------------- what the loop is made of


def required(options: TrainConfig | None) -> TrainConfig:
    """The train section, which a job that trains always has."""
    assert options is not None, "JobConfig refuses a training job without a train section"
    return options


def total_steps(options: TrainConfig, sequences: int) -> int:
    """Optimiser steps of the whole run."""
    if options.max_steps is not None:
        return options.max_steps
    assert options.epochs is not None
    return max(1, math.ceil(options.epochs * sequences / (options.batch_size * options.gradient_accumulation_steps)))


def prepare_forward(student: PreTrainedModel, options: TrainConfig) -> nn.Module:
    """The module to call for hidden states, checkpointed and compiled as configured; it shares the weights."""
    if options.gradient_checkpointing:
        # transformers 5 gave the method a new name; both are the same.
        enable = getattr(student, "activation_checkpointing_enable", student.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if options.compile:
        student.base_model.compile()
    return student


def make_optimizer(student: nn.Module, options: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW, fused on a GPU; weight decay on matrices only, for decaying norms and biases only shrinks their scale."""
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=betas, eps=options.adam_epsilon, fused=device.type == "cuda"
    )


def make_scheduler(optimizer: torch.optim.Optimizer, options: TrainConfig, steps: int) -> Any:
    """The named schedule of ``transformers.get_scheduler``."""
    extra = {key: int(value) if value == int(value) else value for key, value in options.lr_scheduler_kwargs.items()}
    try:
        return get_scheduler(options.lr_scheduler_type, optimizer, options.warmup_steps, steps, extra)
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"lr_scheduler_type {options.lr_scheduler_type} cannot be made with lr_scheduler_kwargs {extra}: {error}",
            "Set train.lr_scheduler_kwargs to what the schedule needs.",
        ) from error


def perplexity(loss: float) -> float:
    """exp of a mean negative log-likelihood; infinite rather than an overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def note_evaluation(progress: Progress, found: dict[str, Any]) -> bool:
    """Write an evaluation into ``progress``; returns whether it is the best so far."""
    progress.last_evaluation = found
    loss = found.get("validation_loss")
    if loss is None:
        return False
    improved = progress.best_loss is None or loss < progress.best_loss
    if improved:
        progress.best_loss, progress.best_step, progress.evaluations_since_best = loss, progress.step, 0
    else:
        progress.evaluations_since_best += 1
    return improved


def ran_out_of_patience(progress: Progress, options: TrainConfig) -> bool:
    """Whether early stopping ends the run here."""
    patience = options.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience


def best_step(progress: Progress, options: TrainConfig) -> int | None:
    """The step whose weights are kept to the end, where early stopping asks for the best ones."""
    return progress.best_step if options.early_stopping_patience is not None and progress.best_step else None


def resume_identity(config: JobConfig, source: Source) -> str:
    """What must be equal for a checkpoint to be resumed: all that shapes the weights, and nothing that does not."""
    free = {"logging_steps", "save_steps", "save_total_limit"}
    content = [
        config.model_dump_json(include={"student", "loss"}),
        required(config.train).model_dump_json(exclude=free),
        str(source.identity),
    ]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()
