"""The training loop: batches -> loss -> step, flat, top to bottom, no callbacks.

Everything that happens in a step is in ``run_loop``. What it needs is made by the functions below it and by the levers
(``kd/levers``), in the order of use. State lives in a checkpoint; called again with the same folder the loop goes on
from the newest whole one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cache.codec import UNKNOWN_ENTROPY
from kd import checkpoint
from kd.batches import Batch, Source, Waited, training_batches
from kd.checkpoint import Progress, TrainState
from kd.checks.gradients import gradients, layer_norms
from kd.checks.initial import initial_loss
from kd.checks.nonfinite import locate_nonfinite
from kd.checks.parity import parity
from kd.checks.verdict import Verdict
from kd.checks.watch import Seconds, Watch
from kd.config.job import JobConfig
from kd.config.train import TrainConfig
from kd.diagnostics.stopwatch import Stopwatch, flops_per_token, utilisation
from kd.diagnostics.trace import Trace
from kd.diagnostics.trackers import Trackers, telling
from kd.errors import ConfigError, NotFinite, OutOfMemory, Problem
from kd.evaluate import evaluate, evaluation_temperature
from kd.files import write_json
from kd.levers.averaging import Averager, serve, serving
from kd.levers.checkpointing import checkpoint_activations
from kd.levers.compiling import CompileReport, compile_student
from kd.levers.features import Features
from kd.levers.fitting import fitting, forget, memory_errors, rehearse, resized, smaller
from kd.levers.lookahead import LookAhead
from kd.levers.memory import estimate_memory, free_memory, optimizer_bytes, peak_memory, reset_peak_memory
from kd.levers.optimizers import make_optimizer
from kd.levers.ramps import ramp_value
from kd.levers.schedules import make_scheduler
from kd.levers.temperature import Seen, TemperatureControl
from kd.losses import LossTerms, Objective, distillation_loss
from kd.metrics import MetricsLog
from kd.models import head_of, require_context, require_document_isolation
from kd.precision import Precision, ScalerWatch, pick_device, set_tf32, target_hidden_states
from kd.progress import Meter, Monitor
from kd.resuming import resume_identity
from kd.targets import TargetDecoder

ENTROPIES_LOOKED_AT = 8  # sequences


def train(
    config: JobConfig, source: Source, student: PreTrainedModel, vocabulary: int, run_dir: Path, monitor: Monitor
) -> Progress:
    """Train ``student`` in place on ``source``; returns where it ended. ``student`` holds the final (or best) weights.

    Raises ``TrainingError`` where the loss is not finite, spikes too often, differs from a dense one or finds no
    memory, and ``Interrupted`` after a checkpoint when asked to stop.
    """
    with ExitStack() as closing:  # what stays open stands in the way of this process's next run, say a search's trial
        options = required(config.train)
        trackers = Trackers(config, options.report_to, run_dir, monitor)
        closing.callback(trackers.finish)
        trace = Trace(run_dir / "trace.json", options.trace_steps)
        closing.callback(trace.close)
        return run_loop(config, source, student, vocabulary, run_dir, telling(monitor, trackers), trace)


def run_loop(
    config: JobConfig,
    source: Source,
    student: PreTrainedModel,
    vocabulary: int,
    run_dir: Path,
    monitor: Monitor,
    trace: Trace,
) -> Progress:
    """All of ``train`` but what must be closed whatever happens."""
    options, checks, device = required(config.train), config.checks, pick_device()
    precision = Precision.choose(options.precision, device)
    set_tf32(device, options.tf32)
    folder, steps = run_dir / "checkpoints", total_steps(options, source.train_count)
    progress, watch, clock = Progress(), Watch(config), Stopwatch(device)

    # ---- student
    nn.Module.to(student, device)
    require_context(student, config.data.sequence_length)
    head = head_of(student, vocabulary)
    if config.data.packing:
        require_document_isolation(student)
    memory = estimate_memory(student, options, config.data.sequence_length, vocabulary, precision)
    if warning := memory.warning(free_memory(device)):
        monitor.emit("warning", message=warning)
    checkpoint_activations(student, options.gradient_checkpointing)
    compilation = compile_student(student, options.compile)

    # ---- loss
    objective, decoder = Objective.of(config.loss), TargetDecoder.of(source, device)
    require_served(config, decoder)
    require_entropies(config, source)
    temperature = TemperatureControl.of(config.loss.temperature, steps)
    features = None
    if config.loss.features.weight > 0 and decoder.head is not None:
        features = Features.of(config.loss.features, head.weight.shape[1], decoder.head.weight.shape[1]).to(device)

    def losses(batch: Batch, alpha: float, T: float | Tensor) -> LossTerms:
        with clock.phase("forward"):
            hidden_ND = target_hidden_states(student, batch, precision)
        with clock.phase("head"):
            targets = decoder.targets(batch.gold_N, batch.teacher, T)
            terms = distillation_loss(hidden_ND, head, targets, objective.at(alpha), options.logits_chunk)
            return terms if features is None else replace(terms, total=terms.total + features(hidden_ND, targets))

    def rehearsal(batch: Batch) -> Tensor:
        return losses(batch.to(device), ramp_value(config.loss.alpha, 0, steps), temperature.value(0)).total

    def parity_now() -> Verdict:
        batch = next(iter(training_batches(source, options, range(progress.step, progress.step + 1))))[0].to(device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            hidden_ND = target_hidden_states(student, batch, precision)
        alpha, T = ramp_value(config.loss.alpha, progress.step, steps), temperature.at(progress.step)
        targets = decoder.targets(batch.gold_N, batch.teacher, T)
        return parity(hidden_ND, head, targets, objective.at(alpha), checks.parity_tokens)

    # ---- optimiser, schedule, and all that a checkpoint holds
    optimizer = make_optimizer(student, features.parameters() if features else (), options, device)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scheduler = make_scheduler(optimizer, options, steps)
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scales_loss)
    average = Averager(student, options.ema_decay) if options.ema_decay is not None else None
    parts = {"temperature": temperature if temperature.learned else None, "features": features, "average": average}
    extras: dict[str, nn.Module] = {name: part for name, part in parts.items() if part is not None}
    state = TrainState(student, optimizer, scheduler, scaler, progress, extras)
    identity = resume_identity(config, str(source.identity))

    # ---- resume
    torch.manual_seed(options.seed)
    for problem in checkpoint.load_newest(folder, state, identity):
        monitor.emit("warning", message=problem)
    if options.auto_batch:
        options = fitted(options, source, state, rehearsal, monitor)
    ahead = None
    if temperature.follows_held_out:
        ahead = LookAhead(student, head, source, decoder, options.batch_size, precision, device)
    watch.restore(progress.watch)
    scale_watch = ScalerWatch(**progress.scale_watch)
    resumed = progress.first_evaluation is not None  # else all is done again, the evaluation before step 1 too
    log = MetricsLog(run_dir / "metrics.jsonl", monitor, progress.step if resumed else -1)
    meter = Meter(steps, "steps", done=progress.step)
    reset_peak_memory(device)

    def evaluate_now() -> dict[str, Any]:
        monitor.alive(stepping=False)
        with clock.phase("evaluation"), serving(student, optimizer, average):
            at = evaluation_temperature(config.loss)
            found = evaluate(student, head, source, decoder, options.batch_size, precision, device, at)
        log.evaluation(progress.step, found)
        log.verdicts(progress.step, watch.after_evaluation(found))
        return found

    if progress.first_evaluation is None:
        progress.first_evaluation = evaluate_now()
    if checks.parity_tokens:
        verdict = parity_now()
        if progress.step == 0:  # a resumed run checks again, but its history has no second line of it
            log.verdicts(0, [verdict])
        verdict.require()

    # Once, and again after each roll-back and where a step must be taken in smaller micro-batches.
    while progress.step < steps and not ran_out_of_patience(progress, options):
        forget()
        batches = Waited(training_batches(source, options, range(progress.step, steps)))
        for micro_batches in batches:
            began, step = time.monotonic(), progress.step
            monitor.alive(stepping=compilation is None)
            clock.add("data", batches.last)
            alpha, T = ramp_value(config.loss.alpha, step, steps), temperature.at(step)

            # ---- forward and backward over the micro-batches; the mean is over the tokens of all of them
            student.train()
            count = max(sum(len(batch) for batch in micro_batches), 1)
            sums = torch.zeros(4, device=device, dtype=torch.float64)
            try:
                with memory_errors(options, str(memory)):
                    for batch in (micro_batch.to(device) for micro_batch in micro_batches):
                        terms = losses(batch, alpha, T)
                        with clock.phase("backward"):
                            scaler.scale(terms.total / count).backward()
                        sums += torch.stack([terms.total.detach(), terms.kd, terms.ce, terms.entropy]).double()
            except OutOfMemory as refusal:
                options = shrunk(options, state, refusal, monitor)
                break
            loss, kd_loss, ce_loss, entropy = (sums / count).tolist()

            # ---- is it sound?
            scale = float(scaler.get_scale())
            scaler.unscale_(optimizer)
            reporting = (step + 1) % options.logging_steps == 0 or step + 1 == steps
            layers = layer_norms(student) if reporting else {}
            # Looked at before clipping, which makes 0 of all gradients where the norm is infinite.
            scaled = precision.scales_loss
            verdicts = first_verdicts(config, student, ce_loss, vocabulary, scaled) if step == 0 else []
            grad_norm = float(nn.utils.clip_grad_norm_(trained, options.max_grad_norm or math.inf))
            # The loss scaler skips a step whose gradients overflow, so in float16 an infinite norm is no error.
            if not math.isfinite(loss if precision.scales_loss else loss + grad_norm):
                where = locate_nonfinite(student, [batch.to(device) for batch in micro_batches], precision)
                raise not_finite(step + 1, loss, grad_norm, where, folder)
            log.verdicts(step, verdicts)
            if watch.spike(loss, ce_loss):
                verdict = watch.spiked(step + 1, loss, progress.rollbacks, newest(folder))
                if verdict.ok:
                    monitor.alive(stepping=False)
                    go_back(folder, state, identity, watch)
                    log.forget(progress.step)
                    meter.done = progress.step
                log.verdicts(progress.step, [verdict])
                if verdict.ok:
                    break
                if newest(folder) is not None:  # without one there is nothing to fail with: the run goes on
                    verdict.require()

            # ---- step
            learning_rate = scheduler.get_last_lr()[0]
            slope = ahead.slope(temperature, step, objective) if ahead is not None else None
            with memory_errors(options, str(memory)), clock.phase("optimizer"):  # the first step makes its state
                scaler.step(optimizer)
                taken = scale_watch.update(scaler, step + 1)
            if taken:  # else the gradients overflowed and the step was skipped
                scheduler.step()
                temperature.step(step, Seen(kd_loss, entropy, slope, scale))
                if average is not None:
                    average.update()
            optimizer.zero_grad(set_to_none=True)
            progress.step += 1
            progress.tokens += count
            progress.seconds += time.monotonic() - began

            # ---- report
            monitor.emit("progress", **meter.advance(1, count))
            alarms = watch.after_step(loss, ce_loss, grad_norm, Seconds(batches.last, time.monotonic() - began))
            log.verdicts(progress.step, alarms)
            for alarm in (temperature.alarm(), scale_watch.alarm()):
                if alarm is not None:
                    monitor.emit("warning", message=alarm)
            if temperature.learned:
                log.temperature(progress.step, temperature.report())
            if reporting:
                clock.settle()
                log.training(
                    step=progress.step,
                    loss=loss,
                    kd_loss=kd_loss if source.codec is not None else None,
                    ce_loss=ce_loss,
                    perplexity=perplexity(ce_loss),
                    alpha=alpha,
                    learning_rate=learning_rate,
                    grad_norm=grad_norm,
                    tokens=progress.tokens,
                    **temperature.report(),
                )
                log.layers(progress.step, layers)

            # ---- evaluate, save, stop
            improved = False
            if progress.step % options.eval_steps == 0 or progress.step == steps:
                improved = note_evaluation(progress, evaluate_now())
            exhausted = ran_out_of_patience(progress, options)
            keep_best = improved and options.early_stopping_patience is not None
            stopping = monitor.should_stop()
            if progress.step % options.save_steps == 0 or progress.step == steps or keep_best or exhausted or stopping:
                with clock.phase("checkpoint"):
                    progress.watch, progress.scale_watch = watch.state(), asdict(scale_watch)
                    monitor.alive(stepping=False)
                    path = checkpoint.save(folder, state, identity)
                    checkpoint.prune(folder, options.save_total_limit, best_step(progress, options))
                monitor.emit("checkpoint", step=progress.step, path=str(path))
            # ---- the first step tells what was compiled, some later ones where the time goes
            if compilation is not None:
                log.verdicts(progress.step, [compiled(compilation.report())])
                compilation = None
            if (written := trace.step()) is not None:
                monitor.emit("artifact", name=written.name, path=str(written))
            if exhausted:
                break
            if stopping and progress.step < steps:
                monitor.check(f"at step {progress.step} of {steps}")

    # ---- leave the weights in the student that are to be saved
    if meter.tokens:  # a run that finds everything done leaves the profile of the one that did it
        flops = flops_per_token(student, vocabulary, config.data.sequence_length)
        write_profile(run_dir, clock, progress, monitor, flops)
    if (kept := best_step(progress, options)) is not None:
        checkpoint.load_weights(folder / f"step-{kept:08d}", state)
    serve(student, optimizer, average)
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


def require_served(config: JobConfig, decoder: TargetDecoder) -> None:
    """Raise ``ConfigError`` where the records cannot serve the loss at every temperature it may come to."""
    if not config.needs_cache:
        return
    try:
        decoder.require(Objective.of(config.loss), *config.loss.temperatures)
    except ValueError as error:
        raise ConfigError([Problem("/loss", str(error), "See `kd cache info` for what a cache holds.")]) from error


def require_entropies(config: JobConfig, source: Source) -> None:
    """Raise ``ConfigError`` where tokens are to weigh by the teacher's entropy, and the first records hold none."""
    if config.loss.entropy_weighting == 0.0 or source.codec is None:
        return
    _, records = source.read(np.arange(min(source.train_count, ENTROPIES_LOOKED_AT)))
    if records is not None and len(records) and (records["entropy"] == UNKNOWN_ENTROPY).all():
        detail = "tokens weigh by the teacher's entropy, which the records of this cache do not hold."
        remedy = "Set it to 0, or capture with a local teacher."
        raise ConfigError([Problem("/loss/entropy_weighting", detail, remedy)])


def fitted(
    options: TrainConfig, source: Source, state: TrainState, loss: Callable[[Batch], Tensor], monitor: Monitor
) -> TrainConfig:
    """``options`` with the largest micro-batch that fits, or was found to; a step has as many sequences."""
    if state.progress.batch_size is not None:
        return resized(options, state.progress.batch_size)
    student: Any = state.model

    def attempt(tried: TrainConfig) -> None:
        whole = tried.model_copy(update={"order": "shuffled"})  # batches by length are cut to their text
        batch = next(iter(training_batches(source, whole, range(1))))[0]
        reserve = optimizer_bytes(student, tried)
        rehearse(lambda: loss(batch), [student, *state.extras.values()], reserve, student.device)

    found = fitting(options, attempt)
    if found != options:
        monitor.emit("warning", message=f"batch_size {options.batch_size} does not fit: {found.batch_size} is used.")
    state.progress.batch_size = found.batch_size
    return found


def shrunk(options: TrainConfig, state: TrainState, refusal: OutOfMemory, monitor: Monitor) -> TrainConfig:
    """``options`` in smaller micro-batches, for a step that ran out of memory although there was room for a rehearsal.

    Other processes may have taken it, or the allocator has no hole that is large enough. Nothing is left of the step's
    gradients. Raises ``refusal`` where the job does not allow that, where one sequence is the micro-batch already, and
    where the order of sequences goes by micro-batches.
    """
    found = smaller(options)
    if found is None or not options.auto_batch or options.order == "length":
        raise refusal
    state.optimizer.zero_grad(set_to_none=True)
    tried, step = options.batch_size, state.progress.step + 1
    monitor.emit(
        "warning", message=f"Memory ran out at step {step} with batch_size {tried}: {found.batch_size} is used."
    )
    state.progress.batch_size = found.batch_size
    return found


def first_verdicts(
    config: JobConfig, student: PreTrainedModel, ce_loss: float, vocabulary: int, scaled: bool
) -> list[Verdict]:
    """What the first backward pass shows of student and loss."""
    verdicts, fresh = [], config.student is not None and config.student.init is not None
    if config.checks.initial_loss:
        verdicts.append(initial_loss(ce_loss, vocabulary, fresh))
    if config.checks.gradients:
        verdicts.append(gradients(student, scaled))
    return verdicts


def compiled(report: CompileReport) -> Verdict:
    """A graph that breaks is no error, but it is slower than it looks."""
    facts = {"graphs": report.graphs, "breaks": list(report.breaks)}
    remedy = "" if not report.breaks else "See TORCH_LOGS=graph_breaks for where."
    return Verdict("compile", not report.breaks, f"{report}.", remedy, facts)


def not_finite(step: int, loss: float, grad_norm: float, where: str, checkpoints: Path) -> NotFinite:
    """The error of a run that diverged: where the first NaN is, and what is left to go on from."""
    kept = newest(checkpoints)
    return NotFinite(
        f"At step {step} the loss is {loss} and the gradient's norm {grad_norm}. {where}",
        f"The last good checkpoint is {kept}. " * (kept is not None)
        + "Lower train.learning_rate, add warmup_steps, or use precision fp32.",
    )


def newest(checkpoints: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    return next(reversed(checkpoint.list_checkpoints(checkpoints)), None)


def go_back(checkpoints: Path, state: TrainState, identity: str, watch: Watch) -> None:
    """Go on from the newest whole checkpoint with half the learning rate; saved, so that a stop does not forget it."""
    state.optimizer.zero_grad(set_to_none=True)
    checkpoint.roll_back(checkpoints, state, identity)
    watch.restore(state.progress.watch)
    checkpoint.save(checkpoints, state, identity)


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


def write_profile(run_dir: Path, clock: Stopwatch, progress: Progress, monitor: Monitor, flops: float) -> None:
    """profile.json: where this process spent its time, and how well it used its device."""
    rate = progress.tokens / progress.seconds if progress.seconds else 0.0
    profile = {
        "phases": [phase.to_json() for phase in clock.table()],
        "tokens_per_second": rate,
        "mfu": utilisation(rate, flops, clock.device),
        "peak_memory_bytes": peak_memory(clock.device),
    }
    write_json(run_dir / "profile.json", profile)
    monitor.emit("profile", **profile)
