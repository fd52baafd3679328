"""Read a job of DistillKit: the file of ``distillkit CONFIG``.

Format: arcee-ai/DistillKit, distillkit/configuration.py. The losses are divided by the sum of their
weights there, so alpha = CE / (CE + divergence). Divergences are multiplied by T^2, as ours are.
"""

from __future__ import annotations

from typing import Any

from kd.exchange.job_files.draft import (
    UNKNOWN_FINGERPRINT,
    Draft,
    Fields,
    describe_source,
    require_one_teacher,
)
from kd.exchange.job_files.training import (
    REASONS,
    TRAINER_DEFAULTS,
    make_name,
    write_training,
    write_warmup,
)

#: Defaults of TRL's SFTConfig, with which DistillKit trains.
DEFAULTS = TRAINER_DEFAULTS | {
    "learning_rate": 2e-5,
    "bf16": True,
    "gradient_checkpointing": True,
}
DIVERGENCES = {"kl": "forward_kl", "jsd": "jsd", "tvd": "total_variation"}
FEATURES = {"hs_cosine": "cosine", "hs_mse": "mse"}
#: The losses of a file that names none.
DEFAULT_LOSSES: list[dict[str, Any]] = [
    {"function": "cross_entropy", "weight": 0.5},
    {"function": "kl", "weight": 0.5},
]


def read_job(data: Any, draft: Draft, teacher: str | None = None) -> None:
    """Write the job of a parsed file into the draft. A file has a teacher of its own."""
    fields = Fields(data, draft)
    require_one_teacher(has_own=True, given=teacher)
    for name in ("model", "teacher", "dataset"):
        if name not in fields:
            raise fields.refuse(name, "is missing.", "Give a job file of DistillKit.")
    path = fields.take("output_path")
    draft.put("name", make_name(path or fields.take("project_name", "distillkit")))
    trusted = fields.take("trust_remote_code", False)
    draft.put("student.model", fields.take("model"))
    length = fields.take("sequence_length")
    source = fields.section("teacher")
    entries = source.take("top_k")
    offline = _read_teacher(source, draft, trusted)
    _read_losses(fields, draft, offline)
    if entries is not None:
        _write_entries(source, draft, entries)
    _read_data(fields.section("dataset"), draft, offline)
    arguments = fields.section("training_args")
    if not offline:
        draft.put("data.text_column", arguments.take("dataset_text_field", "text"))
        draft.put("data.packing", arguments.take("packing", False))
        # DistillKit writes a chat as one text, and learns all of it.
        draft.put("data.assistant_only_loss", False)
        draft.put("data.sequence_length", arguments.take("max_length", length))
    elif length is not None:
        fields.remark("sequence_length", "is an option of `kd cache import` for longer rows.")
    write_training(arguments, draft, DEFAULTS)
    write_warmup(arguments, draft)
    arguments.close(REASONS)
    fields.close(
        REASONS
        | {
            "resize_embeddings": "embeddings keep their size; ids beyond the tokenizer are none.",
            "functionary_packing": "not needed: documents of a sequence do not see each other.",
            "project_name": "the job's name is its name in trackers.",
            "model_auto_class": "the language model of the student is used automatically.",
            "layer_mapping": "only the last hidden states are matched (loss.features).",
        }
    )


def _read_teacher(fields: Fields, draft: Draft, trusted: bool) -> bool:
    """Write the teacher, or the cache of its records; return whether it is such a cache."""
    if fields.take("kind", "hf") == "dataset":
        draft.put("kind", "train")
        draft.put("cache.fingerprint", UNKNOWN_FINGERPRINT)
        fields.remark(
            "kind",
            "`kd cache import distillkit FILES --tokenizer FOLDER` makes a cache of these records: "
            "put its fingerprint into cache.fingerprint.",
        )
        fields.dismiss(
            "legacy_logit_compression",
            "the older polynomial codec cannot be imported; a sample of the teacher must be taken.",
        )
        fields.dismiss(
            "logprob_compressor",
            "`kd cache import` reads it from compression_config.yaml beside the records, or from "
            "the file of --config.",
        )
        fields.close()
        return True
    draft.put("kind", "distill")
    draft.put("teacher.model", fields.take("path"))
    if trusted:
        draft.put("teacher.trust_remote_code", True)
    arguments = fields.section("kwargs")
    dtype = arguments.take("torch_dtype", arguments.take("dtype", "auto"))
    draft.put("teacher.dtype", str(dtype).removeprefix("torch."))
    arguments.close(REASONS)
    fields.close()
    return False


def _write_entries(teacher: Fields, draft: Draft, entries: Any) -> None:
    if draft.job.get("cache", {}).get("profile") == "hidden":
        teacher.remark("top_k", "not used: profile hidden, which the loss needs, is exact.")
        return
    draft.put("cache.profile", "topk")
    draft.put("cache.k", entries)
    teacher.remark(
        "top_k",
        "the rest of the mass is one more bucket here. Profile threshold is unbiased, and needs"
        " fewer bytes.",
    )


def _read_losses(fields: Fields, draft: Draft, offline: bool) -> None:
    """Write alpha, the divergence, its temperature and the matching of hidden states."""
    if "loss_functions" not in fields:
        fields.set("loss_functions", DEFAULT_LOSSES)
    weights = {"cross_entropy": 0.0, "divergence": 0.0, "features": 0.0}
    for loss in fields.take_sections("loss_functions"):
        function, weight = str(loss.take("function")), loss.take_number("weight", 0.0)
        if function in DIVERGENCES and not weights["divergence"]:
            weights["divergence"] = weight
            _read_divergence(loss, draft, function, offline)
        elif function in FEATURES and not weights["features"]:
            weights["features"] = weight
            draft.put("loss.features.kind", FEATURES[function])
        elif function == "cross_entropy":
            weights["cross_entropy"] += weight
        else:
            loss.remark("function", f"{function} of weight {weight:g} has no counterpart here.")
        loss.close({"sparse_chunk_length": "not needed: the loss is computed in chunks."})
    taught = weights["cross_entropy"] + weights["divergence"] or 1.0
    draft.put("loss.alpha", round(weights["cross_entropy"] / taught, 6))
    if weights["features"]:
        draft.put("loss.features.weight", round(weights["features"] / taught, 6))
        draft.put("cache.profile", "hidden")


def _read_divergence(loss: Fields, draft: Draft, function: str, offline: bool) -> None:
    temperature = loss.take_number("temperature", 1.0)
    loss.dismiss(
        "missing_probability_handling",
        "what a record does not name is one bucket of both models, or a sampled tail.",
    )
    if offline:
        if function != "kl" or temperature != 1.0:
            loss.remark(
                "function",
                f"{function} at temperature {temperature:g}: imported records serve KL at "
                "temperature 1 only, which the job has.",
            )
        return
    draft.put("loss.divergence", DIVERGENCES[function])
    draft.put("loss.temperature", temperature)
    if function != "kl" or temperature != 1.0:
        draft.put("cache.profile", "hidden")
        loss.remark("function", "needs a cache of profile hidden, which the job has.")


def _read_data(fields: Fields, draft: Draft, offline: bool) -> None:
    if "train_dataset" not in fields:
        raise fields.refuse("train_dataset", "is missing.", "Give a job file of DistillKit.")
    for name, ours in {"train_dataset": "train", "eval_dataset": "validation"}.items():
        if name not in fields:
            continue
        source = fields.section(name)
        path = source.take("repo_id") or source.take("disk_path")
        made = {
            "path": path,
            "name": source.take("config_name"),
            "split": source.take("split", "train"),
            "revision": source.take("revision"),
        }
        source.close()
        given = {key: each for key, each in made.items() if each}
        if offline:
            fields.remark(name, f"import {describe_source(given)}; its text is in the cache then.")
        else:
            draft.put(f"data.{ours}", [given])
    if not offline:
        fields.remark("train_dataset", "of chats say so: data.format messages or sharegpt.")
    for name, ours in {"num_samples": "train", "num_eval_samples": "eval"}.items():
        fields.dismiss(name, f"counts rows; data.max_{ours}_samples counts sequences.")
    fields.close(
        {
            "seed": "train.seed orders the data.",
            "prepared_dataset_path": "not needed: the cache keeps the tokens.",
            "prepacked": "not needed: an imported cache is packed as its rows are.",
        }
    )
