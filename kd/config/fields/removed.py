"""The fields that a job had in earlier versions: what is done now, and what to do instead.

In a job that a person writes, such a field is an error whose message says what to do instead. A
record holds every field of the version that wrote it, with its default if nobody set it:
``drop_removed`` leaves a field out if its value means what is done now. Another value stays, and
whoever reads the record gets the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RemovedField:
    """A field that is gone.

    ``instead`` tells a user what to do. ``meant`` are the values that mean what is done now, the
    default first; None if no value changes a number of a run. ``after`` is the field behind which
    it stood, if a checkpoint's identity has it.
    """

    instead: str
    meant: tuple[Any, ...] | None
    after: str | None = None


_ALARM = "Remove it: the bound of this alarm is fixed, and checks.alarms turns all alarms off."
_LOSS_SCALE = (
    "Remove it: the scale of fp16 begins at 65,536, halves at an overflow, and doubles after 2,000 "
    "steps. train.precision bf16 and fp32 need none."
)
_ADAM = "Write it into train.optim_args as {}, for adamw, adamw_8bit and schedule_free."
#: The removed fields by their dotted names.
REMOVED: dict[str, RemovedField] = {
    "checks.parity_tokens": RemovedField(
        "Remove it: the loss of 8 tokens is compared with a dense one when a run starts.", None
    ),
    "checks.gradients": RemovedField(
        "Remove it: a parameter without a gradient is one of the alarms, and checks.alarms turns "
        "all of them off.",
        None,
    ),
    "checks.initial_loss": RemovedField(_ALARM, None),
    "checks.exploding_norm": RemovedField(_ALARM, None),
    "checks.vanishing_norm": RemovedField(_ALARM, None),
    "checks.dead_activation": RemovedField(_ALARM, None),
    "checks.dead_share": RemovedField(_ALARM, None),
    "checks.loss_scale_falls": RemovedField(_ALARM, None),
    "checks.clipping_share": RemovedField(_ALARM, None),
    "checks.starvation_share": RemovedField(_ALARM, None),
    "checks.agreement_drop": RemovedField(_ALARM, None),
    "train.pipeline": RemovedField(
        "Remove it: the micro-batches of strategy pipeline are the forward passes of a step "
        "(train.gradient_accumulation_steps), and each of resources.gpus devices has one stage.",
        None,
    ),
    "train.trace_steps": RemovedField(
        "Remove it: profile.json has the seconds of each phase. For a trace of every operation, "
        "call kd.run_job within torch.profiler.profile.",
        None,
    ),
    "train.tf32": RemovedField(
        "Remove it: float32 products use TF32 on GPUs that have it. NVIDIA_TF32_OVERRIDE=0 in the "
        "environment of kd run, or of the worker, turns it off.",
        (True,),
        after="fp8",
    ),
    "train.dataloader_prefetch_factor": RemovedField(
        "Remove it: each thread reads two steps ahead; raise train.dataloader_num_workers.", None
    ),
    "train.dataloader_memory": RemovedField(
        "Remove it: decoded parts of the cache take 512 MiB, or an eighth of a smaller host's "
        "memory. train.order windows reads a larger cache once an epoch.",
        None,
    ),
    "train.dataloader_pin_memory": RemovedField(
        "Remove it: batches are always copied to a GPU from pinned memory.", None
    ),
    "evaluation.top_k": RemovedField("Remove it: the report compares the 5 best tokens.", None),
    "evaluation.bins": RemovedField("Remove it: the calibration error has 15 bins.", None),
    "evaluation.plots": RemovedField(
        "Remove it: a report always has its plots, as PNG files in the run's folder.", None
    ),
    "checks.max_rollbacks": RemovedField(
        "Remove it: a run returns to a checkpoint twice, and the next spike fails it. "
        "checks.spike_factor 0 does not look for spikes.",
        (2,),
    ),
    "teacher.timeout": RemovedField(
        "Remove it: a server has 10 minutes for an answer, and teacher.concurrency suits a slow "
        "one.",
        (120.0,),
        after="api_key_env",
    ),
    "teacher.retries": RemovedField(
        "Remove it: a request is repeated 6 times, and teacher.concurrency suits a slow server.",
        (6,),
        after="timeout",
    ),
    "loss.temperature.prior": RemovedField(
        "Remove it: the pull back to init is fixed; loss.temperature.min and max bound T.",
        (0.1,),
        after="learning_rate",
    ),
    "loss.temperature.ramp_steps": RemovedField(
        "Remove it: the reversed gradient grows to its full size over 100 steps.",
        (100,),
        after="target_entropy",
    ),
    "train.initial_loss_scale": RemovedField(_LOSS_SCALE, (65536.0,)),
    "train.loss_scale": RemovedField(
        _LOSS_SCALE,
        (
            {
                "initial": 65536.0,
                "growth_factor": 2.0,
                "growth_interval": 2000,
                "backoff_factor": 0.5,
            },
        ),
    ),
    "train.adam_beta1": RemovedField(_ADAM.format("beta1"), (0.9,), after="ema_decay"),
    "train.adam_beta2": RemovedField(_ADAM.format("beta2"), (0.95,), after="adam_beta1"),
    "train.adam_epsilon": RemovedField(_ADAM.format("eps"), (1e-8,), after="adam_beta2"),
    "student.init.attention_dropout": RemovedField(
        "Use train.dropout, which sets the dropout of the attention in each layer.",
        (0.0,),
        after="num_key_value_heads",
    ),
    "search.seed": RemovedField(
        "Remove it: the sampler has a fixed seed, and the same job tries the same values again.",
        (0,),
    ),
    "search.pruner": RemovedField(
        "Remove it: a trial that is worse than the median of the others is stopped.", ("median",)
    ),
    "loss.z_loss": RemovedField(
        "Remove it: the student's logits do not drift in a training with records.",
        (0.0,),
        after="label_smoothing",
    ),
    "train.adaptive_clipping": RemovedField(
        "Remove it: train.max_grad_norm clips the whole gradient.", (None,)
    ),
    "train.layer_lr_decay": RemovedField(
        "Remove it: all layers learn at train.learning_rate.", (1.0,), after="weight_decay"
    ),
    "train.batch_scaling": RemovedField(
        "Set train.learning_rate for the batch: times the ratio of the sequences of a step (rule "
        "linear), or times its square root (rule sqrt).",
        (None,),
    ),
}


def drop_removed(written: Any, place: str = "") -> Any:
    """Return the JSON of a job's record without the removed fields that mean what is done now.

    ``place`` is the dotted name of ``written`` itself, with a dot at its end; "" is the job.
    """
    if not isinstance(written, dict):
        return written
    kept = {}
    for name, value in written.items():
        field = REMOVED.get(f"{place}{name}")
        if field is None or (field.meant is not None and value not in field.meant):
            kept[name] = drop_removed(value, f"{place}{name}.")
    return kept


def restore_removed(sections: Any, place: str = "") -> Any:
    """Return the JSON of a job's sections with the removed fields that a checkpoint's identity has.

    So the identity is the one that the version before has computed. ``place`` as above.
    """
    if not isinstance(sections, dict):
        return sections
    restored: dict[str, object] = {}
    for name, value in sections.items():
        restored[name] = restore_removed(value, f"{place}{name}.")
        _append_removed(restored, place, name)
    return restored


def _append_removed(restored: dict[str, object], place: str, name: str) -> None:
    """Append the removed fields that stood behind the field ``name`` of the section ``place``."""
    for dotted, field in REMOVED.items():
        section, _, removed = dotted.rpartition(".")
        if f"{section}." == place and field.after == name and field.meant:
            restored[removed] = field.meant[0]
            _append_removed(restored, place, removed)
