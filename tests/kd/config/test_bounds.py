"""Every field refuses values outside its bounds, and has a description."""

import re
import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from bench.support.paths import ROOT
from kd.config.data import DatasetSpec
from kd.config.fields.described import explain_field
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from tests.support.kd.jobs import (
    COOLING,
    CUT_OUT,
    DROPPING,
    JOB,
    LEARNED,
    LEARNING,
    LORA,
    RAMP,
    RAMPED,
    SEARCH,
    SEARCHING,
    TEMPERED,
    all_sections,
    changed,
    problems,
    sections,
)

#: A test compares it with the descriptions: tests/system/test_readme.py.
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
BOUNDS = [
    # path, refused, accepted
    ("kind", ["distil", 1], [None]),
    ("name", ["", "Upper", "a b", "-a", "a" * 64, "ä"], ["a", "a" * 63, "0.1_x-y"]),
    ("teacher.model", [""], ["x"]),
    ("teacher.backend", ["vllm"], ["local", None]),
    ("teacher.url", ["host:8000", "ftp://host", "http://name:secret@host"], []),
    ("teacher.tokenizer", [""], []),
    ("teacher.api_key_env", ["HOME", "KD_REDIS_URL"], []),
    ("teacher.proposal", [""], []),
    ("teacher.concurrency", [0, 257], [1, 256]),
    ("teacher.max_length", [7, 1_048_577], []),
    ("teacher.dtype", ["int8", "fp32"], ["auto", "bfloat16"]),
    ("teacher.quantization", ["nf4", "int2", 8], ["int8", "int4", None]),
    ("teacher.parallel", ["pipeline", "auto", 2], ["none", "device_map", "tensor", "fsdp"]),
    ("teacher.batch_size", [0, 4097, 1.5, "many"], [1, 4096]),
    ("student.init.layers", [0, 257], [1, 256]),
    ("student.init.hidden_size", [7, 9, 32769], [8, 10]),
    ("student.init.intermediate_size", [7, 131073], [8]),
    ("student.init.num_attention_heads", [0, 3, 64], [1, 2, 32]),
    ("student.init.num_key_value_heads", [0, 3], [1, 2]),
    ("data.train", [[], 3, None, ["a"] * 1001], ["a.txt", {"path": "x"}, ["a"] * 1000]),
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
    ("cache.extends", ["abc", "G" * 32], []),
    (
        "cache.store",
        ["", " ", "ftp://x/y", "gs://bucket/a", "s3://a b", "s3://me:pw@bucket", "x" * 1025],
        ["s3://bucket/a", "/data/caches", "s3://bucket"],
    ),
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
    (
        "loss.temperature.mode",
        ["entropic", "entropy"],
        ["adversarial", "lookahead", "teacher_only"],
    ),
    ("loss.temperature.min", [0.04, 1.0, 101], [0.05, 0.99]),
    ("loss.temperature.max", [0.04, 1.0, 101], [1.01, 100]),
    ("loss.temperature.init", [0.04, 0.5, 2.0, 101], [0.6, 1.9]),
    ("loss.temperature.learning_rate", [0, 11], [10]),
    ("loss.temperature.target_entropy", [0, 21, 2], [None]),
    ("loss.temperature.interval", [0, 100_001], [1]),
    ("loss.divergence", ["kl", "jsd"], ["forward_kl"]),
    ("loss.beta", [0, 1], [0.01, 0.99]),
    ("loss.label_smoothing", [-0.1, 1], [0, 0.9]),
    ("loss.router_balance", [-0.1, 10.1], [0, 10, None]),
    ("loss.entropy_weighting", [-4.1, 4.1], [-4, 4]),
    ("loss.features.weight", [-1, 1001], [0]),
    ("loss.features.kind", ["l1"], ["mse", "cosine"]),
    ("train.max_steps", [0, 100_000_001, None], [1]),
    ("train.epochs", [1], []),
    ("train.batch_size", [0, 65537], [1]),
    ("train.gradient_accumulation_steps", [0], [1]),
    ("train.learning_rate", [0, -1, 11, float("inf")], [1e-9, 10]),
    (
        "train.lr_scheduler_type",
        ["cosin", "reduce_lr_on_plateau", "linear", "step", "multistep"],
        ["cosine_with_restarts"],
    ),
    (
        "train.lr_scheduler_kwargs",
        [{"num_cycles": "b"}, {"num_cycles": float("inf")}, {"a": 1}, 3],
        [{}, {"num_cycles": 1}],
    ),
    ("train.warmup_steps", [-1], [0]),
    (
        "train.optim",
        ["adam", "adamw_4bit"],
        ["adamw", "adamw_8bit", "adafactor", "muon", "lion", "lars", None],
    ),
    (
        "train.optim_args",
        [{"amsgrd": 1}, {"momentum": 1}, {"amsgrad": "yes?"}, 3],
        [{}, {"amsgrad": True}],
    ),
    ("train.ema_decay", [0, 1], [0.999, None]),
    ("train.weight_decay", [-1, 11], [0]),
    ("train.lm_head_floor", [-0.1, 1.0], [0]),
    ("train.max_grad_norm", [-1], [0]),
    ("train.dropout", [-0.1, 1.0, {"start": 0}], [0, 0.99, None, RAMP]),
    ("train.dropout.schedule", ["sine", None], ["linear", "cosine", "step"]),
    ("train.dropout.start", [-0.1, 1.0], [0, 0.99]),
    ("train.dropout.end", [-0.1, 1.0], [0, 0.99]),
    ("train.dropout.steps", [0, 100_000_001], [1, None]),
    ("train.fp8", [2, "e4m3"], [True, False]),
    ("train.precision", ["int8", "bfloat16"], ["bf16", "bf16_pure"]),
    (
        "train.gradient_checkpointing",
        ["all", 0, 1, 1025],
        ["none", "full", "sqrt", 2, 1024, True, False],
    ),
    ("train.activation_offload", [2, "gpu"], [True, False]),
    ("train.strategy", ["dp", 2], ["auto", "single", "ddp", "fsdp", "pipeline"]),
    ("train.fsdp_offload", [2, "cpu"], [False]),
    (
        "train.compile",
        ["fast", 1],
        ["none", "default", "reduce-overhead", "max-autotune", True, False],
    ),
    ("train.logits_chunk", [0, 1_048_577], [1, None]),
    ("train.order", ["random"], ["shuffled", "windows", "length", "curriculum"]),
    ("train.dataloader_num_workers", [-1, 65], [0, 64]),
    ("train.report_to", ["wandb", ["wand"]], [[], ["tensorboard", "wandb", "mlflow", "trackio"]]),
    ("train.logging_steps", [0], [1]),
    ("train.eval_steps", [0], [1]),
    ("train.save_steps", [0], [1]),
    ("train.save_total_limit", [0], [1]),
    ("train.early_stopping_patience", [0], [1, None]),
    ("train.save_dtype", ["fp32"], ["float32"]),
    ("train.seed", [-1, 2**32], [0]),
    ("checks.spike_factor", [-1, 1001], [0, 1000]),
    ("checks.max_skipped", [-1, 10_001], [0, 10_000]),
    ("evaluation.prompts", ["text", ["a"] * 65], [[], ["a"] * 64]),
    ("evaluation.max_new_tokens", [0, 4097], [1, 4096]),
    ("evaluation.continuations", [-1, 65], [0, 64]),
    ("evaluation.samples", [-1, 9], [0, 8]),
    ("evaluation.tasks", [["a"] * 65], [["hellaswag"]]),
    (
        "search.space",
        [{}, {"x": {}}, {"x": {"min": 0}}, {str(each): SEARCH["space"]["x"] for each in range(33)}],
        [],
    ),
    ("search.space.x.min", [1, "low"], [-1]),
    ("search.space.x.log", [True, 3], [False]),
    ("search.space.x.choices", [[], list(range(65)), [1]], [None]),
    ("search.trials", [0, 10_001], [1, 10_000]),
    ("search.sampler", ["grid"], ["tpe", "gp", "random"]),
    (
        "labels",
        [{"": "x"}, {"a b": "x"}, {"a": "x\n"}, {"a" * 64: "x"}, {str(n): "x" for n in range(17)}],
        [{"a": "x/1"}],
    ),
    ("resume.schedule", ["continue"], ["extend", "restart", "constant"]),
    (
        "resume.run",
        ["", "../other", "a/b", ".hidden", "a" * 65],
        ["run-1", "job_" + "0" * 26, None],
    ),
    ("priority", [-1, 10, 1.5], [0, 9]),
    ("depends_on", [["job"], ["job_" + "a" * 25], ["job_" + "a" * 26] * 33], [["job_" + "a" * 26]]),
    ("deadline_seconds", [0, 31_622_401, "soon"], [1, 31_622_400]),
    ("max_attempts", [0, 1001], [1, 1000]),
    ("resources.gpus", [-1, 65, 0.5], [0, 64]),
    ("resources.hosts", [0, 1025, 0.5], [1, 1024]),
    ("resources.memory", [0, "16 Gigs", "2PiB", -1], [1, "16GiB", "1.5 GB", "80G"]),
    (
        "webhook",
        ["host/path", "ftp://host", "https://a b", "https://h/" + "a" * 2048],
        ["https://host/path"],
    ),
]
#: The job to change for a path: the first whose key begins the path.
HOLDERS = {
    "student.lora.": LORA,
    "student.from_teacher.": CUT_OUT,
    "loss.alpha.": RAMPED,
    "loss.temperature.s": COOLING,
    "loss.temperature.e": COOLING,
    "loss.temperature.": LEARNING,
    "search.": SEARCHING,
    "train.dropout.": DROPPING,
    "cache.draws": JOB | {"cache": TEMPERED},
    "": JOB,
}


@pytest.mark.parametrize("path, refused, accepted", BOUNDS, ids=[path for path, *_ in BOUNDS])
def test_values_outside_their_bounds_are_refused_at_their_place(path, refused, accepted):
    pointer = "/" + path.replace(".", "/")
    job = next(job for beginning, job in HOLDERS.items() if path.startswith(beginning))
    for value in refused:
        found = problems(changed(path, value, job))
        for each in found:  # at the field, inside it, or at its section with the field named
            assert (
                each.pointer.startswith(pointer)
                or path.rpartition(".")[2].removesuffix("_type") in each.detail
            )
    for value in accepted:
        parse_config(changed(path, value, job))


def test_every_bounded_field_is_in_the_table():
    def bounded(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
        for name, field in section.model_fields.items():
            if field.metadata and not list(sections(field.annotation)):
                yield prefix + name
            # The section of each of several teachers is that of one.
            for inner in () if name == "teachers" else sections(field.annotation):
                if inner is not DatasetSpec:
                    key = "x." if typing.get_origin(field.annotation) is dict else ""
                    yield from bounded(inner, f"{prefix}{name}.{key}")

    assert set(bounded(JobConfig)) - {"student.model"} <= {path for path, *_ in BOUNDS}


def list_arrays(schema: typing.Any) -> Iterator[dict[str, typing.Any]]:
    """Yield every list of a JSON schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from list_arrays(each)


def test_the_schema_shows_the_bound_of_every_list():
    lists = list(list_arrays(JobConfig.model_json_schema()))
    assert len(lists) > 5
    assert [each for each in lists if "maxItems" not in each] == []


@pytest.mark.parametrize("name", ["memory", "host_memory"])
def test_the_schema_shows_the_bounds_of_a_size_in_words(name):
    schema = JobConfig.model_json_schema()
    (properties,) = [
        each["properties"]
        for each in schema["$defs"].values()
        if name in each.get("properties", {})
    ]
    number = properties[name]["anyOf"][0]
    assert number.keys() >= {"minimum", "maximum"}


def test_every_field_says_what_it_is():
    for section in all_sections():
        for name, field in section.model_fields.items():
            assert field.description and field.description.endswith("."), (
                f"{section.__name__}.{name}"
            )


def test_the_reference_tells_every_section_once_with_all_its_places():
    levers, *headings = re.findall(r"^## .*", PAGE, re.MULTILINE)
    assert len(headings) == len(set(headings)) == len(all_sections())
    assert (levers, headings[0]) == ("## Levers", "## The job")
    assert {
        "## `data.train[]`, `data.validation[]`",
        "## `loss.alpha`, `loss.temperature`, `train.dropout` with `schedule`",
        "## `loss.temperature` with `mode`",
        "## `search.space.*`",
        "## `student.lora`",
    } <= set(headings)


@pytest.mark.parametrize(
    "row",
    [
        "| `alpha` | number ≥ 0, ≤ 1 or section | `0.1` |",
        (
            "| `temperature` | number > 0, ≤ 100 or section with `schedule` or section with "
            "`mode` | `1.0` |"
        ),
        "| `space` | mapping of names to sections | required |",
        "| `optim_args` | mapping of names to numbers | – |",
        '| `gradient_checkpointing` | `none`, `full`, `sqrt` or integer ≥ 2, ≤ 1024 | `"none"` |',
        "| `report_to` | list of `tensorboard`, `wandb`, `mlflow`, `trackio` | – |",
        "| `choices` | list of text or number or integer or true or false | – |",
        "| `train` | list of text or section | – |",
    ],
)
def test_the_reference_says_what_a_field_of_several_forms_may_be(row):
    assert row in PAGE


def test_every_field_of_the_reference_can_be_explained(monkeypatch):
    schema = JobConfig.model_json_schema()  # a tenth of a second, for each of 200 fields
    monkeypatch.setattr(JobConfig, "model_json_schema", lambda: schema)

    def descend(place):
        for each in explain_field(place):
            if each.place != place:
                yield each.place.rpartition(".")[2]
                yield from descend(each.place)

    found = {name for section in JobConfig.model_fields for name in (section, *descend(section))}
    assert found >= set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


@pytest.mark.parametrize(
    ("place", "value", "default"),
    [
        ("cache.threshold", "number ≥ 0.001, ≤ 0.5", "0.04"),
        ("data.train.path", "text", "required"),
        ("loss.alpha", "number ≥ 0, ≤ 1 or section", "0.1"),
    ],
)
def test_a_field_is_explained_with_what_it_may_be(place, value, default):
    found = explain_field(place)[0]
    assert (found.place, found.value, found.default) == (place, value, default)
    assert found.meaning


@pytest.mark.parametrize("place", ["", "nonsense", "cache.nonsense", "cache.threshold.x"])
def test_what_is_no_field_has_no_explanation(place):
    assert explain_field(place) == []
