"""The arguments of transformers' ``Trainer``, which several tools use, as our section ``train``.

Where a default of the other tool differs from ours, the job states theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from kd.config.train import TrainConfig
from kd.exchange.job_files.draft import Draft, Fields

#: Defaults of ``transformers.TrainingArguments``.
TRAINER_DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
}
#: Optimisers of other tools by our names; what they do with paged memory is left out.
OPTIMISERS = {
    "adamw": ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit",
              "paged_adamw", "adamw_apex_fused", "optimi_adamw", "flash_adamw"),
    "adamw_8bit": ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit",
                   "ao_adamw_8bit"),
    "adafactor": ("adafactor",),
    "lion": ("lion", "lion_32bit", "lion_pytorch", "paged_lion_32bit", "lion_8bit",
             "paged_lion_8bit", "flash_lion"),
    "muon": ("muon",),
    "schedule_free": ("schedule_free_adamw",),
}  # fmt: skip
#: Schedules of other tools by our names.
SCHEDULES = {"one_cycle": "onecycle"}
#: Numbers of the same meaning.
SAME = {
    "learning_rate": "learning_rate",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "seed": "seed",
    "save_total_limit": "save_total_limit",
    "early_stopping_patience": "early_stopping_patience",
    "dataloader_num_workers": "dataloader_num_workers",
    "dataloader_prefetch_factor": "dataloader_prefetch_factor",
}
#: Flags of the same meaning. "auto", which means that the hardware decides, is our default.
FLAGS = {
    "tf32": "tf32",
    "auto_find_batch_size": "auto_batch",
    "dataloader_pin_memory": "dataloader_pin_memory",
}
#: Why fields that begin with these texts have no counterpart.
REASONS = {
    "push_to_hub": "nothing is uploaded; the student is a folder of the run.",
    "hub_": "nothing is uploaded; the student is a folder of the run.",
    "gradient_checkpointing_kwargs": "not needed: layers are recomputed without reentrance.",
    "save_strategy": "checkpoints are written every train.save_steps steps.",
    "eval_strategy": "the held-out text is evaluated every train.eval_steps steps.",
    "evaluation_strategy": "the held-out text is evaluated every train.eval_steps steps.",
    "logging_strategy": "metrics are reported every train.logging_steps steps.",
    "resume_from_checkpoint": "a stopped run continues automatically from its newest checkpoint.",
    "deepspeed": "several GPUs: resources.gpus and train.strategy (ddp, fsdp or pipeline).",
    "fsdp": "several GPUs: resources.gpus, train.strategy fsdp, and train.fsdp_offload.",
    "remove_unused_columns": "not needed: only the columns of data.format are read.",
    "dataset_num_proc": "not needed: the text is tokenized once, when the cache is made.",
    "attn_implementation": "not needed: the fastest attention that is there is used.",
    "use_flash_attention": "not needed: the fastest attention that is there is used.",
    "flash_attention": "not needed: the fastest attention that is there is used.",
    "use_liger_kernel": "not needed: LM head and loss are fused here.",
    "ddp_": "several GPUs: resources.gpus and train.strategy ddp.",
    "padding_free": "not needed: with data.packing sequences are full.",
    "packing_strategy": "documents longer than a sequence are cut, and others are not.",
    "eval_packing": "held-out sequences are packed as those for training.",
    "chat_template": "the template is that of the tokenizer.",
    "per_device_eval_batch_size": "evaluation takes train.batch_size sequences at a time.",
    "trust_remote_code": "only a teacher's code can be run: teacher.trust_remote_code.",
    "run_name": "the job's name is its name in trackers.",
}
#: The remark of frozen weights that the other tool quantises.
NOT_QUANTISED = "the frozen weights are not quantised; where a GPU has bfloat16 they are in it."
_SCHEDULES = get_args(TrainConfig.model_fields["lr_scheduler_type"].annotation)
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def write_training(fields: Fields, draft: Draft, defaults: Mapping[str, Any]) -> None:
    """Write section ``train`` from a trainer's arguments; ``defaults`` are those of the tool."""
    _write_length(fields, draft, defaults)
    for name, ours in SAME.items():
        value = fields.take_number(name, defaults.get(name))
        if value is not None:
            draft.put(f"train.{ours}", value)
    for name, ours in FLAGS.items():
        value = fields.take(name, "auto")
        if value != "auto":
            draft.put(f"train.{ours}", value)
    if fields.take("group_by_length", False):
        draft.put("train.order", "length")
    _write_schedule(fields, draft, defaults)
    _write_optimiser(fields, draft)
    _write_precision(fields, draft, defaults)
    _write_memory(fields, draft, defaults)
    for name in ("logging_steps", "eval_steps", "save_steps"):
        _write_interval(fields, draft, name)
    _write_trackers(fields, draft)
    if (share := fields.take_number("label_smoothing_factor")) is not None:
        draft.put("loss.label_smoothing", share)


def _write_length(fields: Fields, draft: Draft, defaults: Mapping[str, Any]) -> None:
    steps = fields.take_number("max_steps", -1)
    epochs = fields.take_number("num_train_epochs", defaults["num_train_epochs"])
    if steps > 0:
        draft.put("train.max_steps", int(steps))
    else:
        draft.put("train.epochs", epochs)


def _write_schedule(fields: Fields, draft: Draft, defaults: Mapping[str, Any]) -> None:
    name = str(fields.take("lr_scheduler_type", defaults["lr_scheduler_type"]))
    name = SCHEDULES.get(name, name)
    if name in _SCHEDULES:
        draft.put("train.lr_scheduler_type", name)
    else:
        fields.remark(
            "lr_scheduler_type",
            f"{name} is not known; train.lr_scheduler_type is cosine. `kd lr` shows the rates.",
        )
    if arguments := fields.take("lr_scheduler_kwargs"):
        draft.put("train.lr_scheduler_kwargs", arguments)


def write_warmup(fields: Fields, draft: Draft, count: Callable[[float], int] = math.ceil) -> None:
    """Write the warm-up, after the schedule; ``count`` rounds a share of the steps to steps."""
    steps, share = fields.take_number("warmup_steps", 0), fields.take_number("warmup_ratio", 0.0)
    name = "warmup_steps" if steps else "warmup_ratio"
    if 0 < steps < 1:  # transformers reads it as a share of the run
        steps, share = 0, steps
    if draft.job["train"].get("lr_scheduler_type") == "constant":
        if steps or share:
            fields.remark(name, "the schedule constant has no warm-up.")
        return
    total = draft.job["train"].get("max_steps")
    if share and not steps and total is None:
        fields.remark(
            name,
            f"a warm-up is given in steps: set train.warmup_steps to {share:g} of the run's steps, "
            "which `kd estimate` prints.",
        )
        return
    if share and not steps:
        steps = count(share * total)
    if steps:
        draft.put("train.warmup_steps", int(steps))


def _write_optimiser(fields: Fields, draft: Draft) -> None:
    name = str(fields.take("optim", "adamw"))
    ours = next((ours for ours, theirs in OPTIMISERS.items() if name in theirs), None)
    if ours is None:
        fields.remark("optim", f"{name} is not known; train.optim is adamw.")
    elif ours != "adamw":
        draft.put("train.optim", ours)
    if ours == "lion":  # the Trainer gives it AdamW's betas; ours are arguments of its own
        train = dict(draft.job["train"])
        betas = {"beta1": train.pop("adam_beta1", 0.9), "beta2": train.pop("adam_beta2")}
        draft.put("train", train | {"optim_args": betas})
    if ours == "schedule_free":
        draft.put("train.lr_scheduler_type", "constant")
        fields.remark("optim", "needs no schedule; train.lr_scheduler_type is constant.")
    fields.dismiss("optim_args", "has no counterpart; our arguments are in train.optim_args.")


def _write_precision(fields: Fields, draft: Draft, defaults: Mapping[str, Any]) -> None:
    fp16 = fields.take("fp16", False)
    bf16 = fields.take("bf16", False if fp16 else defaults.get("bf16", False))
    if fp16 and bf16 in (False, "auto"):
        precision = "fp16"
    elif bf16 == "auto":
        precision = "auto"
    else:
        precision = "bf16" if bf16 else "fp32"
    draft.put("train.precision", precision)


def _write_memory(fields: Fields, draft: Draft, defaults: Mapping[str, Any]) -> None:
    recompute = fields.take("gradient_checkpointing", defaults.get("gradient_checkpointing", False))
    if recompute:
        draft.put("train.gradient_checkpointing", "full")
    offload = str(recompute).startswith("offload") or bool(
        fields.take("activation_offloading", False)
    )
    mode = fields.take("torch_compile_mode", "default")
    if compiled := fields.take("torch_compile", False):
        if mode != "default" and draft.job["train"].get("gradient_accumulation_steps", 1) > 1:
            fields.remark(
                "torch_compile_mode", f"{mode} cannot accumulate gradients here: default."
            )
            mode = "default"
        draft.put("train.compile", mode)
    if offload and compiled:
        fields.remark("activation_offloading", "cannot reach into compiled layers: left out.")
    elif offload:
        draft.put("train.activation_offload", True)


def _write_interval(fields: Fields, draft: Draft, name: str) -> None:
    steps = fields.take_number(name)
    if steps is None:
        return
    if steps >= 1:
        draft.put(f"train.{name}", int(steps))
    else:
        fields.remark(name, f"a share of the run; train.{name} counts steps.")


def _write_trackers(fields: Fields, draft: Draft) -> None:
    names = fields.take_list("report_to")
    if known := [name for name in names if name in _TRACKERS]:
        draft.put("train.report_to", known)
    if unknown := [str(name) for name in names if name not in (*_TRACKERS, "none")]:
        fields.remark("report_to", f"not known: {', '.join(unknown)}.")


def write_adapters(fields: Fields, draft: Draft, dropout: float, everywhere: bool = False) -> None:
    """Write section ``student.lora`` from the fields that begin with ``lora_``, after ``train``.

    ``everywhere`` = all linear layers get adapters, besides those that the file names.
    """
    draft.put("student.lora", {"dropout": fields.take_number("lora_dropout", dropout)})
    for name, ours in {"lora_r": "rank", "lora_alpha": "alpha"}.items():
        if (value := fields.take_number(name)) is not None:
            draft.put(f"student.lora.{ours}", value)
    targets = fields.take("lora_target_modules")
    if everywhere:  # so it is here by default
        pass
    elif isinstance(targets, list):
        draft.put("student.lora.targets", targets)
    elif targets is None:
        fields.remark(
            "lora_target_modules",
            "peft has a default for each architecture; here all linear layers get adapters.",
        )
    elif targets != "all-linear":
        fields.remark("lora_target_modules", "a pattern; student.lora.targets lists names.")
    for name in ("load_in_4bit", "load_in_8bit"):
        if fields.take(name, False):
            fields.remark(name, NOT_QUANTISED)
            write_lean_base(draft)


def write_lean_base(draft: Draft) -> None:
    """Hold frozen weights in bfloat16 where the job computes in it."""
    if draft.job["train"]["precision"] in ("auto", "bf16"):
        draft.put("student.lora.base", "bfloat16")


def make_name(path: Any) -> str:
    """A job's name from a folder or a project's name of any form."""
    last = str(path).rstrip("/").rpartition("/")[2].lower()
    text = "".join(each if each.isascii() and each.isalnum() else "-" for each in last).strip("-")
    return text[:63].strip("-") or "job"
