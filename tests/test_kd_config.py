"""The job's configuration: every mistake is found, named and located; YAML, JSON and --set say the same thing."""

import copy
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from kd.config.cache import CacheConfig, TemperatureRange
from kd.config.checks import ChecksConfig
from kd.config.data import DataConfig, DatasetSpec
from kd.config.evaluation import EvaluationConfig
from kd.config.job import JobConfig
from kd.config.loss import FeatureConfig, LearnedTemperature, LossConfig, Ramp
from kd.config.placement import Resources
from kd.config.search import Dimension, SearchConfig
from kd.config.student import LoraConfig, StudentConfig, StudentFromTeacher, StudentInit
from kd.config.teacher import TeacherConfig
from kd.config.train import OPTIMIZER_ARGUMENTS, SCHEDULER_KWARGS, Optimizer, Scheduler, TrainConfig
from kd.errors import ConfigError, Problem
from kd.jobfile import apply_overrides, load_config, parse_config, parse_yaml
from kd.reference import render

ROOT = Path(__file__).resolve().parent.parent

JOB: dict[str, Any] = {
    "kind": "distill",
    "name": "tiny",
    "teacher": {"model": "somewhere/teacher", "batch_size": 4},
    "student": {"init": {"layers": 2, "hidden_size": 64}},
    "data": {"train": ["a.txt", {"path": "org/set", "split": "train[:1%]"}], "sequence_length": 128},
    "cache": {"threshold": 0.05},
    "loss": {"alpha": 0.2},
    "train": {"max_steps": 10, "learning_rate": 1e-3, "lr_scheduler_kwargs": {"num_cycles": 2}},
}


def changed(path: str, value: Any, job: dict[str, Any] = JOB) -> dict[str, Any]:
    """The job with ``a.b.0.c`` set to ``value``."""
    job = copy.deepcopy(job)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner: Any = job
    for key in parents:
        inner = inner.setdefault(key, {}) if isinstance(key, str) else inner[key]
    inner[last] = value
    return job


RAMP = {"schedule": "linear", "start": 0.9, "end": 0.5}
LEARNED = {"mode": "adversarial", "min": 0.5, "max": 2.0}
TEMPERED = {"profile": "tempered", "temperatures": {"min": 0.5, "max": 2}}
SEARCH = {"space": {"x": {"min": 0, "max": 1}}}

# Jobs that hold the sections which JOB has not.
LORA = JOB | {"student": {"model": "x", "lora": {}}}
CUT_OUT = JOB | {"student": {"from_teacher": {"layers": 1}}}
RAMPED = changed("loss.alpha", RAMP)
COOLING = JOB | {"cache": {"profile": "dense"}, "loss": {"temperature": RAMP}}
LEARNING = JOB | {"cache": {"profile": "dense"}, "loss": {"temperature": LEARNED}}
SEARCHING = JOB | {"kind": "search", "search": SEARCH}


def problems(job: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        parse_config(job)
    assert caught.value.detail
    return caught.value.problems


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every section class inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated, tuple, dict):
        for part in typing.get_args(annotation):
            yield from sections(part)


def all_sections(root: type[BaseModel] = JobConfig) -> set[type[BaseModel]]:
    below = {found for field in root.model_fields.values() for found in sections(field.annotation)}
    return {root}.union(*(all_sections(section) for section in below))


# ---------------------------------------------------------------------- unknown keys

LEVELS = [
    ("", JobConfig, JOB),
    ("teacher", TeacherConfig, JOB),
    ("student", StudentConfig, JOB),
    ("student.init", StudentInit, JOB),
    ("student.from_teacher", StudentFromTeacher, CUT_OUT),
    ("student.lora", LoraConfig, LORA),
    ("data", DataConfig, JOB),
    ("data.train.1", DatasetSpec, JOB),
    ("cache", CacheConfig, JOB),
    ("cache.temperatures", TemperatureRange, JOB),
    ("loss", LossConfig, JOB),
    ("loss.alpha", Ramp, RAMPED),
    ("loss.temperature", Ramp, COOLING),
    ("loss.temperature", LearnedTemperature, LEARNING),
    ("loss.features", FeatureConfig, JOB),
    ("train", TrainConfig, JOB),
    ("checks", ChecksConfig, JOB),
    ("evaluation", EvaluationConfig, JOB),
    ("search", SearchConfig, SEARCHING),
    ("search.space.x", Dimension, SEARCHING),
    ("resources", Resources, JOB),
]


def test_levels_name_every_section_of_the_tree():
    assert {section for _, section, _ in LEVELS} == all_sections()
    for *_, job in LEVELS:
        parse_config(job)


@pytest.mark.parametrize(
    "level, section, job", LEVELS, ids=[f"{level} {section.__name__}" for level, section, _ in LEVELS]
)
def test_an_unknown_key_at_every_level_is_refused_with_what_was_meant(level, section, job):
    for known in section.model_fields:
        for typo in (f"{known}z", known.capitalize(), known[:-1] + "q" if len(known) > 4 else f"_{known}"):
            found = problems(changed(f"{level}.{typo}".lstrip("."), 1, job))
            pointer = f"/{level}/{typo}".replace(".", "/").replace("//", "/")
            assert [each.pointer for each in found] == [pointer]
            assert found[0].detail == f"unknown key {typo!r}."
            assert found[0].remedy.startswith("Did you mean ")
            assert found[0].remedy.removeprefix("Did you mean ").rstrip("?") in section.model_fields
    exact = next(iter(section.model_fields))
    assert problems(changed(f"{level}.{exact}z".lstrip("."), 1, job))[0].remedy == f"Did you mean {exact}?"


def test_a_key_like_no_other_is_refused_with_the_known_ones():
    (found,) = problems(changed("loss.qqqqqq", 1))
    assert found.remedy == f"Known keys: {', '.join(LossConfig.model_fields)}."


def test_every_problem_is_reported_at_once():
    job = changed("train.batch_size", 0, changed("loss.alpha", 2, changed("techer", {})))
    assert {each.pointer for each in problems(job)} == {"/train/batch_size", "/loss/alpha", "/techer"}


def test_a_problem_reads_as_a_sentence_with_its_place():
    (found,) = problems(changed("train.batch_size", 0))
    assert str(found) == "train.batch_size: Input should be greater than or equal to 1, but got 0."


def test_a_mistake_in_a_dataset_spec_is_not_blamed_on_the_other_form_of_a_source():
    assert [(each.pointer, each.detail) for each in problems(changed("data.train.1", {"paht": "x"}))] == [
        ("/data/train/1/path", "is required but missing."),
        ("/data/train/1/paht", "unknown key 'paht'."),
    ]
    assert [each.pointer for each in problems(changed("data.train.1", 3))] == ["/data/train/1"]


FORMS = [
    # path, value, pointer of each problem, words of the first
    ("loss.alpha", "much", ["/loss/alpha"], "valid number, unable to parse string as a number, but got 'much'"),
    ("loss.alpha", [0.1], ["/loss/alpha"], "valid number"),
    ("loss.alpha", 2, ["/loss/alpha"], "less than or equal to 1, but got 2"),
    ("loss.alpha", RAMP | {"start": -1}, ["/loss/alpha/start"], "greater than or equal to 0, but got -1"),
    ("loss.alpha", {"schedule": "linear", "start": 1}, ["/loss/alpha/end"], "is required but missing"),
    ("loss.alpha", RAMP | {"schedule": "cosin"}, ["/loss/alpha/schedule"], "Did you mean cosine?"),
    ("loss.temperature", "hot", ["/loss/temperature"], "valid number"),
    ("loss.temperature", RAMP | {"ends": 1}, ["/loss/temperature/ends"], "Did you mean end?"),
    (
        "loss.temperature",
        RAMP | {"qqqqqq": 1},
        ["/loss/temperature/qqqqqq"],
        "Known keys: schedule, start, end, steps.",
    ),
    ("loss.temperature", LEARNED | {"maxx": 1}, ["/loss/temperature/maxx"], "Did you mean max?"),
    ("loss.temperature", LEARNED | {"start": 1}, ["/loss/temperature/start"], "Known keys: mode, min, max, init"),
    ("loss.temperature", LEARNED | {"mode": "entrop"}, ["/loss/temperature/mode"], "Did you mean entropy?"),
    ("loss.temperature", LEARNED | {"init": 3}, ["/loss/temperature"], "init 3 must lie between min 0.5 and max 2"),
    ("loss.temperature", LEARNED | RAMP, ["/loss/temperature"], "mode (it is learned) or schedule (it goes from"),
    ("loss.temperature", LEARNED | RAMP, ["/loss/temperature"], "not both"),
    ("loss.temperature", {"Mode": "entropy", "init": 1}, ["/loss/temperature"], "neither: its keys are Mode, init"),
    ("loss.temperature", {}, ["/loss/temperature"], "but got neither"),
    ("search.space", {"train.seed": {"mim": 1}}, ["/search/space/train.seed/mim"], "Did you mean min?"),
    ("search.space", {"a/b~": {"mim": 1}}, ["/search/space/a~1b~0/mim"], "Did you mean min?"),
    ("search.space", {"train.seed": {}}, ["/search/space/train.seed"], "give min and max, or choices"),
    ("search.space", {"train.seed": 3}, ["/search/space/train.seed"], "but got 3"),
    (
        "search.space.x.choices",
        [[1], 2],
        ["/search/space/x/choices/0"],
        "string, or a valid number, or a valid integer",
    ),
    ("train.gradient_checkpointing", "ful", ["/train/gradient_checkpointing"], "Did you mean full?"),
    ("train.gradient_checkpointing", 1, ["/train/gradient_checkpointing"], "'sqrt', or greater than or equal to 2"),
    ("train.optim_args", {"amsgrad": "x"}, ["/train/optim_args/amsgrad"], "valid number"),
    ("train.optim", "adam", ["/train/optim"], "'adamw', 'adafactor', 'muon', 'lion', 'lars' or 'schedule_free'"),
    ("train.optim", "adam", ["/train/optim"], "Did you mean adamw?"),
    ("train.report_to", ["wand"], ["/train/report_to/0"], "Did you mean wandb?"),
    ("student.lora.targets", [1], ["/student/lora/targets/0"], "valid string"),
    ("evaluation", {1: 2}, ["/evaluation/1"], "Keys should be strings"),
    ("body", 1, ["/body"], "unknown key 'body'"),
    ("teacher.model", None, ["/teacher/model"], "Input should be a valid string, but got null."),
    ("name", True, ["/name"], "Input should be a valid string, but got true."),
    ("nothing", None, ["/nothing"], "unknown key 'nothing'"),
    ("evaluation.tasks", "hellaswag", ["/evaluation/tasks"], "Input should be a list, but got 'hellaswag'."),
    ("evaluation.tasks", ["a"] * 65, ["/evaluation/tasks"], "List should have at most 64 items, not 65."),
    ("cache", 3, ["/cache"], "Input should be a section (a mapping of fields), but got 3."),
    ("cache", [], ["/cache"], "Input should be a section (a mapping of fields)."),
    (
        "search.space",
        {"x": None},
        ["/search/space/x"],
        "Input should be a section (a mapping of fields), but got null.",
    ),
    ("search.space", "x", ["/search/space"], "Input should be a mapping, but got 'x'."),
    ("search.space", {}, ["/search/space"], "Mapping should have at least 1 item, not 0."),
]


@pytest.mark.parametrize("path, value, pointers, words", FORMS)
def test_a_mistake_in_one_form_of_a_value_or_in_a_mapping_is_told_once_at_its_place(path, value, pointers, words):
    found = problems(changed(path, value, SEARCHING))
    assert [each.pointer for each in found] == pointers
    assert words in f"{found[0].detail} {found[0].remedy}"


@pytest.mark.parametrize("mode", ["minimise", "minimize", "plain"])
def test_plain_minimisation_of_the_temperature_is_refused_with_the_reason(mode):
    (found,) = problems(changed("loss.temperature", {"mode": mode}))
    assert found.pointer == "/loss/temperature/mode"
    assert f"{mode} is not offered" in found.detail and "runs to a bound" in found.detail
    assert found.detail.endswith("Use adversarial, entropy, lookahead or teacher_only.")


# ---------------------------------------------------------------------- bounds

BOUNDS = [
    # path, refused, accepted
    ("kind", ["distil", 1], [None]),
    ("name", ["", "Upper", "a b", "-a", "a" * 64, "ä"], ["a", "a" * 63, "0.1_x-y"]),
    ("teacher.model", [""], ["x"]),
    ("teacher.backend", ["vllm"], ["local", None]),
    ("teacher.url", ["host:8000", "ftp://host", "http://name:secret@host"], []),
    ("teacher.tokenizer", [""], []),
    ("teacher.api_key_env", ["HOME", "KD_REDIS_URL"], []),
    ("teacher.timeout", [0, 3601], [0.1, 3600]),
    ("teacher.retries", [-1, 101], [0, 100]),
    ("teacher.concurrency", [0, 257], [1, 256]),
    ("teacher.dtype", ["int8", "fp32"], ["auto", "bfloat16"]),
    ("teacher.batch_size", [0, 4097, 1.5, "many"], [1, 4096]),
    ("student.init.layers", [0, 257], [1, 256]),
    ("student.init.hidden_size", [7, 9, 32769], [8, 10]),
    ("student.init.intermediate_size", [7, 131073], [8]),
    ("student.init.num_attention_heads", [0, 3, 64], [1, 2, 32]),
    ("student.init.num_key_value_heads", [0, 3], [1, 2]),
    ("student.init.attention_dropout", [-0.1, 1.0], [0.0, 0.99]),
    ("data.train", [[], 3, None], ["a.txt", {"path": "x"}, ["a", "b"]]),
    ("data.validation_fraction", [-0.01, 0.51, float("nan")], [0, 0.5]),
    ("data.format", ["csv"], ["auto", "messages"]),
    ("data.text_column", [""], ["body"]),
    ("data.sequence_length", [7, 1_048_577], [8, 1_048_576]),
    ("data.max_train_samples", [0], [1]),
    ("data.max_eval_samples", [0], [1]),
    ("cache.profile", ["top-k"], ["threshold", "tempered"]),
    ("cache.temperatures.min", [0.04, 101], []),
    ("cache.temperatures.max", [0.04, 101], []),
    ("cache.always_keep", [[-1], [1, 1], list(range(65)), ["a"]], [[], [0, 5]]),
    ("cache.draws", [0, 65, 1.5], [1, 64]),
    ("cache.k", [0, 4097], [None]),
    ("cache.fingerprint", ["abc", "G" * 32], []),
    ("cache.threshold", [0.0009, 0.51, float("inf")], [0.001, 0.5]),
    ("cache.seed", [-1, 2**32], [0, 2**32 - 1]),
    ("cache.shard_sequences", [0, 65537], [1, 65536]),
    ("student.from_teacher.layers", [0, 257], [1, 256]),
    ("student.from_teacher.pick", ["middle"], ["spread", "first", "last", "ends", None]),
    ("student.from_teacher.hidden_size", [7, 32769], [8, None]),
    ("student.from_teacher.intermediate_size", [7, 131073], [8, None]),
    ("student.lora.rank", [0, 4097], [1, 4096]),
    ("student.lora.alpha", [0, 65537], [0.5]),
    ("student.lora.dropout", [-0.1, 1.0], [0, 0.9]),
    ("student.lora.targets", ["q_proj", [1], ["a"] * 65], [[], ["q_proj"]]),
    ("data.train.1.weight", [0, -1, 1e6 + 1], [0.5, 1e6]),
    ("loss.alpha", [-0.1, 1.1, float("nan"), "a"], [0, 1, RAMP, None]),
    ("loss.alpha.schedule", ["exponential", None], ["linear", "cosine", "step"]),
    ("loss.alpha.start", [-0.1, 1.1, 101], [0, 1]),
    ("loss.alpha.end", [-0.1, 1.1, 101], [0, 1]),
    ("loss.alpha.steps", [0, 100_000_001], [1, None]),
    ("loss.temperature", [0, 2.0, 101, RAMP, LEARNED], [1, None]),
    ("loss.temperature.start", [0, -1, 101], [0.01, 100]),
    ("loss.temperature.end", [0, -1, 101], [0.01, 100]),
    ("loss.temperature.steps", [0, 100_000_001], [1, None]),
    ("loss.temperature.mode", ["entropic", "entropy"], ["adversarial", "lookahead", "teacher_only"]),
    ("loss.temperature.min", [0.04, 1.0, 101], [0.05, 0.99]),
    ("loss.temperature.max", [0.04, 1.0, 101], [1.01, 100]),
    ("loss.temperature.init", [0.04, 0.5, 2.0, 101], [0.6, 1.9]),
    ("loss.temperature.learning_rate", [0, 11], [10]),
    ("loss.temperature.prior", [-1, 1001], [0, 1000]),
    ("loss.temperature.target_entropy", [0, 21, 2], [None]),
    ("loss.temperature.ramp_steps", [-1, 10_000_001], [0]),
    ("loss.temperature.interval", [0, 100_001], [1]),
    ("loss.divergence", ["kl", "jsd"], ["forward_kl"]),
    ("loss.beta", [0, 1], [0.01, 0.99]),
    ("loss.label_smoothing", [-0.1, 1], [0, 0.9]),
    ("loss.z_loss", [-0.1, 1.1], [0, 1]),
    ("loss.entropy_weighting", [-4.1, 4.1], [-4, 4]),
    ("loss.features.weight", [-1, 1001], [0]),
    ("loss.features.kind", ["l1"], ["mse", "cosine"]),
    ("train.max_steps", [0, 100_000_001, None], [1]),
    ("train.epochs", [1], []),
    ("train.batch_size", [0, 65537], [1]),
    ("train.gradient_accumulation_steps", [0], [1]),
    ("train.learning_rate", [0, -1, 11, float("inf")], [1e-9, 10]),
    ("train.lr_scheduler_type", ["cosin", "reduce_lr_on_plateau", "linear"], ["cosine_with_restarts"]),
    (
        "train.lr_scheduler_kwargs",
        [{"num_cycles": "b"}, {"num_cycles": float("inf")}, {"a": 1}, 3],
        [{}, {"num_cycles": 1}],
    ),
    ("train.warmup_steps", [-1], [0]),
    ("train.optim", ["adam"], ["adamw", "adafactor", "muon", "lion", "lars", None]),
    ("train.optim_args", [{"amsgrd": 1}, {"momentum": 1}, {"amsgrad": "yes?"}, 3], [{}, {"amsgrad": True}]),
    ("train.layer_lr_decay", [0, 1.1], [0.5, 1]),
    ("train.ema_decay", [0, 1], [0.999, None]),
    ("train.weight_decay", [-1, 11], [0]),
    ("train.adam_beta1", [-0.1, 1.0], [0]),
    ("train.adam_beta2", [-0.1, 1.0], [0]),
    ("train.adam_epsilon", [0, 2], [1]),
    ("train.max_grad_norm", [-1], [0]),
    ("train.precision", ["int8", "bfloat16"], ["bf16"]),
    ("train.gradient_checkpointing", ["all", 0, 1, 1025], ["none", "full", "sqrt", 2, 1024, True, False]),
    ("train.compile", ["fast", 1], ["none", "default", "reduce-overhead", "max-autotune", True, False]),
    ("train.logits_chunk", [0, 1_048_577], [1, None]),
    ("train.order", ["random"], ["shuffled", "length", "curriculum"]),
    ("train.dataloader_num_workers", [-1, 65], [0, 64]),
    ("train.dataloader_prefetch_factor", [0, 65], [1, 64]),
    ("train.report_to", ["wandb", ["wand"]], [[], ["tensorboard", "wandb", "mlflow", "trackio"]]),
    ("train.trace_steps", [-1, 1001], [0, 1000]),
    ("train.logging_steps", [0], [1]),
    ("train.eval_steps", [0], [1]),
    ("train.save_steps", [0], [1]),
    ("train.save_total_limit", [0], [1]),
    ("train.early_stopping_patience", [0], [1, None]),
    ("train.save_dtype", ["fp32"], ["float32"]),
    ("train.seed", [-1, 2**32], [0]),
    ("checks.parity_tokens", [-1, 4097], [0, 4096]),
    ("checks.spike_factor", [-1, 1001], [0, 1000]),
    ("checks.max_rollbacks", [-1, 101], [0, 100]),
    ("checks.clipping_share", [0, 1.1], [0.01, 1]),
    ("checks.starvation_share", [0, 1.1], [0.01, 1]),
    ("checks.agreement_drop", [0, 1.1], [0.01, 1]),
    ("evaluation.top_k", [0, 101], [1, 100]),
    ("evaluation.bins", [1, 101], [2, 100]),
    ("evaluation.prompts", ["text", ["a"] * 65], [[], ["a"] * 64]),
    ("evaluation.max_new_tokens", [0, 4097], [1, 4096]),
    ("evaluation.tasks", [["a"] * 65], [["hellaswag"]]),
    ("search.space", [{}, {"x": {}}, {"x": {"min": 0}}, {str(each): SEARCH["space"]["x"] for each in range(33)}], []),
    ("search.space.x.min", [1, "low"], [-1]),
    ("search.space.x.log", [True, 3], [False]),
    ("search.space.x.choices", [[], list(range(65)), [1]], [None]),
    ("search.trials", [0, 10_001], [1, 10_000]),
    ("search.sampler", ["grid"], ["tpe", "gp", "random"]),
    ("search.pruner", ["asha"], ["none", "median", "hyperband"]),
    ("search.seed", [-1, 2**32], [0, 2**32 - 1]),
    (
        "labels",
        [{"": "x"}, {"a b": "x"}, {"a": "x\n"}, {"a" * 64: "x"}, {str(n): "x" for n in range(17)}],
        [{"a": "x/1"}],
    ),
    ("priority", [-1, 10, 1.5], [0, 9]),
    ("depends_on", [["job"], ["job_" + "a" * 25], ["job_" + "a" * 26] * 33], [["job_" + "a" * 26]]),
    ("deadline_seconds", [0, 31_622_401, "soon"], [1, 31_622_400]),
    ("max_attempts", [0, 1001], [1, 1000]),
    ("resources.gpus", [-1, 65, 0.5], [0, 64]),
    ("resources.memory", [0, "16 Gigs", "2PiB", -1], [1, "16GiB", "1.5 GB", "80G"]),
    ("webhook", ["host/path", "ftp://host", "https://a b", "https://h/" + "a" * 2048], ["https://host/path"]),
]
#: The jobs that hold the sections of a path, the first one that has its beginning.
HOLDERS = {
    "student.lora.": LORA,
    "student.from_teacher.": CUT_OUT,
    "loss.alpha.": RAMPED,
    "loss.temperature.s": COOLING,
    "loss.temperature.e": COOLING,
    "loss.temperature.": LEARNING,
    "search.": SEARCHING,
    "": JOB,
}


@pytest.mark.parametrize("path, refused, accepted", BOUNDS, ids=[path for path, *_ in BOUNDS])
def test_values_outside_their_bounds_are_refused_at_their_place(path, refused, accepted):
    pointer = "/" + path.replace(".", "/")
    job = next(job for beginning, job in HOLDERS.items() if path.startswith(beginning))
    for value in refused:
        found = problems(changed(path, value, job))
        for each in found:  # at the field, inside it, or at its section with the field named
            assert each.pointer.startswith(pointer) or path.rpartition(".")[2].removesuffix("_type") in each.detail
    for value in accepted:
        parse_config(changed(path, value, job))


def test_every_bounded_field_is_in_the_table():
    def bounded(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
        for name, field in section.model_fields.items():
            if field.metadata and not list(sections(field.annotation)):
                yield prefix + name
            for inner in sections(field.annotation):
                if inner is not DatasetSpec:
                    key = "x." if typing.get_origin(field.annotation) is dict else ""
                    yield from bounded(inner, f"{prefix}{name}.{key}")

    assert set(bounded(JobConfig)) - {"student.model"} <= {path for path, *_ in BOUNDS}


def test_every_field_says_what_it_is():
    for section in all_sections():
        for name, field in section.model_fields.items():
            assert field.description and field.description.endswith("."), f"{section.__name__}.{name}"


def test_the_reference_tells_every_section_once_with_all_its_places():
    headings = [line for line in render().splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings)) == len(all_sections())
    assert headings[0] == "## The job"
    assert {
        "## `data.train[]`, `data.validation[]`",
        "## `loss.alpha`, `loss.temperature` with `schedule`",
        "## `loss.temperature` with `mode`",
        "## `search.space.*`",
        "## `student.lora`",
    } <= set(headings)


@pytest.mark.parametrize(
    "row",
    [
        "| `alpha` | number ≥ 0, ≤ 1 or section | `0.1` |",
        "| `temperature` | number > 0, ≤ 100 or section with `schedule` or section with `mode` | `1.0` |",
        "| `space` | mapping of names to sections | required |",
        "| `optim_args` | mapping of names to numbers | – |",
        '| `gradient_checkpointing` | `none`, `full`, `sqrt` or integer ≥ 2, ≤ 1024 | `"none"` |',
        "| `report_to` | list of `tensorboard`, `wandb`, `mlflow`, `trackio` | – |",
        "| `choices` | list of text or number or integer or true or false | – |",
        "| `train` | list of text or section | – |",
    ],
)
def test_the_reference_says_what_a_field_of_several_forms_may_be(row):
    assert row in render()


# ---------------------------------------------------------------------- parts that need each other


def without(*paths: str, **changes: Any) -> dict[str, Any]:
    job = copy.deepcopy(JOB) | changes
    for path in paths:
        *parents, last = path.split(".")
        inner = job
        for key in parents:
            inner = inner[key]
        del inner[last]
    return job


def test_each_kind_needs_its_parts():
    assert "teacher is required" in problems(without("teacher"))[0].detail
    assert "student is required" in problems(without("student"))[0].detail
    assert "train is required" in problems(without("train"))[0].detail
    assert "teacher is required" in problems(without("teacher", kind="precompute"))[0].detail
    assert "loss.alpha below 1" in problems(without("teacher", kind="train"))[0].detail
    assert "data.train is required" in problems(without("data"))[0].detail
    plain = without("teacher", kind="train", loss={"alpha": 1})
    assert "student.init.tokenizer is required" in problems(plain)[0].detail


@pytest.mark.parametrize(
    "job, stages, needs_cache",
    [
        (JOB, ("precompute", "train"), True),
        (without("student", "train", kind="precompute"), ("precompute",), True),
        (JOB | {"kind": "train"}, ("train",), True),
        (JOB | {"kind": "train", "loss": {"alpha": 1}}, ("train",), False),
        (JOB | {"loss": {"alpha": 1}}, ("precompute", "train"), True),
    ],
)
def test_the_kind_decides_the_stages(job, stages, needs_cache):
    config = parse_config(job)
    assert (config.stages, config.needs_cache) == (stages, needs_cache)


def test_plain_text_needs_no_teacher():
    config = parse_config(without("teacher", kind="train", loss={"alpha": 1}, student={"model": "x"}))
    assert config.teacher is None and not config.needs_cache
    hot = without("teacher", kind="train", loss={"alpha": 1, "temperature": 2}, student={"model": "x"})
    assert parse_config(hot).loss.temperature == 2


def test_choices_that_exclude_each_other():
    assert "exactly one of student.model" in problems(changed("student.model", "x"))[0].detail
    assert "exactly one of student.model" in problems(JOB | {"student": {}})[0].detail
    assert "exactly one of train.max_steps" in problems(changed("train.epochs", 1.5))[0].detail
    assert "exactly one of train.max_steps" in problems(JOB | {"train": {}})[0].detail
    both = changed("data.validation_fraction", 0.1, changed("data.validation", "b.txt"))
    assert "not both" in problems(both)[0].detail
    assert "temperature" in problems(changed("loss.temperature", 2))[0].detail


HTTP = {"backend": "http", "model": "x", "url": "http://127.0.0.1:1", "tokenizer": "t"}
PLAIN = {"kind": "train", "loss": {"alpha": 1}}
LOOKING_AHEAD = {
    "loss": {"temperature": {"mode": "lookahead"}},
    "cache": {"profile": "tempered"},
    "data": {"train": ["a.txt"], "validation": ["b.txt"]},
}
NOTHING_HELD_OUT = {"train": "a.txt", "validation_fraction": 0}
STREAM = {"train": {"path": "org/set"}, "streaming": True, "max_train_samples": 9}
STEPS = {"max_steps": 10}

CONTRADICTIONS = {
    # what is refused, what is named, what is accepted instead
    "LoRA with a fresh student": (
        {"student": {"init": {"layers": 1, "hidden_size": 64}, "lora": {}}},
        ["student.lora", "student.init"],
        {"student": {"from_teacher": {"layers": 1}, "lora": {}}},
    ),
    "two origins": (
        {"student": {"model": "x", "from_teacher": {"layers": 1}}},
        ["student.model", "student.from_teacher"],
        {"student": {"model": "x"}},
    ),
    "a revision of nothing": (
        {"student": {"from_teacher": {"layers": 1}, "revision": "main"}},
        ["student.revision", "student.model"],
        {"student": {"model": "x", "revision": "main"}},
    ),
    "schedule-free with a cosine": (
        {"train": STEPS | {"optim": "schedule_free"}},
        ["train.optim schedule_free", "train.lr_scheduler_type", "cosine"],
        {"train": STEPS | {"optim": "schedule_free", "lr_scheduler_type": "constant"}},
    ),
    "another optimiser's argument": (
        {"train": STEPS | {"optim": "lion", "optim_args": {"momentum": 0.9}}},
        ["train.optim_args", "lion", "beta1, beta2"],
        {"train": STEPS | {"optim": "muon", "optim_args": {"momentum": 0.9}}},
    ),
    "one cycle that rises twice": (
        {
            "train": STEPS
            | {"lr_scheduler_type": "onecycle", "warmup_steps": 2, "lr_scheduler_kwargs": {"pct_start": 0.5}}
        },
        ["train.warmup_steps", "pct_start of train.lr_scheduler_kwargs"],
        {"train": STEPS | {"lr_scheduler_type": "onecycle", "warmup_steps": 2}},
    ),
    "one cycle that never falls": (
        {"train": STEPS | {"lr_scheduler_type": "onecycle", "warmup_steps": 10}},
        ["train.lr_scheduler_type", "train.warmup_steps 10", "train.max_steps 10"],
        {"train": {"epochs": 1, "lr_scheduler_type": "onecycle", "warmup_steps": 10}},
    ),
    "a constant rate that warms up": (
        {"train": STEPS | {"lr_scheduler_type": "constant", "warmup_steps": 2}},
        [
            "train.lr_scheduler_type constant has",
            "train.warmup_steps is 2",
            "use train.lr_scheduler_type constant_with",
        ],
        {"train": STEPS | {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}},
    ),
    "a schedule-free optimiser at a constant rate that warms up": (
        {"train": STEPS | {"optim": "schedule_free", "lr_scheduler_type": "constant", "warmup_steps": 2}},
        [
            "train.lr_scheduler_type constant has",
            "train.warmup_steps is 2",
            "use train.lr_scheduler_type constant_with",
        ],
        {"train": STEPS | {"optim": "schedule_free", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}},
    ),
    "CUDA graphs over gradients that are summed": (
        {"train": STEPS | {"compile": "reduce-overhead", "gradient_accumulation_steps": 2}},
        ["train.compile reduce-overhead", "train.gradient_accumulation_steps 2"],
        {"train": STEPS | {"compile": "reduce-overhead"}},
    ),
    "CUDA graphs over gradients of a rehearsal": (
        {"train": STEPS | {"compile": "max-autotune", "auto_batch": True}},
        ["train.compile max-autotune", "train.auto_batch"],
        {"train": STEPS | {"compile": "default", "auto_batch": True, "gradient_accumulation_steps": 2}},
    ),
    "CUDA graphs over gradients that a look ahead uses": (
        {"train": STEPS | {"compile": "max-autotune"}, **LOOKING_AHEAD},
        ["train.compile max-autotune", "loss.temperature.mode lookahead"],
        {"train": STEPS | {"compile": "default"}, **LOOKING_AHEAD},
    ),
    "a curriculum without a teacher": (
        PLAIN | {"train": STEPS | {"order": "curriculum"}},
        ["train.order", "loss.alpha"],
        {"kind": "train", "train": STEPS | {"order": "curriculum"}},
    ),
    "a schedule of the temperature that the profile cannot serve": (
        {"loss": {"temperature": RAMP}},
        ["loss.temperature 0.5", "cache.profile threshold", "use profile tempered"],
        {"loss": {"temperature": RAMP}, "cache": TEMPERED},
    ),
    "a schedule that leaves the range": (
        {"loss": {"temperature": RAMP | {"end": 0.4}}, "cache": TEMPERED},
        ["loss.temperature 0.4", "cache.profile tempered", "cache.temperatures"],
        {"loss": {"temperature": RAMP | {"end": 0.5}}, "cache": TEMPERED},
    ),
    "a learned temperature that the profile cannot serve": (
        {"loss": {"temperature": LEARNED}, "cache": {"profile": "topk"}},
        ["loss.temperature 0.5", "cache.profile topk"],
        {"loss": {"temperature": LEARNED}, "cache": TEMPERED},
    ),
    "a learned temperature with a bound outside the range": (
        {"loss": {"temperature": LEARNED | {"max": 2.5}}, "cache": TEMPERED},
        ["loss.temperature 2.5", "cache.temperatures"],
        {"loss": {"temperature": LEARNED | {"max": 1.5}}, "cache": TEMPERED},
    ),
    "a learned temperature and nothing of the teacher": (
        {"loss": {"temperature": LEARNED, "alpha": 1}, "cache": TEMPERED},
        ["loss.temperature.mode adversarial", "loss.alpha 1"],
        {"loss": {"temperature": LEARNED, "alpha": 0.9}, "cache": TEMPERED},
    ),
    "looking ahead at nothing": (
        {"loss": {"temperature": LEARNED | {"mode": "lookahead"}}, "cache": TEMPERED, "data": NOTHING_HELD_OUT},
        ["loss.temperature.mode lookahead", "data.validation_fraction"],
        {"loss": {"temperature": LEARNED}, "cache": TEMPERED, "data": NOTHING_HELD_OUT},
    ),
    "a tempered teacher and nothing to measure it by": (
        {"loss": {"temperature": LEARNED | {"mode": "teacher_only"}}, "cache": TEMPERED, "data": NOTHING_HELD_OUT},
        ["loss.temperature.mode teacher_only", "data.validation_fraction"],
        {
            "loss": {"temperature": LEARNED | {"mode": "teacher_only"}},
            "cache": TEMPERED,
            "data": NOTHING_HELD_OUT | {"validation": "b.txt", "validation_fraction": None},
        },
    ),
    "an entropy to hold without its value": (
        {"loss": {"temperature": LEARNED | {"mode": "entropy"}}, "cache": TEMPERED},
        ["loss.temperature.target_entropy", "mode entropy"],
        {"loss": {"temperature": LEARNED | {"mode": "entropy", "target_entropy": 2}}, "cache": TEMPERED},
    ),
    "a divergence that the profile cannot serve": (
        {"loss": {"divergence": "jsd"}},
        ["loss.divergence jsd", "cache.profile threshold", "use profile hidden or dense"],
        {"loss": {"divergence": "jsd"}, "cache": {"profile": "dense"}},
    ),
    "a divergence that a tempered cache cannot serve": (
        {"loss": {"divergence": "reverse_kl", "temperature": 1.5}, "cache": TEMPERED},
        ["loss.divergence reverse_kl", "cache.profile tempered"],
        {"loss": {"divergence": "forward_kl", "temperature": 1.5}, "cache": TEMPERED},
    ),
    "features of a profile that keeps none": (
        {"loss": {"features": {"weight": 1}}, "cache": {"profile": "dense"}},
        ["loss.features", "cache.profile hidden", "dense"],
        {"loss": {"features": {"weight": 1}}, "cache": {"profile": "hidden"}},
    ),
    "features without a cache that keeps them": (
        {"kind": "train", "loss": {"alpha": 1, "features": {"weight": 1}}},
        ["loss.features", "cache.profile hidden"],
        {"kind": "train", "loss": {"alpha": 1, "features": {"weight": 1}}, "cache": {"profile": "hidden"}},
    ),
    "features without a teacher": (
        {"kind": "train", "teacher": None, "loss": {"alpha": 1, "features": {"weight": 1}}, "student": {"model": "x"}},
        ["teacher", "loss.features"],
        {"kind": "train", "teacher": None, "loss": {"alpha": 1}, "student": {"model": "x"}},
    ),
    "a student cut out of a server": (
        {"teacher": HTTP, "student": {"from_teacher": {"layers": 1}}, "cache": {"profile": "topk"}},
        ["student.from_teacher", "teacher.backend is http"],
        {"teacher": HTTP, "student": {"model": "x"}, "cache": {"profile": "topk"}},
    ),
    "a student cut out of nothing": (
        PLAIN | {"teacher": None, "student": {"from_teacher": {"layers": 1}}},
        ["student.from_teacher", "no teacher"],
        PLAIN | {"student": {"from_teacher": {"layers": 1}}},
    ),
    "comparing with a server": (
        {"teacher": HTTP, "evaluation": {"teacher": True}, "cache": {"profile": "topk"}},
        ["evaluation.teacher", "teacher.backend is http"],
        {"evaluation": {"teacher": True}},
    ),
    "comparing with no teacher": (
        PLAIN | {"teacher": None, "student": {"model": "x"}, "evaluation": {"teacher": True}},
        ["evaluation.teacher", "no teacher"],
        PLAIN | {"student": {"model": "x"}, "evaluation": {"teacher": True}},
    ),
    "a baseline of no student": (
        {"kind": "precompute", "student": None, "evaluation": {"baseline": True}},
        ["evaluation.baseline", "student is not given"],
        {"kind": "precompute", "student": None},
    ),
    "a baseline of no training": (
        {"kind": "precompute", "train": None, "evaluation": {"baseline": True}},
        ["evaluation.baseline", "train is not given"],
        {"evaluation": {"baseline": True}},
    ),
    "a search for nothing": ({"kind": "search"}, ["search", "kind"], {"kind": "search", "search": SEARCH}),
    "a space that nobody searches": ({"search": SEARCH}, ["search", "kind"], {}),
    "a schedule of alpha without a teacher": (
        {"kind": "train", "teacher": None, "loss": {"alpha": RAMP | {"start": 1}}, "student": {"model": "x"}},
        ["teacher is required", "loss.alpha below 1"],
        {"kind": "train", "loss": {"alpha": RAMP | {"start": 1}}},
    ),
    "early stopping by nothing": (
        {"data": NOTHING_HELD_OUT, "train": STEPS | {"early_stopping_patience": 1}},
        ["train.early_stopping_patience", "data.validation_fraction"],
        {"data": NOTHING_HELD_OUT | {"validation_fraction": 0.1}, "train": STEPS | {"early_stopping_patience": 1}},
    ),
    "a stream without an end": (
        {"data": STREAM | {"max_train_samples": None}},
        ["data.streaming", "data.max_train_samples"],
        {"data": STREAM},
    ),
    "a slice of a stream": (
        {"data": STREAM | {"train": {"path": "org/set", "split": "train[:1%]"}}},
        ["data.streaming", "train[:1%]", "max_train_samples"],
        {"data": STREAM | {"train": {"path": "org/set", "split": "train"}}},
    ),
    "held-out text without an end": (
        {"data": STREAM | {"validation": {"path": "org/set", "split": "test"}}},
        ["data.streaming", "data.validation", "data.max_eval_samples"],
        {"data": STREAM | {"validation": "b.txt"}},
    ),
}


@pytest.mark.parametrize("refused, named, accepted", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_levers_that_contradict_each_other_are_refused_with_both_named(refused, named, accepted):
    (found,) = problems(JOB | refused)
    where = found.pointer.strip("/").replace("/", ".")
    assert [name for name in named if name not in f"{where} {found.detail}"] == []
    parse_config(JOB | accepted)


@pytest.mark.parametrize("mode", ["lookahead", "teacher_only"])
def test_a_sealed_cache_may_hold_text_out_where_the_job_does_not(mode):
    job = without("teacher", kind="train", student={"model": "x"}, cache={"fingerprint": "0" * 32})
    learned = {"loss": {"temperature": LEARNED | {"mode": mode}}}
    assert parse_config(job | learned | {"data": NOTHING_HELD_OUT}).needs_cache


WARM = {"profile": "tempered", "temperatures": {"min": 1, "max": 2}}


@pytest.mark.parametrize(
    "section, told",
    [
        ({"profile": "topk", "threshold": 0.1}, "profile topk has no use for threshold; it takes k"),
        ({"profile": "dense", "draws": 2}, "profile dense has no use for draws; it takes dtype"),
        ({"profile": "threshold", "k": 8}, "profile threshold has no use for k"),
        ({"profile": "hidden", "always_keep": [1]}, "profile hidden has no use for always_keep"),
        ({"profile": "dense", "dtype": "int8"}, "dtype of profile dense must be one of auto, float16, float32"),
        ({"profile": "hidden", "dtype": "float16"}, "dtype of profile hidden must be one of auto, int16, int8"),
        ({"profile": "tempered", "temperatures": {"min": 2, "max": 2}}, "min 2 must be below max 2"),
        ({"always_keep": [3, 3]}, "names a token twice"),
        ({"fingerprint": "0" * 32}, "use kind train"),
    ],
)
def test_a_profile_takes_its_own_options_only(section, told):
    assert told in problems(JOB | {"cache": section})[0].detail


@pytest.mark.parametrize("section", [{"profile": "topk"}, {"profile": "dense"}, {"profile": "hidden"}, WARM])
def test_every_profile_survives_its_own_dump(section):
    config = parse_config(JOB | {"cache": section})
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("job", [job for *_, job in LEVELS])
def test_every_form_of_a_value_survives_its_own_dump(job):
    config = parse_config(job)
    assert parse_config(config.model_dump(mode="json")) == config
    assert parse_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    "section, temperature, told",
    [
        ({"profile": "threshold"}, 2, "use profile tempered"),
        ({"profile": "topk"}, 0.5, "use profile tempered"),
        (WARM, 0.9, "covers temperatures 1 to 2"),
        (WARM, 1.5, None),
        ({"profile": "dense"}, 4, None),
        ({"profile": "hidden"}, 0.1, None),
    ],
)
def test_a_temperature_that_the_profile_cannot_serve_is_refused_by_naming_one_that_can(section, temperature, told):
    job = JOB | {"cache": section, "loss": {"temperature": temperature}}
    if told is None:
        assert parse_config(job).loss.temperature == temperature
    else:
        assert told in problems(job)[0].detail


def test_a_server_gives_its_most_probable_tokens_only():
    job = changed("teacher", {"backend": "http", "model": "x", "url": "http://127.0.0.1:1", "tokenizer": "t"})
    assert "set cache.profile to topk" in problems(job)[0].detail
    assert parse_config(job | {"cache": {"profile": "topk"}}).cache.entries == 64


def test_a_sealed_cache_takes_the_place_of_teacher_and_text():
    job = without("teacher", "data", kind="train", cache={"fingerprint": "0" * 32}, student={"model": "x"})
    assert parse_config(job).needs_cache


def test_what_is_held_out():
    fraction = {"data.validation": ("v.txt", 0.0), "data.validation_fraction": (0.25, 0.25), "name": ("x", 0.02)}
    for path, (value, expected) in fraction.items():
        assert parse_config(changed(path, value)).data.held_out_fraction == expected


# ---------------------------------------------------------------------- one tree from every spelling


def set_lines(value: Any, path: str = "") -> Iterator[str]:
    """The tree as ``a.b=value`` overrides."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from set_lines(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}={json.dumps(inner)}"


def test_yaml_json_and_overrides_give_the_same_tree(tmp_path):
    expected = parse_config(JOB)
    for name, text in {"job.yaml": yaml.safe_dump(JOB), "job.json": json.dumps(JOB), "empty.yaml": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "job.yaml") == expected
    assert load_config(tmp_path / "job.json") == expected
    assert load_config(tmp_path / "empty.yaml", set_lines(JOB)) == expected
    assert parse_config(json.loads(expected.model_dump_json())) == expected
    assert parse_config(expected.model_dump(mode="json")) == expected


def test_overrides_reach_every_depth_and_the_last_one_wins(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB), encoding="utf-8")
    lines = ["train.max_steps=7", "train.max_steps=8", "train.learning_rate=2e-4", "student.init.hidden_size=128"]
    lines += ["data.train=[x.txt, {path: y}]", "teacher.revision=main", "cache={seed: 3}", "data.packing=false"]
    config = load_config(path, lines)
    assert (config.train.max_steps, config.train.learning_rate) == (8, 2e-4)
    assert (config.student.init.hidden_size, config.student.init.layers) == (128, 2)
    assert config.data.train == ("x.txt", DatasetSpec(path="y"))
    assert (config.teacher.revision, config.cache.seed, config.cache.threshold) == ("main", 3, 0.04)
    assert config.data.packing is False and config.data.sequence_length == 128
    assert load_config(path) == parse_config(JOB)


def test_a_value_may_hold_an_equals_sign_and_null_takes_a_choice_back():
    config = parse_config(apply_overrides(JOB, ["teacher.model=a=b", "train.max_steps=null", "train.epochs=2"]))
    assert config.teacher.model == "a=b" and (config.train.max_steps, config.train.epochs) == (None, 2)


def nulled(section: type[BaseModel]) -> Iterator[str]:
    """The fields of ``section`` that have a default, but not null among their values."""
    for name, field in section.model_fields.items():
        if not field.is_required() and type(None) not in typing.get_args(field.annotation):
            yield name


def outcome(job: dict[str, Any]) -> JobConfig | list[Problem]:
    """The job, or what is wrong with it: the parts of one may need more than the default."""
    try:
        return parse_config(job)
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize(
    "level, section, job", LEVELS, ids=[f"{level} {section.__name__}" for level, section, _ in LEVELS]
)
def test_null_is_the_default_of_every_field_that_has_one(level, section, job):
    for name in nulled(section):
        path = f"{level}.{name}".lstrip(".")
        before = copy.deepcopy(job)
        inner: Any = before
        for key in [int(key) if key.isdigit() else key for key in level.split(".") if key]:
            inner = inner.setdefault(key, {}) if isinstance(key, str) else inner[key]
        inner.pop(name, None)
        assert outcome(changed(path, None, job)) == outcome(before)


def test_null_is_kept_where_it_is_a_value():
    config = parse_config(apply_overrides(JOB, ["student.init=null", "student.model=x", "cache=null"]))
    assert config.student == StudentConfig(model="x") and config.cache == CacheConfig()
    assert "init" in config.student.model_fields_set and "cache" not in config.model_fields_set


def test_the_schema_takes_null_where_a_job_does():
    schema = JobConfig.model_json_schema()
    for section in all_sections():
        properties = schema["properties"] if section is JobConfig else schema["$defs"][section.__name__]["properties"]
        for name, field in section.model_fields.items():
            forms = properties[name].get("anyOf", [])
            assert ({"type": "null"} in forms) == (
                name in set(nulled(section)) or type(None) in typing.get_args(field.annotation)
            ), (section, name)


def test_overrides_leave_the_original_alone():
    job = copy.deepcopy(JOB)
    apply_overrides(job, ["train.max_steps=99", "student.init.layers=9"])
    assert job == JOB


@pytest.mark.parametrize("line", ["train.max_steps", "=3", "a..b=1", ".a=1", "", "train.max_steps=[1", "a={b: "])
def test_an_override_that_cannot_be_read_is_refused(line):
    with pytest.raises(ConfigError, match="override"):
        apply_overrides(JOB, [line])


def test_an_unknown_key_in_an_override_is_refused_like_any_other():
    (found,) = problems(apply_overrides(JOB, ["train.max_step=3"]))
    assert (found.pointer, found.remedy) == ("/train/max_step", "Did you mean max_steps?")


@pytest.mark.parametrize(
    ("name", "remedy"), [("5f1d", "`kd cache info 5f1d` prints it."), ("5F1D" * 8, ""), ("caches/5f1d", ""), ("", "")]
)
def test_a_fingerprint_is_given_whole(name, remedy):
    (found,) = problems({"kind": "verify", "cache": {"fingerprint": name}})
    detail = f"must be a whole fingerprint, 32 hexadecimal digits, but got {name!r}."
    assert found == Problem("/cache/fingerprint", detail, remedy)


@pytest.mark.parametrize("name", ["Bad_Name", "-a", "a b", "", "a" * 64])
def test_what_a_name_may_hold_is_said(name):
    (found,) = problems(changed("name", name))
    allowed = "1 to 63 lower-case letters, digits, dots, dashes and underscores, the first a letter or a digit"
    assert found == Problem("/name", f"must be {allowed}, but got {name!r}.")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no job file at .*gone\.yaml"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    for name, content, what in [
        ("latin.yaml", b"name: caf\xe9", "cannot be read"),
        ("torn.yaml", b"a: [1, 2", "is not valid YAML"),
        ("tag.yaml", b"a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("list.yaml", b"- a", "must be a mapping, but got a list"),
        ("nothing.yaml", b"", "must be a mapping, but got null"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=what):
            load_config(tmp_path / name)


def test_a_key_given_twice_is_refused_with_its_lines(tmp_path):
    file = tmp_path / "job.yaml"
    for text, found in [
        ("name: x\ntrain:\n  max_steps: 3\n  max_steps: 300\n", r"key 'max_steps' is given twice \(lines 3 and 4\)\."),
        ('{"name": "x", "name": "y"}', r"key 'name' is given twice \(line 1\)\."),
        ("name: x\ndata:\n  train: [{path: a, 'path': b}]\n", r"key 'path' is given twice \(line 3\)\."),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=found):
            load_config(file)
    with pytest.raises(ConfigError, match="key 'seed' is given twice"):
        apply_overrides(JOB, ["train={seed: 1, seed: 2}"])


def test_what_a_merge_key_brings_may_be_given_anew():
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {y: 4, <<: *b}\nd: {<<: [*a, {z: 5}], x: 6}\n"
    assert parse_yaml(text) == {
        "a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 4}, "d": {"x": 6, "y": 2, "z": 5},
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_valid(path):
    assert load_config(path).name


# ---------------------------------------------------------------------- frozen


def test_nothing_can_be_assigned():
    config = parse_config(JOB)
    for section, name in [(config, "name"), (config.train, "max_steps"), (config.student.init, "layers")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, getattr(section, name))
    assert isinstance(config.data.train, tuple)


# ---------------------------------------------------------------------- what other libraries must accept


def test_schedulers_are_those_of_transformers_that_need_no_metric():
    """Two of them step on a metric, ``step(metrics)``, and so are no function of the step alone."""
    from transformers.trainer_utils import SchedulerType

    metric_driven = {"reduce_lr_on_plateau", "greedy"}
    assert set(typing.get_args(Scheduler)) - {"onecycle"} == {each.value for each in SchedulerType} - metric_driven


def test_a_schedules_arguments_are_those_of_transformers_that_are_numbers():
    import inspect

    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for name in set(SCHEDULER_KWARGS) - {"onecycle"}:
        optional, needed = SCHEDULER_KWARGS[name]
        signature = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[name]).parameters
        numbers = {key for key, each in signature.items() if not isinstance(each.default, str)}
        assert optional | needed == numbers - ours, name
        assert {key for key in numbers - ours if signature[key].default is inspect.Parameter.empty} <= needed


def test_the_arguments_of_one_cycle_are_those_of_torch_that_are_numbers():
    """Save those that move a momentum, which is left alone."""
    import inspect

    from torch.optim.lr_scheduler import OneCycleLR

    parameters = inspect.signature(OneCycleLR).parameters
    numbers = {key for key, each in parameters.items() if isinstance(each.default, float)}
    assert SCHEDULER_KWARGS["onecycle"] == (numbers - {"base_momentum", "max_momentum"}, set())


@pytest.mark.parametrize("name", typing.get_args(Optimizer))
def test_an_optimisers_arguments_are_those_of_its_library(name):
    from kd.levers.optimizers import optimizer_arguments

    options = TrainConfig(max_steps=1, optim=name, lr_scheduler_type="constant")
    assert OPTIMIZER_ARGUMENTS[name] == set(optimizer_arguments(name, options))


@pytest.mark.parametrize(
    "name, arguments, complaint",
    [
        ("cosine_with_min_lr", {}, "must hold min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0, "min_lr_rate": 0}, "must hold min_lr or min_lr_rate"),
        ("warmup_stable_decay", {}, "must hold num_decay_steps"),
        ("constant", {"num_cycles": 1}, "cannot hold num_cycles, only nothing"),
        ("cosine", {"num_cycle": 1}, "cannot hold num_cycle, only num_cycles"),
    ],
)
def test_a_schedule_without_its_arguments_is_refused_before_anything_runs(name, arguments, complaint):
    schedule = {"max_steps": 1, "lr_scheduler_type": name, "lr_scheduler_kwargs": arguments}
    (found,) = problems(JOB | {"train": schedule})
    assert found.pointer == "/train" and complaint in found.detail


SCHEDULE_KWARGS: dict[str, dict[str, float]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
}


@pytest.mark.parametrize("name", typing.get_args(Scheduler))
def test_every_scheduler_can_be_made_and_stepped(name):
    import torch

    from kd.levers.schedules import make_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    options = {"max_steps": 10, "lr_scheduler_type": name, "lr_scheduler_kwargs": SCHEDULE_KWARGS.get(name, {})}
    options |= {"warmup_steps": 0 if name == "constant" else 2}
    scheduler = make_scheduler(optimizer, parse_config(JOB | {"train": options}).train, 10)
    rates = []
    for _ in range(10):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert 0.25 <= max(rates) <= 0.5
    assert name == "constant" or rates[0] < rates[2]  # warm-up


def test_default_shapes_of_a_fresh_llama_are_buildable():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for hidden in range(8, 513, 2):
        init = StudentInit(layers=1, hidden_size=hidden)
        assert hidden % init.heads == 0 and (hidden // init.heads) % 2 == 0
        assert init.mlp_width % 32 == 0 and 0 <= init.mlp_width - hidden * 8 / 3 < 32
        if hidden > 48 and hidden % 64:
            continue  # building takes the time: all small ones, and every 64th
        shape = LlamaConfig(
            vocab_size=16,
            hidden_size=hidden,
            intermediate_size=init.mlp_width,
            num_hidden_layers=1,
            num_attention_heads=init.heads,
            num_key_value_heads=init.heads,
        )
        with torch.no_grad():
            logits = LlamaForCausalLM(shape)(input_ids=torch.arange(8)[None]).logits
        assert logits.shape == (1, 8, 16) and logits.isfinite().all()


@pytest.mark.parametrize("hidden", [9, 33, 511])
def test_a_width_that_no_head_divides_is_refused_not_crashed_on(hidden):
    (found,) = problems(changed("student.init.hidden_size", hidden))
    assert found.pointer == "/student/init" and "even" in found.detail
