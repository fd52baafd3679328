"""Read a job of axolotl: one with its KD plugin, or plain fine-tuning and a teacher to distil from.

Format: axolotl-ai-cloud/axolotl, src/axolotl/integrations/kd. The loss is kd_ce_alpha CE + kd_alpha
KD, the KD part multiplied by T^2. The teacher is a server (``kd_online_server_base_url``), or its
records lie in the dataset.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from kd.exchange.job_files.draft import (
    UNKNOWN_FINGERPRINT,
    Draft,
    Fields,
    describe_source,
    list_files,
    require_one_teacher,
)
from kd.exchange.job_files.training import (
    NOT_QUANTISED,
    REASONS,
    make_name,
    write_adapters,
    write_lean_base,
    write_training,
    write_warmup,
)

#: axolotl's names of the arguments of transformers' Trainer.
ALIASES = {
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}
DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 1.0,
    "per_device_train_batch_size": 1,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "cosine",
    "bf16": "auto",
}
#: The warm-up of a file that gives none: a share of the steps, and the most steps.
WARMUP_SHARE, WARMUP_MOST = 0.03, 100
#: The type of datasets that hold a teacher's records.
RECORDS = "axolotl.integrations.kd"
#: Fields of training that is no distillation and no fine-tuning on texts.
OTHER_TRAINING = ("rl", "reward_model", "process_reward_model", "num_labels", "diffusion")
#: Plugins whose work is done here without them.
PLUGINS = (RECORDS, "integrations.liger", "integrations.cut_cross_entropy")
#: Our format of each type of dataset.
FORMATS = {"chat_template": "messages", "alpaca": "alpaca", "sharegpt": "sharegpt",
           "completion": "auto", "pretrain": "auto"}  # fmt: skip
#: The messages of ShareGPT, as ``message_property_mappings`` describes them.
SHAREGPT = {"role": "from", "content": "value"}
#: Suffixes of paths that are files, not datasets.
SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
_ONE_TEMPERATURE = "records of profile topk serve temperature 1 only: loss.temperature is 1."
_REASONS = REASONS | {
    "liger": "not needed: LM head and loss are fused here.",
    "dataset_prepared_path": "not needed: the cache keeps the tokens.",
    "skip_prepare_dataset": "not needed: the cache keeps the tokens.",
    "pad_to_sequence_len": "not needed: with data.packing sequences are full.",
    "eval_sample_packing": "held-out sequences are packed in the same way as the training text.",
    "model_type": "the architecture in the model's config.json is used.",
    "tokenizer_type": "the tokenizer in the model's folder is used.",
    "special_tokens": "the tokenizer's special tokens are used; change them in its folder.",
    "eot_tokens": "the template's tokens end an answer.",
    "kd_normalize_topk": "the mass of the rest is one bucket here; nothing is renormalised.",
    "kd_compiled_kernel": "not needed: the loss has its own kernels.",
    "kd_online_max_new_tokens": "the teacher generates nothing here; it scores the text.",
    "kd_prepared_targets_alignment": "current: `kd cache import axolotl --ahead`; legacy: without.",
    "batch_size": "axolotl goes by gradient_accumulation_steps (default 1), and so does the job.",
    "eval_batch_size": "evaluation takes train.batch_size sequences at a time.",
    "evals_per_epoch": "set train.eval_steps.",
    "saves_per_epoch": "set train.save_steps.",
    "train_on_inputs": "data.assistant_only_loss: false learns the prompts too.",
    "wandb_": "Weights & Biases reads its own environment variables (WANDB_PROJECT and others).",
    "mlflow_": "MLflow reads its own environment variables (MLFLOW_TRACKING_URI and others).",
}


def read_job(data: Any, draft: Draft, teacher: str | None = None) -> None:
    """Write the job of a parsed file into the draft; ``teacher`` is that of plain fine-tuning."""
    fields = Fields(data, draft, aliases=ALIASES)
    base = fields.take("base_model")
    if base is None:
        raise fields.refuse("base_model", "is missing.", "Give a job file of axolotl.")
    online = "kd_online_server_base_url" in fields
    distils = online or _has_records(data)
    _require_distillation(fields, distils, teacher)
    draft.put("name", make_name(fields.take("output_dir", "job")))
    draft.put("student.model", base)
    if (revision := fields.take("revision_of_model")) is not None:
        draft.put("student.revision", revision)
    tokenizer = fields.take("tokenizer_config", base)
    if online:
        _read_server(fields, draft, tokenizer)
    elif distils:
        _point_to_import(fields, draft, tokenizer)
    else:
        draft.put("kind", "distill")
        draft.put("teacher.model", teacher)
        draft.remark("teacher", "the file trains by cross-entropy; loss is our default.")
    if distils:
        _read_loss(fields, draft)
    _read_data(fields, draft, has_text=online or not distils)
    _read_plugins(fields)
    _read_trackers(fields, draft)
    _write_training(fields, draft)
    _read_adapters(fields, draft)
    fields.close(_REASONS)


def _has_records(data: Any) -> bool:
    """Whether the file trains from a teacher's records that its datasets hold."""
    if data.get("kd_trainer"):
        return True
    sources = data.get("datasets")
    return isinstance(sources, list) and any(
        RECORDS in str(each.get("type")) for each in sources if isinstance(each, dict)
    )


def _require_distillation(fields: Fields, distils: bool, teacher: str | None) -> None:
    """Raise ``ConfigError`` for another kind of training, and for too few or many teachers."""
    for name in OTHER_TRAINING:
        if fields.take(name):
            raise fields.refuse(name, "is another kind of training: only distillation is offered.")
    require_one_teacher(
        distils,
        teacher,
        f"kd_trainer, no kd_online_server_base_url and no dataset of type {RECORDS}.chat_template",
    )


def _read_server(fields: Fields, draft: Draft, tokenizer: Any) -> None:
    draft.put("kind", "distill")
    draft.put("teacher.backend", "http")
    draft.put("teacher.url", str(fields.take("kd_online_server_base_url")).rstrip("/"))
    model = fields.take("kd_online_server_model")
    draft.put("teacher.model", model or "default")
    if model is None:
        fields.remark("kd_online_server_model", "teacher.model must be the server's name of it.")
    draft.put("teacher.tokenizer", tokenizer)
    if (seconds := fields.take_number("kd_online_timeout")) is not None:
        draft.put("teacher.timeout", seconds)
    draft.put("cache", {"profile": "topk", "k": fields.take("kd_online_topk", 64)})
    if (server := fields.take("kd_online_server", "vllm")) != "vllm":
        fields.remark(
            "kd_online_server",
            f"{server}: the server must answer prompt_logprobs of /v1/completions, as vLLM does.",
        )


def _point_to_import(fields: Fields, draft: Draft, tokenizer: Any) -> None:
    draft.put("kind", "train")
    draft.put("cache.fingerprint", UNKNOWN_FINGERPRINT)
    fields.remark(
        "datasets",
        f"`kd cache import axolotl FILES --tokenizer {tokenizer}` makes a cache of these records: "
        "put its fingerprint into cache.fingerprint.",
    )


def _read_loss(fields: Fields, draft: Draft) -> None:
    fields.take("kd_trainer")
    hard = fields.take_number("kd_ce_alpha", 0.0)
    soft = fields.take_number("kd_alpha", 1.0)
    total = hard + soft or 1.0
    draft.put("loss.alpha", round(hard / total, 6))
    if total != 1.0:
        fields.remark("kd_alpha", f"kd_alpha and kd_ce_alpha sum to {total:g}; here they sum to 1.")
    if fields.take_number("kd_temperature", 1.0) != 1.0:
        fields.remark("kd_temperature", _ONE_TEMPERATURE)
    if fields.take_number("kd_temperature_min", 1.0) != 1.0:
        fields.remark("kd_temperature_min", _ONE_TEMPERATURE)
    if fields.take_number("kd_beta", 0.0):
        fields.remark("kd_beta", "such records serve KL(teacher || student) only (kd_beta 0).")


# ---------------------------------------------------------------------- data


def _read_data(fields: Fields, draft: Draft, has_text: bool) -> None:
    names = ("datasets", "pretraining_dataset")
    read = _read_text_source if has_text else _read_record_source
    sources = [each for name in names for part in fields.take_sections(name)
               for each in read(part, draft)]  # fmt: skip
    tests = [each for part in fields.take_sections("test_datasets") for each in read(part, draft)]
    share = fields.take_number("val_set_size", 0.0)
    length = fields.take_number("sequence_len", 512)
    packing = fields.take("sample_packing", False)
    if not has_text:  # the cache has the text, as long and as packed as it was imported
        for name, option in {"val_set_size": share, "sequence_len": length}.items():
            if option:
                fields.remark(name, f"{option:g} is an option of `kd cache import`.")
        return
    if not sources:
        raise fields.refuse("datasets", "is missing.", "Give a job file of axolotl.")
    draft.put("data.train", sources)
    if tests:
        draft.put("data.validation", tests)
    elif share <= 0.5:
        draft.put("data.validation_fraction", share)
    else:
        fields.remark("val_set_size", "counts rows; data.validation_fraction is a share.")
    draft.put("data.sequence_length", length)
    draft.put("data.packing", packing)


def _read_text_source(fields: Fields, draft: Draft) -> list[Any]:
    """Read a dataset of texts: files as texts, and others as mappings."""
    _read_format(fields, draft)
    made, files = _read_place(fields)
    named = list_files(made.get("path"), files, made.get("split"))
    if files and not named:
        fields.remark("data_files", "name the files themselves in data.train.")
    if PurePath(str(made.get("path"))).suffix in SUFFIXES:
        named = [str(made["path"])]
    fields.close(
        {
            "ds_type": "not needed: the suffix of a file says its format.",
            "roles_to_train": "data.assistant_only_loss: the assistant's tokens are learned.",
            "train_on_e": "the end of an answer is learned.",
            "chat_template": "the template is that of the tokenizer.",
        }
    )
    return named or [made]


def _read_record_source(fields: Fields, draft: Draft) -> list[Any]:
    """Read a dataset of records, of which the job has nothing: they are imported."""
    made, files = _read_place(fields)
    kind = fields.take("type")
    given = made | ({"files": files} if files else {}) | ({"type": kind} if kind else {})
    fields.remark("path", f"import {describe_source(given)}; its text is in the cache then.")
    fields.dismiss("temperature", "records must have temperature 1 to be imported.")
    if (column := fields.take("field_messages", "messages")) != "messages":
        fields.remark(
            "field_messages", f"`kd cache import` reads the column messages: rename {column}."
        )
    fields.close({"logprobs_field": "`kd cache import` reads the column logprobs: rename it."})
    return []


def _read_place(fields: Fields) -> tuple[dict[str, Any], list[Any]]:
    """Take where a dataset is, and its ``data_files``."""
    names = ("path", "name", "split", "revision")
    found = {name: fields.take(name) for name in names}
    made = {name: value for name, value in found.items() if value is not None}
    return made, fields.take_list("data_files")


def _read_format(fields: Fields, draft: Draft) -> None:
    """Write the format of a dataset; the job has one for all of them."""
    kind = fields.take("type")
    known = FORMATS.get(str(kind).partition(".")[0])
    column = fields.take("field_messages")
    mapping = _read_mapping(fields)
    if known == "messages" and (mapping == SHAREGPT or column == "conversations"):
        known = "sharegpt"
    expected = {"messages": "messages", "sharegpt": "conversations"}.get(str(known))
    if column is not None and expected not in (None, column):
        fields.remark("field_messages", f"rename the column {column} to {expected}.")
    if mapping not in ({}, SHAREGPT):
        fields.remark("message_property_mappings", "rename the keys of messages to role, content.")
    text = fields.take("field") or fields.take("text_column")
    if text is not None:
        draft.put("data.text_column", text)
    if known is None:
        if kind is not None:
            fields.remark("type", f"{kind} is not known; set data.format.")
    elif draft.job.get("data", {}).get("format", known) != known:
        fields.remark("type", f"{kind} differs from that of another dataset; data.format is one.")
    else:
        draft.put("data.format", known)


def _read_mapping(fields: Fields) -> dict[str, Any]:
    """Take the keys of messages by their meaning, without those that are as in ``messages``."""
    mapping = fields.section("message_property_mappings").take_all()
    for meaning in ("role", "content"):
        if (key := fields.take(f"message_field_{meaning}")) is not None:
            mapping[meaning] = key
    return {meaning: key for meaning, key in mapping.items() if meaning != key}


# ---------------------------------------------------------------------- training


def _write_training(fields: Fields, draft: Draft) -> None:
    floor = fields.take_number("cosine_min_lr_ratio")
    for name, ours in {"bfloat16": "bf16", "float16": "fp16"}.items():
        if fields.take(name, False):
            fields.remark(name, f"weights stay in float32; train.precision is {ours}.")
            fields.set(ours, True)
    write_training(fields, draft, DEFAULTS)
    _write_warmup(fields, draft)
    if floor and draft.job["train"].get("lr_scheduler_type") == "cosine":
        draft.put("train.lr_scheduler_type", "cosine_with_min_lr")
        draft.put("train.lr_scheduler_kwargs", {"min_lr_rate": floor})
    elif floor is not None:
        fields.remark("cosine_min_lr_ratio", "only the schedule cosine has it, and not 0.")


def _write_warmup(fields: Fields, draft: Draft) -> None:
    """Write the warm-up. axolotl has one by default, and makes one step two."""
    train = draft.job["train"]
    if "warmup_steps" in fields or "warmup_ratio" in fields:
        write_warmup(fields, draft, int)
        if train_steps := draft.job["train"].get("warmup_steps"):
            draft.put("train.warmup_steps", max(train_steps, 2))
    elif train.get("lr_scheduler_type") == "constant":
        return
    elif (total := train.get("max_steps")) is None:
        fields.remark(
            "warmup_ratio",
            f"axolotl's default is a warm-up over {WARMUP_SHARE:g} of the run's steps, and at most "
            f"{WARMUP_MOST}: set train.warmup_steps. `kd estimate` tells the steps.",
        )
    elif steps := min(int(WARMUP_SHARE * total), WARMUP_MOST):
        draft.put("train.warmup_steps", max(steps, 2))


def _read_adapters(fields: Fields, draft: Draft) -> None:
    adapter = fields.take("adapter")
    if adapter is None:
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
                     "lora_target_linear"):  # fmt: skip
            fields.dismiss(name, "the file has no adapter.")
        for name in ("load_in_4bit", "load_in_8bit"):
            if fields.take(name, False):
                fields.remark(name, "weights are not quantised.")
        return
    if adapter not in ("lora", "qlora"):
        raise fields.refuse("adapter", f"is {adapter}, but only lora and qlora can be read.")
    everywhere = fields.take("lora_target_linear", False)
    write_adapters(fields, draft, dropout=0.0, everywhere=everywhere)
    if adapter == "qlora":
        fields.remark("adapter", NOT_QUANTISED)
        write_lean_base(draft)


def _read_plugins(fields: Fields) -> None:
    names = [str(each) for each in fields.take_list("plugins")]
    other = [name for name in names if not any(each in name for each in PLUGINS)]
    if names:
        fields.remark("plugins", f"not read: {', '.join(other)}." if other else "not needed.")


def _read_trackers(fields: Fields, draft: Draft) -> None:
    wanted = {
        "wandb": "wandb_project" in fields or fields.take("use_wandb", False),
        "tensorboard": fields.take("use_tensorboard", False),
        "mlflow": fields.take("use_mlflow", False) or "mlflow_tracking_uri" in fields,
        "trackio": fields.take("use_trackio", False),
    }
    if names := [name for name, used in wanted.items() if used]:
        draft.put("train.report_to", names)
