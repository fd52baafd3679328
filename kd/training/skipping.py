"""A batch whose loss or gradient is not finite: the run goes on without it, or ends by an error.

The batch is the cause where the weights are finite and some other sequence is sound. Weights that
are far too large, or a layer that computes NaN for any text, end the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from kd.checks.nonfinite import locate_nonfinite
from kd.checks.verdict import Verdict, format_names
from kd.errors import NotFinite
from kd.parallel.sharded_files import get_own
from kd.parallel.strategies import is_sharded, reshard
from kd.text.batches import Batch
from kd.text.steps.reading import read_step_sequences
from kd.training.run import Run
from kd.training.saved.state import SkippedBatch
from kd.training.steps import Step, drop_gradients

#: Most sequences that a message names.
NAMES_SHOWN = 8
#: Sequences after the batch that are tried where every sequence of the batch has the fault.
OTHERS_TRIED = 8


def skip_batch(run: Run, step: Step) -> None:
    """Go on without the batch of ``step``: it counts as a step, and nothing else moves.

    Reports the batch and the place of the fault. Raises ``NotFinite`` where the batch is not the
    cause, and after more batches than the job may leave out.
    """
    run.monitor.report_alive(stepping=False)
    drop_gradients(run)
    if run.group.staged:
        # A gradient of one sequence alone would need a schedule of its own for each.
        raise make_error(run, step, "With train.strategy pipeline the batch is not searched.")
    # Every rank tries all sequences of the step, in the same order.
    faulty = [
        (number, batch.to(run.device))
        for number, batch in read_step_sequences(run.source, run.options, step.number)
        if not is_sound(run, step, batch.to(run.device))
    ]
    if is_sharded(run.loss_module):
        # The search looks at single modules, whose weights no rank has.
        where = "With train.strategy fsdp the place of the fault is not searched."
    else:
        own = [batch for _, batch in faulty]
        batches = own or [batch.to(run.device) for batch in step.micro_batches]
        compute_loss = partial(compute_mean_loss, run, step)
        where = locate_nonfinite(run.student, batches, run.loss.precision, compute_loss)
    numbers = sorted({number for number, _ in faulty})
    if not is_batch_at_fault(run, step, len(faulty)):
        raise make_error(run, step, f"{where} No other text is free of this fault.")
    if len(run.progress.skipped) >= run.checks.max_skipped:
        raise make_error(run, step, f"{where} {describe_sequences(numbers)}")
    step.left_out = True
    run.progress.step += 1
    run.progress.skipped.append(SkippedBatch(run.progress.step, numbers))
    verdict = make_skip_verdict(run, step, where)
    run.log.write_verdicts(run.progress.step, [verdict])
    run.monitor.emit("warning", message=verdict.message)


def is_batch_at_fault(run: Run, step: Step, faulty: int) -> bool:
    """Whether the batch is the cause, and not the weights; ``faulty`` of its sequences have it."""
    if run.group.any(not are_finite(run.trained)):
        return False
    options = run.options
    count = options.batch_size * options.gradient_accumulation_steps
    if faulty < count:
        return True
    steps = range(step.number + 1, step.number + 1 + math.ceil(OTHERS_TRIED / count))
    others = (
        batch.to(run.device)
        for number in steps
        for _, batch in read_step_sequences(run.source, options, number)
    )
    return any(is_sound(run, step, batch) for batch in itertools.islice(others, OTHERS_TRIED))


def is_sound(run: Run, step: Step, batch: Batch) -> bool:
    """Whether loss and gradients of ``batch`` alone are finite. The random state is kept.

    All ranks call it with the same batch, and get the same answer.
    """
    device = run.device
    sharded = is_sharded(run.loss_module)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Run and step are bound and no arguments: FSDP looks into those for tensors.
        work = partial(compute_mean_loss, run, step)
        loss: Tensor = run.loss_module(work, batch) if sharded else work(batch)
    # In float16 a gradient may overflow: the loss scaler skips such a step.
    enough = run.loss.precision.scales_loss or not loss.requires_grad
    finite = not run.group.any(not math.isfinite(loss.detach()))
    if not finite or enough:
        reshard(run.loss_module)
        return finite
    gradients: Iterable[Tensor | None]
    if sharded:
        loss.backward()
        gradients = [each.grad for each in run.trained]  # the parts that this rank has
        drop_gradients(run)
    else:
        gradients = torch.autograd.grad(loss, run.trained, allow_unused=True)
    return not run.group.any(not are_finite(each for each in gradients if each is not None))


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are finite that this rank has of ``tensors``."""
    return all(bool(torch.isfinite(get_own(each.detach())).all()) for each in tensors)


def compute_mean_loss(run: Run, step: Step, batch: Batch) -> Tensor:
    """The loss of ``batch`` per token, with the weights and the temperature of ``step``."""
    inputs = (step.alpha, run.loss.temperature.evaluate(step.number), step.mean_weight)
    return run.loss.compute(batch, *inputs).total / max(len(batch), 1)


def describe_sequences(numbers: list[int]) -> str:
    """Say which training sequences have the fault."""
    if not numbers:
        return "No sequence of the batch has this fault alone."
    names = format_names([*map(str, numbers)], NAMES_SHOWN)
    return f"Training sequences with this fault, counted from 0: {names}."


def make_error(run: Run, step: Step, where: str) -> NotFinite:
    """The error of a run that cannot go on without this batch."""
    most = run.checks.max_skipped
    skipped = run.progress.skipped
    newest = run.saver.find_newest()
    last_good = f"The last good checkpoint is {newest}. " if newest is not None else ""
    before = f"{len(skipped)} of at most {most} batches were left out before. " if skipped else ""
    return NotFinite(
        f"At step {step.number + 1} the loss is {step.loss} and the gradient's norm "
        f"{step.grad_norm}. {where}",
        f"{last_good}{before}Lower train.learning_rate, add warmup_steps, or use precision fp32. "
        "If only some texts have this fault, take them out of data.train, or raise "
        "checks.max_skipped.",
    )


def make_skip_verdict(run: Run, step: Step, where: str) -> Verdict:
    """The verdict on a batch that is left out, with its number among those of the run."""
    skipped = run.progress.skipped
    most = run.checks.max_skipped
    facts = asdict(skipped[-1])
    facts |= {"loss": step.loss, "grad_norm": step.grad_norm, "skipped": len(skipped)}
    message = (
        f"At step {step.number + 1} the loss is {step.loss:.4g} and the gradient's norm "
        f"{step.grad_norm:.4g}, twice: its batch is left out ({len(skipped)} of at most {most}). "
        f"{where} {describe_sequences(skipped[-1].sequences)}"
    )
    return Verdict("finite", False, message, "Look at these texts in data.train.", facts)
