"""The parts of one optimiser step, in the order in which the loop calls them.

    begin_step -> compute_gradients (forward_backward -> measure_gradients) -> take_step

Three parts are called only where a step cannot be taken: ``shrink_micro_batch`` when memory runs
out, ``roll_back`` after a spike of the loss, and ``kd.training.skipping.skip_batch`` where the loss
or the gradient is not finite. ``kd.training.after_step`` reports, evaluates and saves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from kd.checks.gradients import check_gradients, compute_gradient_norms
from kd.checks.initial_loss import check_initial_loss
from kd.errors import OutOfMemory
from kd.loss.fused import LossTerms
from kd.loss.ramps import evaluate_ramp
from kd.loss.temperature import StepStatistics
from kd.memory.auto_batch import memory_errors, reduce_micro_batch
from kd.models.precision import forget_unscaling
from kd.parallel.sharded_files import make_whole
from kd.parallel.stages import StageLoss
from kd.parallel.strategies import is_sharded, synchronising
from kd.text.batches import Batch
from kd.text.steps.order import is_by_difficulty
from kd.training import checkpoint
from kd.training.early_stopping import find_best_step
from kd.training.run import Run


@dataclass
class Step:
    """One optimiser step: its inputs, and the measurements that the parts of the step fill in.

    Losses and entropy are means per token, in nats. ``grad_norm`` is the norm that
    ``max_grad_norm`` clips.
    """

    #: Counted from 0.
    number: int
    micro_batches: list[Batch]
    #: Seconds that the loop waited for the micro-batches.
    waited: float
    #: When the step began, by the monotonic clock.
    began: float
    alpha: float
    temperature: float | Tensor
    #: Positions that have a target, of all micro-batches of all ranks; at least 1.
    tokens: int
    #: The mean weight of the same positions; None where entropies weigh nothing.
    mean_weight: float | None = None
    loss: float = 0.0
    kd_loss: float = 0.0
    ce_loss: float = 0.0
    entropy: float = 0.0
    loss_scale: float = 1.0
    #: The rate of each group of the optimiser; the first is that of the LM head.
    learning_rates: list[float] = field(default_factory=list)
    grad_norm: float = 0.0
    #: Whether the batch is left out: then neither weights nor tokens count it.
    left_out: bool = False
    #: The norm of the gradient in each layer and each group of the optimiser, where it is reported.
    layer_norms: dict[str, float] = field(default_factory=dict)
    group_norms: dict[str, float] = field(default_factory=dict)


def begin_step(run: Run, micro_batches: list[Batch], waited: float) -> Step:
    """Start the next step, with the weight and the temperature that the schedules set for it."""
    began = time.monotonic()
    number = run.progress.step
    # The first step compiles, which may take longer than a supervisor waits for a step.
    run.monitor.report_alive(stepping=run.compilation is None)
    run.clock.add("data", waited)
    if run.dropout is not None and run.options.dropout is not None:
        run.dropout.set(evaluate_ramp(run.options.dropout, number, run.steps))
    return Step(
        number=number,
        micro_batches=micro_batches,
        waited=waited,
        began=began,
        alpha=run.loss.alpha_at(number),
        temperature=run.loss.temperature.track(number),
        tokens=max(run.group.readers.add(sum(len(batch) for batch in micro_batches)), 1),
        mean_weight=run.loss.measure_mean_weight(micro_batches, run.group.readers),
    )


def compute_gradients(run: Run, step: Step) -> None:
    """Compute loss and gradients of the step; a second time where they are not finite.

    Where a fault of the hardware or a rare draw of the dropout made them so, the second time is
    good. Raises ``OutOfMemory``.
    """
    forward_backward(run, step)
    measure_gradients(run, step)
    if is_finite(run, step):
        return
    drop_gradients(run)
    step.temperature = run.loss.temperature.track(step.number)
    forward_backward(run, step)
    measure_gradients(run, step)


def is_finite(run: Run, step: Step) -> bool:
    """Whether the loss and the gradient of the step are finite."""
    # The loss scaler skips a step whose gradients overflow, so in float16 an infinite norm is no
    # error.
    norm = 0.0 if run.loss.precision.scales_loss else step.grad_norm
    return math.isfinite(step.loss + norm)


def drop_gradients(run: Run) -> None:
    """Forget the gradients of a step that is not taken."""
    run.state.optimizer.zero_grad(set_to_none=True)
    forget_unscaling(run.state.scaler)


def forward_backward(run: Run, step: Step) -> None:
    """Add up the gradients of all micro-batches; the loss is the mean over all their tokens.

    Raises ``OutOfMemory``.
    """
    run.student.train()
    if run.loss.control is not None:
        run.loss.control.forget()
        run.loss.control.applies = not is_by_difficulty(run.source, run.options, step.number)
    # On the device and in float64: no micro-batch waits for the device, and long sums stay exact.
    sums = torch.zeros(4, device=run.device, dtype=torch.float64)

    def compute_share(batch: Batch) -> Tensor:
        # T is bound and no argument: DDP and FSDP move those to the GPU, where reading T waits.
        work = partial(
            run.loss.compute, alpha=step.alpha, T=step.temperature, mean_weight=step.mean_weight
        )
        terms: LossTerms = run.loss_module(work, batch)
        sums.add_(torch.stack([terms.total.detach(), terms.kd, terms.ce, terms.entropy]).double())
        # A mean over all tokens is a sum of the ranks' parts, and so are the gradients.
        return terms.total / step.tokens

    with memory_errors(run.options, str(run.memory)):
        if isinstance(run.loss_module, StageLoss):
            with run.clock.phase("stages"):
                run.loss_module.run_step(step.micro_batches, compute_share)
        else:
            for number, micro_batch in enumerate(step.micro_batches, start=1):
                with synchronising(run.loss_module, last=number == len(step.micro_batches)):
                    share = compute_share(micro_batch.to(run.device))
                    with run.clock.phase("backward"):
                        run.state.scaler.scale(share).backward()
    sums = run.group.add_(sums)
    step.loss, step.kd_loss, step.ce_loss, step.entropy = (sums / step.tokens).tolist()


def measure_gradients(run: Run, step: Step) -> None:
    """Unscale the gradients, measure their norms and clip them.

    The first step also checks the initial loss and every parameter's gradient.
    """
    step.loss_scale = float(run.state.scaler.get_scale())
    run.state.scaler.unscale_(run.state.optimizer)
    if is_reported(run, step):
        # The groups of stages are parts, whose norms tell nothing of the whole.
        groups = [] if run.group.staged else run.groups
        norms = compute_gradient_norms([*run.layers, *groups])
        step.group_norms = {name: norms.pop(name) for name, _ in groups}
        step.layer_norms = join_stages(run, norms)
    # Before clipping, which turns all gradients into 0 where the norm is infinite.
    first = step.number == len(run.progress.skipped)
    verdicts = []
    if first and run.checks.alarms:
        scaled = run.loss.precision.scales_loss
        tokens_N = torch.cat([each.tokens_BL.flatten()[each.rows_N] for each in step.micro_batches])
        verdicts = [
            check_initial_loss(step.ce_loss, run.loss.lm_head.vocabulary, run.is_fresh),
            check_gradients(run.student, scaled, run.group, tokens_N),
        ]
    limit = run.options.max_grad_norm or math.inf
    # By the common norm of all ranks.
    if isinstance(run.loss_module, StageLoss):
        norm = run.loss_module.clip_(run.trained, limit)
    else:
        norm = make_whole(nn.utils.clip_grad_norm_(run.trained, limit))
    step.grad_norm = float(norm)
    if is_finite(run, step):
        run.log.write_verdicts(step.number, verdicts)


def join_stages(run: Run, own: dict[str, float]) -> dict[str, float]:
    """Return the numbers of the layers of all stages; what two stages have, as the first has it."""
    if not run.group.staged:
        return own
    joined: dict[str, float] = {}
    for stage in run.group.gather(own):
        joined |= {name: number for name, number in stage.items() if name not in joined}
    return joined


def is_reported(run: Run, step: Step) -> bool:
    """Whether the step's metrics are written: every ``logging_steps`` steps, and at the end."""
    number = step.number + 1
    return number % run.options.logging_steps == 0 or number == run.steps


# ---------------------------------------------------------------------- steps that fail


def shrink_micro_batch(run: Run, error: OutOfMemory) -> None:
    """Set smaller micro-batches after a step ran out of memory; its gradients are dropped.

    It happens although the rehearsal had room: other processes may have taken memory since, or the
    allocator has no hole that is large enough. Raises ``error`` where the job does not allow
    smaller micro-batches, where a micro-batch is one sequence already, and where the order of the
    sequences depends on the micro-batches.
    """
    options = run.options
    reduced = reduce_micro_batch(options)
    if reduced is None or not options.auto_batch or options.order == "length":
        raise error
    # The other ranks are in the middle of the step, and cannot begin it anew.
    if not run.group.alone:
        raise error
    run.state.optimizer.zero_grad(set_to_none=True)
    message = (
        f"Memory ran out at step {run.progress.step + 1} with batch_size {options.batch_size}: "
        f"{reduced.batch_size} is used."
    )
    run.monitor.emit("warning", message=message)
    run.progress.batch_size = reduced.batch_size
    run.options = reduced


def roll_back(run: Run, step: Step) -> bool:
    """Go back to the newest checkpoint with half the learning rate; False where there is none.

    Raises ``TrainingError`` after more roll-backs than the job allows.
    """
    newest = run.saver.find_newest()
    rollbacks = run.progress.rollbacks
    verdict = run.watch.make_spike_verdict(step.number + 1, step.loss, rollbacks, newest)
    if verdict.ok:
        run.monitor.report_alive(stepping=False)
        run.state.optimizer.zero_grad(set_to_none=True)
        checkpoint.roll_back(run.checkpoints, run.state, run.identity)
        run.watch.restore(run.progress.watch)
        # Saved at once: a run that is stopped now resumes with the lower rate.
        best_step = find_best_step(run.progress, run.options)
        run.saver.save(run.state, run.identity, run.options.checkpoints_kept, best_step)
        run.saver.finish()
        run.log.drop_after(run.progress.step)
        run.meter.done = run.progress.step
    run.log.write_verdicts(run.progress.step, [verdict])
    # Without a checkpoint the run goes on: an error would have no good state to point at.
    if not verdict.ok and newest is not None:
        verdict.require()
    return verdict.ok


# ---------------------------------------------------------------------- the step itself


@contextmanager
def rounding_alike(run: Run, step: Step) -> Iterator[None]:
    """Set the random numbers of the block, which rounds the weights stochastically.

    The generators of the ranks differ, because their dropout does. Copies of a weight are rounded
    by the same numbers on all ranks; parts of it by others on each.
    """
    if run.group.alone or not run.options.is_pure_bfloat16:
        yield
        return
    part = run.group.rank if is_sharded(run.loss_module) else 0
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(hash((run.options.seed, step.number, part)))
        yield


def take_step(run: Run, step: Step) -> None:
    """Update weights, learning rate, temperature and average of the weights, and count the step."""
    state = run.state
    step.learning_rates = [float(rate) for rate in state.scheduler.get_last_lr()]
    slope = None
    # Memory may run out here too: look-ahead has gradients of its own, and the first step allocates
    # the optimiser's state.
    with memory_errors(run.options, str(run.memory)):
        if run.look_ahead is not None:
            control, objective = run.loss.temperature, run.loss.objective
            slope = run.look_ahead.compute_slope(control, step.number, objective)
    with (
        memory_errors(run.options, str(run.memory)),
        run.clock.phase("optimizer"),
        rounding_alike(run, step),
    ):
        state.scaler.step(state.optimizer)
        taken = run.scale_watch.update(state.scaler, step.number + 1)
    # The scaler skips a step whose gradients overflowed: then nothing else moves either.
    if taken:
        state.scheduler.step()
        # The temperature's own gradient is outside of the module whose gradients are added up.
        statistics = StepStatistics(step.kd_loss, step.entropy, slope, step.loss_scale)
        run.loss.temperature.step(step.number, statistics, run.group)
        if run.loss.control is not None:
            run.loss.control.step(run.group)
        if run.average is not None:
            run.average.update()
    state.optimizer.zero_grad(set_to_none=True)
    run.progress.step += 1
    run.progress.tokens += step.tokens
    run.progress.seconds += time.monotonic() - step.began
