"""After each step that was taken: its report, and an evaluation and a checkpoint where due."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict

from cache.errors import PotstillError
from cache.perplexity import raise_e
from kd.checks.dead_units import UnitWatch, watching_units
from kd.checks.slow_rank import RANK_SECONDS
from kd.checks.watch import StepSeconds
from kd.errors import Interrupted
from kd.models.layers import stopping_forward
from kd.models.precision import Precision, computing_in_float32
from kd.optim.averaging import serving
from kd.optim.schedules import observe_evaluation
from kd.parallel.strategies import call_whole
from kd.progress import SILENT, make_interruption
from kd.text.batches import Batch
from kd.text.text_bytes import compute_bits_per_byte
from kd.tracking.scalars import StepWork, measure_memory, name_scalars
from kd.training.early_stopping import find_best_step, is_out_of_patience, record_evaluation
from kd.training.evaluate import BatchScore, choose_evaluation_temperature, evaluate_student
from kd.training.run import Run
from kd.training.saved.state import Evaluation
from kd.training.steps import Step, is_reported, join_stages


def after_step(run: Run, step: Step) -> bool:
    """Report, evaluate and save what is due; returns whether early stopping ends the run.

    Raises ``Interrupted``, after a checkpoint, when a stop is asked for.
    """
    report_step(run, step)
    run.saver.poll()
    improved = False
    if run.progress.step % run.options.eval_steps == 0 or run.progress.step == run.steps:
        improved = evaluate_step(run)
    exhausted = is_out_of_patience(run.progress, run.options)
    stopping = run.should_stop()
    if is_save_due(run, improved) or exhausted or stopping:
        save_checkpoint(run)
    report_compilation(run)
    # A run whose last step is taken is not interrupted: it finishes.
    if stopping and not run.is_over:
        run.saver.finish()
        done = run.progress.step
        where = f"at step {done} of {run.steps} of the training; step {done + 1} is the next"
        raise make_interruption(where)
    return exhausted


# ---------------------------------------------------------------------- reports


def report_step(run: Run, step: Step) -> None:
    """Report progress and alarms of every step, and the metrics of some steps."""
    progress = run.progress
    temperature = run.loss.temperature
    run.monitor.emit("progress", **run.meter.advance(1, 0 if step.left_out else step.tokens))
    if step.left_out:
        return
    seconds = StepSeconds(step.waited, time.monotonic() - step.began)
    alarms = run.watch.observe_step(step.loss, step.ce_loss, step.grad_norm, seconds)
    run.log.write_verdicts(progress.step, alarms)
    slow_disk = run.disk_watch.observe_step(step.tokens, seconds)
    scale_alarm = run.scale_watch.describe_alarm() if run.checks.alarms else None
    for alarm in (temperature.describe_alarm(), scale_alarm, slow_disk):
        if alarm is not None:
            run.monitor.emit("warning", message=alarm)
    if temperature.learned:
        run.log.write_line("temperature", progress.step, **temperature.report())
    run.speed.count(
        StepWork(
            tokens=step.tokens,
            samples=run.options.sequences_per_step,
            waited=seconds.waited,
            worked=seconds.worked,
            pinned=sum(each.is_pinned for each in step.micro_batches) / len(step.micro_batches),
        )
    )
    if is_reported(run, step):
        report_metrics(run, step)
        report_scalars(run, step)
        run.log.write_verdicts(progress.step, run.watch.observe_layers(step.layer_norms))


def report_metrics(run: Run, step: Step) -> None:
    """Write the step's line of metrics.jsonl, and the gradient's norm in each group of layers."""
    # The step has waited for the device already, so that reading its clock costs nothing.
    run.clock.read_pending()
    run.log.write_line(
        "metrics",
        run.progress.step,
        loss=step.loss,
        kd_loss=step.kd_loss if run.source.codec is not None else None,
        ce_loss=step.ce_loss,
        train_perplexity=raise_e(step.ce_loss),
        alpha=step.alpha,
        learning_rate=step.learning_rates[0],
        grad_norm=step.grad_norm,
        tokens=run.progress.tokens,
        **run.loss.temperature.report(),
    )


def report_scalars(run: Run, step: Step) -> None:
    """Write the step's speed and memory, each layer's rate and gradient norm, each rank's time."""
    rates = {
        id(parameter): rate
        for (_, parameters), rate in zip(run.groups, step.learning_rates, strict=True)
        for parameter in parameters
    }
    named = {name: rates[id(parameters[0])] for name, parameters in run.layers}
    named |= {name: rate for (name, _), rate in zip(run.groups, step.learning_rates, strict=True)}
    named = join_stages(run, named)
    seconds = {} if run.group.alone else gather_seconds(run)
    scale = {"scale": step.loss_scale, "overflowed_steps": run.scale_watch.skipped}
    run.log.write_line(
        "scalars",
        run.progress.step,
        **run.speed.report(),
        **measure_memory(run.device),
        **name_scalars(RANK_SECONDS, seconds),
        **name_scalars("grad_norm", step.layer_norms | step.group_norms),
        **name_scalars("learning_rate", named),
        **name_scalars("loss_scale", scale if run.loss.precision.scales_loss else {}),
    )
    run.log.write_verdicts(run.progress.step, run.rank_watch.observe(seconds))


def gather_seconds(run: Run) -> dict[str, float]:
    """Return the seconds of a step that each rank did alone, a mean since the last report."""
    own = run.clock.lap(run.rank_watch.phases)
    return run.rank_watch.name(run.group.gather(own))


def report_compilation(run: Run) -> None:
    """After the first step of this process, report what was compiled and where the graph breaks."""
    if run.compilation is not None:
        run.log.write_verdicts(run.progress.step, [run.compilation.report()])
        run.compilation = None


# ---------------------------------------------------------------------- evaluation


def evaluate_step(run: Run) -> bool:
    """Make the evaluation after a step; returns whether it is the best so far.

    Raises ``Interrupted`` when a stop is asked for, after a checkpoint that knows what is due.
    """
    run.progress.evaluation_due = True
    try:
        found = evaluate_now(run)
    except Interrupted:
        save_checkpoint(run)
        run.saver.finish()
        raise
    run.progress.evaluation_due = False
    observe_evaluation(run.state.scheduler, found.get("validation_loss"))
    return record_evaluation(run.progress, found)


def finish_evaluation(run: Run) -> None:
    """Make the evaluation in which an earlier process was stopped, and save where that is due."""
    if run.progress.evaluation_due:
        improved = evaluate_step(run)
        if is_save_due(run, improved) or is_out_of_patience(run.progress, run.options):
            save_checkpoint(run)


def evaluate_now(run: Run, in_float32: bool = False) -> Evaluation:
    """Evaluate the student on the held-out sequences, and log the results.

    That is in the precision of the steps, or ``in_float32``.
    """
    # An evaluation may take longer than a supervisor waits for a step.
    run.monitor.report_alive(stepping=False)
    loss = run.loss
    stopped = f"in the evaluation after step {run.progress.step} of {run.steps}"

    units: UnitWatch | None = None
    # Hooks would make a compiled student compile anew.
    looks = run.checks.alarms and run.options.compile == "none"

    def call(work: Callable[[Batch], BatchScore], batch: Batch) -> BatchScore | None:
        nonlocal units
        # Ranks that compute together stop together: between two batches.
        if not run.group.alone and run.should_stop():
            raise make_interruption(stopped)
        if units is not None or not looks:
            return call_whole(run.loss_module, work, batch)
        with watching_units(run.student) as units:
            return call_whole(run.loss_module, work, batch)

    precision = Precision.choose("fp32", run.device) if in_float32 else loss.precision
    with (
        run.clock.phase("evaluation"),
        computing_in_float32(run.student) if in_float32 else nullcontext(),
        serving(run.student, run.state.optimizer, run.average),
        stopping_forward(run.monitor if run.group.alone else SILENT, stopped),
    ):
        found = evaluate_student(
            run.student,
            loss.lm_head,
            run.source,
            loss.decoder,
            run.options.batch_size,
            precision,
            run.device,
            choose_evaluation_temperature(loss.config),
            group=run.group,
            call=call,
        )
        texts = write_samples(run)
    if units is not None and units.largest and run.group.leads:
        shares = units.find_dead_shares()
        found["dead_units"] = sum(shares.values()) / len(shares)
        run.log.write_verdicts(run.progress.step, run.watch.observe_units(shares))
    size = 0 if run.samples is None else run.samples.text_bytes
    if size and (mean := found.get("validation_loss")) is not None:
        tokens = int(found["validation_tokens"] or 0)
        found["validation_bits_per_byte"] = compute_bits_per_byte(mean, tokens, size)
    run.log.write_line("evaluation", run.progress.step, **found)
    run.log.write_verdicts(run.progress.step, run.watch.observe_evaluation(found))
    if texts:
        run.log.write_line("samples", run.progress.step, texts=texts)
    return found


def write_samples(run: Run) -> list[dict[str, str]]:
    """Let the student continue prompts; empty where the job wants none, or it cannot.

    A training is not given up for samples.
    """
    # Ranks would have to run together, and a compiled student would compile for another shape.
    if run.samples is None or not run.group.alone or run.options.compile != "none":
        return []
    try:
        return run.samples.write(run.student, run.loss.lm_head, run.loss.precision, run.device)
    except PotstillError:
        raise
    except Exception as error:  # models raise any class where they cannot read a lone prompt
        run.samples = None
        message = f"The student could not continue a prompt: {type(error).__name__}: {error}."
        run.monitor.warn_once(f"{message} evaluation.samples: 0 leaves this out.")
        return []


# ---------------------------------------------------------------------- checkpoints


def is_save_due(run: Run, improved: bool) -> bool:
    """Whether a checkpoint is due.

    It is due at its interval, at the end, and after the best evaluation where early stopping is on.
    """
    step = run.progress.step
    keep_best = improved and run.options.early_stopping_patience is not None
    return step % run.options.save_steps == 0 or step == run.steps or keep_best


def save_checkpoint(run: Run) -> None:
    """Begin to write a checkpoint, which replaces the oldest beyond ``save_total_limit``."""
    progress = run.progress
    with run.clock.phase("checkpoint"):
        progress.watch = run.watch.state()
        progress.scale_watch = asdict(run.scale_watch)
        progress.phases = run.clock.dump()
        run.monitor.report_alive(stepping=False)
        best_step = find_best_step(progress, run.options)
        run.saver.save(run.state, run.identity, run.options.checkpoints_kept, best_step)
