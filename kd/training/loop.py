"""The training loop: batches -> loss -> step. It has no callbacks: ``run_loop`` calls each part.

    prepare             prepare.py      student, loss, optimiser, and the newest checkpoint
    check_start         loop.py         first evaluation; the fused loss against a dense one
    finish_evaluation   after_step.py   the evaluation in which an earlier process was stopped
    begin_step          steps.py        alpha and temperature of this step
    compute_gradients   steps.py        the next two; a second time where a number is not finite
    forward_backward    steps.py        loss of each micro-batch (step_loss.py), and its gradients
    measure_gradients   steps.py        norms and clipping
    skip_batch          skipping.py     a batch with a NaN or an infinity: the run goes on without
    roll_back           steps.py        after a spike of the loss: back to the newest checkpoint
    take_step           steps.py        optimiser, schedule, temperature, average of the weights
    after_step          after_step.py   metrics, alarms, evaluation, checkpoint
    finish              loop.py         profile.json, and the weights that are to be saved

All state of a run is in its checkpoints. Called again with the same folder, ``train`` goes on from
the newest one that is whole.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel

from kd.buckets.runs import find_own_run
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig
from kd.errors import OutOfMemory
from kd.files import write_json
from kd.memory.auto_batch import memory_errors, release_memory
from kd.memory.step_memory import read_peak_memory
from kd.optim.averaging import use_served_weights
from kd.parallel.group import ALONE, Group
from kd.parallel.strategies import call_whole
from kd.progress import Monitor
from kd.text.batches import Source
from kd.text.steps.reading import TimedIterator, read_training_batches
from kd.tracking.stopwatch import compute_utilisation
from kd.tracking.trackers import Trackers, add_trackers
from kd.training import checkpoint
from kd.training.after_step import after_step, evaluate_now, finish_evaluation
from kd.training.early_stopping import find_best_step
from kd.training.prepare import prepare
from kd.training.run import Run
from kd.training.samples import EvaluationSamples
from kd.training.saved.state import TrainingProgress
from kd.training.saved.uploads import CheckpointUploads
from kd.training.skipping import skip_batch
from kd.training.steps import (
    begin_step,
    compute_gradients,
    is_finite,
    roll_back,
    shrink_micro_batch,
    take_step,
)

#: Tokens whose loss and gradient are compared with a dense computation at the start.
PARITY_TOKENS = 8


def train(
    config: JobConfig,
    source: Source,
    student: PreTrainedModel,
    vocabulary: int,
    run_dir: Path,
    monitor: Monitor,
    group: Group = ALONE,
    uploads: CheckpointUploads | None = None,
    samples: EvaluationSamples | None = None,
) -> TrainingProgress:
    """Train ``student`` in place on ``source``, and return the progress at the end.

    ``uploads`` gets each checkpoint that was saved. ``samples`` are written at each evaluation.

    All ranks of ``group`` call it with the same arguments; their monitors alone may differ.
    Afterwards ``student`` holds the final weights, or the best ones where early stopping asks for
    them. Raises ``TrainingError`` where the loss is not finite, spikes too often, differs from a
    dense one or finds no memory, and ``Interrupted`` after a checkpoint when a stop is asked for.
    """
    trackers = Trackers(monitor)
    monitor = add_trackers(monitor, trackers)
    try:
        run = prepare(config, source, student, vocabulary, run_dir, monitor, group)
        if group.leads:
            trackers.start(config, run.options.report_to, run_dir, run.log.first)
        run.saver.uploads = uploads
        run.saver.memory = config.resources.memory
        run.saver.stored = find_own_run(run_dir) if group.apart else None
        run.samples = samples
        run.clock.restore(run.progress.phases)
        with memory_errors(run.options, str(run.memory)):
            check_start(run)
        try:
            finish_evaluation(run)
            run_loop(run)
            finish(run)
        finally:
            run.saver.close()
        return run.progress
    finally:
        # After an error too: open trackers would disturb the next run of this process, for example
        # the next trial of a search.
        trackers.finish()


def check_start(run: Run) -> None:
    """Evaluate the untrained student, and compare the fused loss with a dense one.

    The report sets this evaluation beside that of the finished student, which is in float32. Ranks
    evaluate in the precision of their steps, and ``kd.pipeline`` does it again for the report.
    Raises ``TrainingError`` where the two losses differ.
    """
    if run.progress.first_evaluation is None:
        found = evaluate_now(run, in_float32=run.group.alone)
        run.progress.first_evaluation = found
        # The first token of a document and of a sequence has none before it in its sequence.
        if run.source.validation_count and "validation_loss" not in found:
            run.monitor.emit(
                "warning",
                message=(
                    f"Held-out sequences: {run.source.validation_count}, and none has a token to "
                    "predict. So this run has no held-out loss: its report has no perplexity, and "
                    "early stopping and the schedule reduce_lr_on_plateau have no effect. Give "
                    "data.validation, or raise data.validation_fraction."
                ),
            )
    verdict = compare_losses(run)
    # A resumed run checks again, but writes no second line into its history.
    if run.progress.step == 0:
        run.log.write_verdicts(0, [verdict])
    verdict.require()


def compare_losses(run: Run) -> Verdict:
    """Compare the fused loss of ``PARITY_TOKENS`` tokens of the next batch with a dense one.

    A batch whose dense loss is not finite compares nothing, and will be left out: then the batch
    after it is taken, as often as the job may leave one out.
    """
    # These steps exist for a finished run too.
    steps = range(run.progress.step, run.progress.step + 1 + run.checks.max_skipped)
    for batch, *_ in read_training_batches(run.source, run.options, steps, run.group.readers):
        inputs = (batch, run.progress.step, PARITY_TOKENS)
        own = call_whole(run.loss_module, run.loss.check_parity, *inputs)
        # Only the last stage of a pipeline has one.
        shared = Verdict(**run.group.gather(own and asdict(own))[-1]) if run.group.staged else own
        assert shared is not None, "a rank that is no stage has a verdict of its own"
        verdict = shared
        if math.isfinite(verdict.facts["loss"]):
            break
    return verdict


def run_loop(run: Run) -> None:
    """Take all the steps that are left."""
    # The batches are read anew after a roll-back, and after a step that ran out of memory: it is
    # repeated with smaller micro-batches.
    while not run.is_over:
        release_memory()
        batches = TimedIterator(run.read_batches())
        for micro_batches in batches:
            step = begin_step(run, micro_batches, batches.last)
            try:
                compute_gradients(run, step)
            except OutOfMemory as error:
                shrink_micro_batch(run, error)
                break
            if not is_finite(run, step):
                skip_batch(run, step)
            elif run.watch.is_spike(step.loss, step.ce_loss) and roll_back(run, step):
                break
            else:
                take_step(run, step)
            if after_step(run, step):
                break


def finish(run: Run) -> None:
    """Write the profile, and leave in the student the weights that are to be saved."""
    run.saver.finish()
    # A run that found all its steps done keeps the profile of the process that took them.
    if run.meter.tokens:
        # The seconds of each phase in all attempts, speed and peak memory.
        progress = run.progress
        tokens_per_second = progress.tokens / progress.seconds if progress.seconds else 0.0
        profile = {
            "phases": [asdict(phase) for phase in run.clock.table()],
            "tokens_per_second": tokens_per_second,
            "mfu": compute_utilisation(tokens_per_second, run.speed.flops_per_token, run.device),
            "peak_memory_bytes": read_peak_memory(run.device),
        }
        if run.group.leads:
            write_json(run.folder / "profile.json", profile)
        run.monitor.emit("profile", **profile)
    if (best_step := find_best_step(run.progress, run.options)) is not None:
        checkpoint.load_weights(run.saver.bring(best_step), run.state)
    use_served_weights(run.student, run.state.optimizer, run.average)
