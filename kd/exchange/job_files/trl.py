"""Read a job of TRL's DistillationTrainer, ServerDistillationTrainer or GKDTrainer, or one of
SFTTrainer and a teacher to distil from.

Format: the YAML file of TRL's scripts (``--config``), whose keys are the fields of ScriptArguments,
ModelConfig, and DistillationConfig, GKDConfig or SFTConfig. beta 0 is KL(teacher || student), beta
1 the reverse, and between them the generalised Jensen-Shannon divergence, with the teacher's weight
beta in the mixture, as ours. The temperature of DistillationTrainer is that of its divergence too;
that of GKDTrainer is of the texts that the student writes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kd.exchange.job_files.draft import Draft, Fields, list_files, require_one_teacher
from kd.exchange.job_files.training import (
    REASONS,
    TRAINER_DEFAULTS,
    make_name,
    write_adapters,
    write_training,
    write_warmup,
)

#: Fields that name a teacher.
TEACHER_FIELDS = ("teacher_model_name_or_path", "teacher_model_server_url")
#: Fields that only GKDConfig has.
GKD_FIELDS = ("lmbda", "seq_kd", "max_new_tokens")
#: Fields of trainers that do not distil and are not SFTTrainer.
OTHER_FIELDS = ("beta", "reward_funcs", "num_generations", "reward_model_path", "max_prompt_length",
                "precompute_ref_log_probs", "desirable_weight")  # fmt: skip
COMMON = TRAINER_DEFAULTS | {"bf16": True, "gradient_checkpointing": True}
#: The defaults of DistillationConfig, and those of GKDConfig and SFTConfig.
DISTILLATION = COMMON | {"learning_rate": 1e-6, "beta": 1.0, "temperature": 1.0}
GKD = COMMON | {"learning_rate": 2e-5, "beta": 0.5, "temperature": 1.0}
SFT = COMMON | {"learning_rate": 2e-5}
_ON_POLICY = (
    "the student writes no texts here: it learns from the texts of the dataset. Let the teacher "
    "write the answers first."
)


class _TrainerKind(NamedTuple):
    """The trainer that a file is for: its defaults, and our format of its texts."""

    defaults: dict[str, Any]
    format: str


_GKD = _TrainerKind(GKD, "messages")
_DISTILLATION = _TrainerKind(DISTILLATION, "prompt_completion")
_SFT = _TrainerKind(SFT, "messages")


def read_job(data: Any, draft: Draft, teacher: str | None = None) -> None:
    """Write the job of a parsed file into the draft; ``teacher`` is that of SFTTrainer's file."""
    fields = Fields(data, draft)
    trainer = _choose_trainer(fields, draft, teacher)
    draft.put("kind", "distill")
    draft.put("name", make_name(fields.take("output_dir", "job")))
    _read_models(fields, draft, teacher)
    _read_data(fields, draft, trainer)
    if trainer is _SFT:
        draft.put("data.assistant_only_loss", fields.take("assistant_only_loss", False))
        draft.remark("teacher", "the file trains by cross-entropy; loss is our default.")
    else:
        _read_loss(fields, draft, trainer)
    write_training(fields, draft, trainer.defaults)
    write_warmup(fields, draft)
    if fields.take("disable_dropout", trainer is _GKD):
        draft.put("train.dropout", 0.0)
    if fields.take("use_peft", False):
        write_adapters(fields, draft, dropout=0.05)
    fields.close(
        REASONS
        | dict.fromkeys(
            ("lmbda", "max_new_tokens", "max_completion_length", "seq_kd", "top_p", "top_k",
             "min_p", "generation_kwargs", "repetition_penalty", "use_vllm", "vllm_",
             "cache_implementation", "max_tool_calling_iterations"),
            _ON_POLICY,
        )
        | {
            "loss_add_tail": "profile topk always keeps the mass of the rest as one bucket.",
        }
    )  # fmt: skip


def _choose_trainer(fields: Fields, draft: Draft, teacher: str | None) -> _TrainerKind:
    """Tell the trainer by the fields; raises ``ConfigError`` for one that does not distil."""
    gkd = any(name in fields for name in GKD_FIELDS)
    has_own = any(name in fields for name in TEACHER_FIELDS)
    for name in () if gkd or has_own else OTHER_FIELDS:
        if name in fields:
            raise fields.refuse(
                name,
                "is of another trainer, and the file has no teacher_model_name_or_path.",
                "Only distillation is offered: give a file of GKD, distillation or SFT.",
            )
    require_one_teacher(has_own, teacher, "teacher_model_name_or_path")
    if gkd:
        return _GKD
    if not has_own:
        return _SFT
    draft.remark("beta", "read as a file of DistillationTrainer; one of GKD has lmbda.")
    return _DISTILLATION


def _read_models(fields: Fields, draft: Draft, teacher: str | None) -> None:
    if (model := fields.take("model_name_or_path")) is not None:
        draft.put("student.model", model)
    if (revision := fields.take("model_revision", "main")) != "main":
        draft.put("student.revision", revision)
    draft.put("teacher.model", fields.take("teacher_model_name_or_path", teacher or "default"))
    if (revision := fields.take("teacher_model_revision")) is not None:
        draft.put("teacher.revision", revision)
    dtype = None
    for name in ("torch_dtype", "dtype"):  # the older name first
        if name in fields:
            dtype = fields.take(name)
            fields.remark(name, "the student's weights are in float32; see train.precision.")
    if (url := fields.take("teacher_model_server_url")) is not None:
        _read_server(fields, draft, url, model)
    else:
        _read_local_teacher(fields, draft, dtype)


def _read_server(fields: Fields, draft: Draft, url: Any, student: Any) -> None:
    draft.put("teacher.backend", "http")
    draft.put("teacher.url", url)
    draft.put("teacher.tokenizer", student)
    draft.put("cache", {"profile": "topk", "k": fields.take("loss_top_k", 1)})
    fields.remark(
        "teacher_model_server_url",
        "must be an OpenAI-compatible server (`vllm serve`); teacher.model is its name there.",
    )


def _read_local_teacher(fields: Fields, draft: Draft, dtype: Any) -> None:
    """Write what only a local teacher has. TRL's scripts load it in ``dtype``, as the student."""
    if fields.take("trust_remote_code", False):
        draft.put("teacher.trust_remote_code", True)
    arguments = fields.section("teacher_model_init_kwargs")
    given = arguments.take("dtype", arguments.take("torch_dtype", dtype))
    if given is not None:
        draft.put("teacher.dtype", str(given).removeprefix("torch."))
    arguments.close(REASONS)


def _read_data(fields: Fields, draft: Draft, trainer: _TrainerKind) -> None:
    train_split = fields.take("dataset_train_split", "train")
    test_split = fields.take("dataset_test_split", "test")
    path, name = fields.take("dataset_name"), fields.take("dataset_config")
    mixture = fields.take_sections("datasets")
    if "dataset_mixture" in fields:
        raise fields.refuse(
            "dataset_mixture",
            "is not a field of TRL's own scripts.",
            "Write it as datasets: [{path, name, split, fraction}].",
        )
    if not mixture and path is None:
        raise fields.refuse(
            "dataset_name",
            "is missing, and so is datasets.",
            "Name the texts: dataset_name, or datasets: [{path, name, split, fraction}].",
        )
    sources = [each for part in mixture for each in _read_source(part)]
    draft.put("data.train", sources or [_name_dataset(path, name, train_split)])
    # YAML reads a bare no as false.
    if fields.take("eval_strategy", "no") not in ("no", False) and path is not None and not mixture:
        draft.put("data.validation", [_name_dataset(path, name, test_split)])
    if (share := fields.take_number("test_split_size")) is not None:
        draft.put("data.validation_fraction", share)
    if fields.take("dataset_streaming", False) or fields.take("streaming", False):
        draft.put("data.streaming", True)
        fields.remark("dataset_streaming", "a stream needs data.max_train_samples.")
    plain = trainer is _SFT and "dataset_text_field" in fields
    draft.put("data.format", "auto" if plain else trainer.format)
    fields.remark(
        "dataset_name",
        "data.format is a guess: messages, prompt_completion, or auto for plain text"
        + (f"; {_ON_POLICY}" if trainer is _DISTILLATION else "."),
    )
    if (column := fields.take("dataset_text_field", "text")) != "text":
        draft.put("data.text_column", column)
    length = fields.take("max_seq_length", 1024)  # the name of older versions
    draft.put("data.sequence_length", fields.take("max_length", length))
    draft.put("data.packing", fields.take("packing", False))


def _read_source(fields: Fields) -> list[Any]:
    """Read one part of a mixture: files as texts, and others as a mapping."""
    split, files = fields.take("split", "train"), fields.take_list("data_files")
    made = _name_dataset(fields.take("path"), fields.take("name"), split)
    share = fields.take_number("fraction")
    named = list_files(made["path"], files, split) if share is None else []
    if files and not named:
        fields.remark("data_files", "name the files themselves in data.train.")
    if share is not None:
        made["weight"] = share
    fields.close()
    return named or [made]


def _name_dataset(path: Any, name: Any, split: Any) -> dict[str, Any]:
    return {"path": path} | ({"name": name} if name else {}) | {"split": split}


def _read_loss(fields: Fields, draft: Draft, trainer: _TrainerKind) -> None:
    beta = fields.take_number("beta", trainer.defaults["beta"])
    if trainer is _GKD:
        fields.dismiss("temperature", "that of the student's own texts; GKD's loss has 1.")
    temperature = fields.take_number("temperature", trainer.defaults["temperature"])
    draft.put("loss.alpha", 0.0)
    if draft.job["teacher"].get("backend") == "http":
        if beta or temperature != 1.0:
            fields.remark(
                "beta",
                f"{beta:g} at temperature {temperature:g}: the records of a server serve KL"
                "(teacher || student) at temperature 1 only, which the job has.",
            )
        return
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "jsd")
    draft.put("loss.divergence", divergence)
    if divergence == "jsd":
        draft.put("loss.beta", beta)
    draft.put("loss.temperature", temperature)
    if divergence != "forward_kl" or temperature != 1.0:
        draft.put("cache.profile", "hidden")
        fields.remark("beta", "needs a cache of profile hidden, which the job has.")
    if temperature != 1.0:
        fields.remark("temperature", "the divergence is also multiplied by T^2 here.")
