"""Read a job of axolotl with its KD plugin.

Format: axolotl-ai-cloud/axolotl, src/axolotl/integrations/kd. The loss is kd_ce_alpha CE + kd_alpha
KD, the KD part multiplied by T^2. The teacher is a server (``kd_online_server_base_url``), or its
records lie in the dataset.
"""

from __future__ import annotations

from typing import Any

from kd.exchange.job_files.draft import (
    UNKNOWN_FINGERPRINT,
    Draft,
    Fields,
    describe_source,
)
from kd.exchange.job_files.training import REASONS, make_name, write_adapters, write_training

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
}
#: Our format of each type of dataset.
FORMATS = {"chat_template": "messages", "alpaca": "alpaca", "sharegpt": "sharegpt",
           "completion": "auto", "pretrain": "auto"}  # fmt: skip
_ONE_TEMPERATURE = "records of profile topk serve temperature 1 only: loss.temperature is 1."
_REASONS = REASONS | {
    "plugins": "not needed.",
    "liger": "not needed: LM head and loss are fused here.",
    "dataset_prepared_path": "not needed: the cache keeps the tokens.",
    "skip_prepare_dataset": "not needed: the cache keeps the tokens.",
    "pad_to_sequence_len": "not needed: with data.packing sequences are full.",
    "chat_template": "the tokenizer's own template is used.",
    "model_type": "the architecture in the model's config.json is used.",
    "tokenizer_type": "the tokenizer in the model's folder is used.",
    "special_tokens": "the tokenizer's special tokens are used; change them in its folder.",
    "kd_normalize_topk": "the mass of the rest is one bucket here; nothing is renormalised.",
    "kd_compiled_kernel": "not needed: the loss has its own kernels.",
    "kd_online_max_new_tokens": "the teacher generates nothing here; it scores the text.",
    "evals_per_epoch": "set train.eval_steps.",
    "saves_per_epoch": "set train.save_steps.",
    "wandb_": "Weights & Biases reads its own environment variables (WANDB_PROJECT and others).",
    "mlflow_": "MLflow reads its own environment variables (MLFLOW_TRACKING_URI and others).",
}


def read_job(data: Any, draft: Draft) -> None:
    """Write the job of a parsed file into the draft."""
    fields = Fields(data, draft, aliases=ALIASES)
    draft.put("name", make_name(fields.take("output_dir", "job")))
    base = fields.take("base_model")
    if base is not None:
        draft.put("student.model", base)
    if (revision := fields.take("revision_of_model")) is not None:
        draft.put("student.revision", revision)
    tokenizer = fields.take("tokenizer_config", base)
    online = "kd_online_server_base_url" in fields
    if online:
        _read_server(fields, draft, tokenizer)
    else:
        _point_to_import(fields, draft, tokenizer)
    _read_loss(fields, draft)
    _read_data(fields, draft, online)
    if adapter := fields.take("adapter"):
        write_adapters(fields, draft, dropout=0.0)
        fields.take("lora_target_linear")  # our default: all linear layers
        if adapter == "qlora":
            fields.remark("adapter", "the frozen weights are not quantised; they are in bfloat16.")
            draft.put("student.lora.base", "bfloat16")
    _read_trackers(fields, draft)
    if (floor := fields.take_number("cosine_min_lr_ratio")) is not None:
        fields.take("lr_scheduler_type")
        draft.put("train.lr_scheduler_kwargs", {"min_lr_rate": floor})
    write_training(fields, draft, DEFAULTS)
    if floor is not None:
        draft.put("train.lr_scheduler_type", "cosine_with_min_lr")
    fields.close(_REASONS)


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


def _read_data(fields: Fields, draft: Draft, online: bool) -> None:
    sources = [
        _read_source(Fields(each, draft, f"datasets[{place}]."), draft, online)
        for place, each in enumerate(fields.take("datasets", []))
    ]
    tests = [
        _read_source(Fields(each, draft, f"test_datasets[{place}]."), draft, online)
        for place, each in enumerate(fields.take("test_datasets", []))
    ]
    share = fields.take_number("val_set_size", 0.0)
    length = fields.take("sequence_len", 2048)
    packing = fields.take("sample_packing", False)
    if not online:  # the cache has the text, as long and as packed as it was imported
        for name, option in {"val_set_size": share, "sequence_len": length}.items():
            if option:
                fields.remark(name, f"{option:g} is an option of `kd cache import`.")
        return
    draft.put("data.train", sources)
    if tests:
        draft.put("data.validation", tests)
    elif share <= 0.5:
        draft.put("data.validation_fraction", share)
    else:
        fields.remark("val_set_size", "counts rows; data.validation_fraction is a share.")
    draft.put("data.sequence_length", length)
    draft.put("data.packing", packing)


def _read_source(fields: Fields, draft: Draft, online: bool) -> Any:
    path, kind = fields.take("path"), str(fields.take("type", ""))
    made: dict[str, Any] = {"path": path}
    for theirs, ours in {"name": "name", "split": "split", "revision": "revision"}.items():
        if (value := fields.take(theirs)) is not None:
            made[ours] = value
    files = fields.take("data_files")
    if online:
        known = FORMATS.get(kind.partition(".")[0])
        if known is not None:
            draft.put("data.format", known)
        elif kind:
            fields.remark("type", f"{kind} is not known; set data.format.")
        if (column := fields.take("field")) is not None:
            draft.put("data.text_column", column)
        if (column := fields.take("field_messages", "messages")) != "messages":
            fields.remark("field_messages", f"rename the column {column} to messages.")
        if files:
            fields.remark("data_files", "name the files themselves in data.train.")
    else:
        given = made | ({"files": files} if files else {}) | ({"type": kind} if kind else {})
        fields.remark("path", f"import {describe_source(given)}; its text is in the cache then.")
        fields.dismiss("temperature", "records must have temperature 1 to be imported.")
    fields.close(
        {
            "logprobs_field": "`kd cache import` reads the column logprobs: rename it.",
            "ds_type": "not needed: the suffix of a file says its format.",
            "roles_to_train": "data.assistant_only_loss: the assistant's tokens are learned.",
            "train_on_eos": "the end of an answer is learned.",
        }
    )
    return made


def _read_trackers(fields: Fields, draft: Draft) -> None:
    wanted = {
        "wandb": "wandb_project" in fields or fields.take("use_wandb", False),
        "tensorboard": fields.take("use_tensorboard", False),
        "mlflow": fields.take("use_mlflow", False) or "mlflow_tracking_uri" in fields,
    }
    if names := [name for name, used in wanted.items() if used]:
        draft.put("train.report_to", names)
