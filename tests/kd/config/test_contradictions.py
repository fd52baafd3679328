"""Parts of a job that need each other, and parts that exclude each other."""

import copy
import json
from typing import Any

import pytest

from kd.config.jobfile import parse_config
from tests.support.kd.jobs import (
    JOB,
    LEARNED,
    LEVELS,
    RAMP,
    SEARCH,
    TEMPERED,
    changed,
    problems,
)


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
    config = parse_config(
        without("teacher", kind="train", loss={"alpha": 1}, student={"model": "x"})
    )
    assert config.teacher is None and not config.needs_cache
    hot = without(
        "teacher", kind="train", loss={"alpha": 1, "temperature": 2}, student={"model": "x"}
    )
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
    "weights in bfloat16 under an optimiser that would lose small steps": (
        {"train": STEPS | {"precision": "bf16_pure", "optim": "lion"}},
        ["train.precision bf16_pure", "adamw or adamw_8bit", "train.optim is lion"],
        {"train": STEPS | {"precision": "bf16_pure", "optim": "adamw_8bit"}},
    ),
    "adapters in bfloat16": (
        {
            "student": {"model": "x", "lora": {"rank": 2}},
            "train": STEPS | {"precision": "bf16_pure"},
        },
        ["train.precision bf16_pure", "student.lora", "student.lora.base to bfloat16"],
        {
            "student": {"model": "x", "lora": {"rank": 2, "base": "bfloat16"}},
            "train": STEPS | {"precision": "bf16"},
        },
    ),
    "a look ahead that bfloat16 rounds away": (
        {"train": STEPS | {"precision": "bf16_pure"}, **LOOKING_AHEAD},
        ["train.precision bf16_pure", "loss.temperature.mode lookahead"],
        {"train": STEPS | {"precision": "bf16"}, **LOOKING_AHEAD},
    ),
    "one cycle that rises twice": (
        {
            "train": STEPS
            | {
                "lr_scheduler_type": "onecycle",
                "warmup_steps": 2,
                "lr_scheduler_kwargs": {"pct_start": 0.5},
            }
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
        {
            "train": STEPS
            | {"optim": "schedule_free", "lr_scheduler_type": "constant", "warmup_steps": 2}
        },
        [
            "train.lr_scheduler_type constant has",
            "train.warmup_steps is 2",
            "use train.lr_scheduler_type constant_with",
        ],
        {
            "train": STEPS
            | {
                "optim": "schedule_free",
                "lr_scheduler_type": "constant_with_warmup",
                "warmup_steps": 2,
            }
        },
    ),
    "parts on the host without parts": (
        {"train": STEPS | {"fsdp_offload": True}},
        ["train.fsdp_offload", "train.strategy fsdp"],
        {"train": STEPS | {"fsdp_offload": True, "strategy": "fsdp"}},
    ),
    "activations of compiled layers": (
        {"train": STEPS | {"compile": "default", "activation_offload": True}},
        ["train.activation_offload", "train.compile default"],
        {"train": STEPS | {"activation_offload": True, "gradient_checkpointing": "full"}},
    ),
    "CUDA graphs over gradients that are summed": (
        {"train": STEPS | {"compile": "reduce-overhead", "gradient_accumulation_steps": 2}},
        ["train.compile reduce-overhead", "train.gradient_accumulation_steps 2"],
        {"train": STEPS | {"compile": "reduce-overhead"}},
    ),
    "CUDA graphs over gradients of a rehearsal": (
        {"train": STEPS | {"compile": "max-autotune", "auto_batch": True}},
        ["train.compile max-autotune", "train.auto_batch"],
        {
            "train": STEPS
            | {"compile": "default", "auto_batch": True, "gradient_accumulation_steps": 2}
        },
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
        {
            "loss": {"temperature": LEARNED | {"mode": "lookahead"}},
            "cache": TEMPERED,
            "data": NOTHING_HELD_OUT,
        },
        ["loss.temperature.mode lookahead", "data.validation_fraction"],
        {"loss": {"temperature": LEARNED}, "cache": TEMPERED, "data": NOTHING_HELD_OUT},
    ),
    "a tempered teacher and nothing to measure it by": (
        {
            "loss": {"temperature": LEARNED | {"mode": "teacher_only"}},
            "cache": TEMPERED,
            "data": NOTHING_HELD_OUT,
        },
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
        {
            "loss": {"temperature": LEARNED | {"mode": "entropy", "target_entropy": 2}},
            "cache": TEMPERED,
        },
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
        {
            "kind": "train",
            "loss": {"alpha": 1, "features": {"weight": 1}},
            "cache": {"profile": "hidden"},
        },
    ),
    "features without a teacher": (
        {
            "kind": "train",
            "teacher": None,
            "loss": {"alpha": 1, "features": {"weight": 1}},
            "student": {"model": "x"},
        },
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
    "a proposal without ids": (
        {"teacher": HTTP | {"proposal": "p"}},
        ["cache.profile threshold has no use for proposal without cache.k"],
        {"teacher": HTTP | {"proposal": "p"}, "cache": {"k": 128}},
    ),
    "ids without a proposal": (
        {"teacher": HTTP, "cache": {"k": 128}},
        ["has no use for k without teacher.proposal"],
        {"teacher": HTTP, "cache": {"profile": "topk", "k": 128}},
    ),
    "a proposal for the most probable tokens": (
        {"teacher": HTTP | {"proposal": "p"}, "cache": {"profile": "topk", "k": 128}},
        ["cache.profile topk has no use for proposal"],
        {"teacher": HTTP, "cache": {"profile": "topk", "k": 128}},
    ),
    "a proposal for a teacher on this machine": (
        {"teacher": {"model": "x", "proposal": "p"}, "cache": {"k": 128}},
        ["teacher.backend local has no use for proposal"],
        {"teacher": {"model": "x"}},
    ),
    "a proposal and ids that are always kept": (
        {"teacher": HTTP | {"proposal": "p"}, "cache": {"k": 128, "always_keep": [3]}},
        ["teacher.proposal", "cache.always_keep"],
        {"teacher": HTTP | {"proposal": "p"}, "cache": {"k": 128}},
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
    "a search for nothing": (
        {"kind": "search"},
        ["search", "kind"],
        {"kind": "search", "search": SEARCH},
    ),
    "a space that nobody searches": ({"search": SEARCH}, ["search", "kind"], {}),
    "a schedule of alpha without a teacher": (
        {
            "kind": "train",
            "teacher": None,
            "loss": {"alpha": RAMP | {"start": 1}},
            "student": {"model": "x"},
        },
        ["teacher is required", "loss.alpha below 1"],
        {"kind": "train", "loss": {"alpha": RAMP | {"start": 1}}},
    ),
    "early stopping by nothing": (
        {"data": NOTHING_HELD_OUT, "train": STEPS | {"early_stopping_patience": 1}},
        ["train.early_stopping_patience", "data.validation_fraction"],
        {
            "data": NOTHING_HELD_OUT | {"validation_fraction": 0.1},
            "train": STEPS | {"early_stopping_patience": 1},
        },
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
    "section, expected",
    [
        (
            {"profile": "topk", "threshold": 0.1},
            "profile topk has no use for threshold; it takes k",
        ),
        ({"profile": "dense", "draws": 2}, "profile dense has no use for draws; it takes dtype"),
        ({"profile": "threshold", "k": 8}, "profile threshold has no use for k"),
        (
            {"profile": "threshold", "draws": 2},
            "takes always_keep, k, threshold. Set a smaller cache.threshold: it makes less",
        ),
        ({"profile": "hidden", "always_keep": [1]}, "profile hidden has no use for always_keep"),
        (
            {"profile": "dense", "dtype": "int8"},
            "dtype of profile dense must be one of auto, float16, float32",
        ),
        (
            {"profile": "hidden", "dtype": "float16"},
            "dtype of profile hidden must be one of auto, int16, int8",
        ),
        (
            {"profile": "tempered", "temperatures": {"min": 2, "max": 2}},
            "min 2 must be below max 2",
        ),
        ({"always_keep": [3, 3]}, "names a token twice"),
        ({"fingerprint": "0" * 32}, "use kind train"),
    ],
)
def test_a_profile_takes_its_own_options_only(section, expected):
    assert expected in problems(JOB | {"cache": section})[0].detail


def test_a_job_of_an_earlier_version_may_name_the_one_draw_that_there_is():
    assert parse_config(JOB | {"cache": {"profile": "threshold", "draws": 1}}).cache.draws == 1


WEIGHTED = {"alpha": 0.5, "entropy_weighting": 1.0}


#: The cache of a job, by whether it keeps the entropy of each position.
KEEPING = [
    ({}, False),
    ({"loss": WEIGHTED}, True),
    ({"loss": WEIGHTED | {"alpha": 1.0}}, False),
    ({"loss": WEIGHTED, "kind": "precompute"}, True),
    ({"loss": WEIGHTED, "kind": "train"}, True),
    ({"loss": WEIGHTED, "cache": WARM}, False),
    ({"loss": WEIGHTED, "cache": {"profile": "topk"}}, False),
    # Its manifest tells, where the cache is.
    ({"loss": WEIGHTED, "kind": "train", "cache": {"fingerprint": "0" * 32}}, False),
]


@pytest.mark.parametrize(("changes", "keeps"), KEEPING)
def test_a_cache_keeps_the_entropies_of_positions_where_the_loss_weighs_them(changes, keeps):
    assert parse_config(JOB | changes).keeps_entropies == keeps


@pytest.mark.parametrize(
    ("field", "loss", "keeps"),
    [
        ("loss.entropy_weighting", {}, True),
        ("loss.alpha", {"alpha": 1.0, "entropy_weighting": 1.0}, True),
        ("loss.alpha", {}, False),
    ],
)
def test_the_cache_of_a_search_has_what_any_trial_may_need(field, loss, keeps):
    space = {"space": {field: {"choices": [0.0, 0.5]}}}
    job = JOB | {"kind": "search", "search": space, "loss": loss}
    assert parse_config(job).keeps_entropies == keeps


@pytest.mark.parametrize(
    "section", [{"profile": "topk"}, {"profile": "dense"}, {"profile": "hidden"}, WARM]
)
def test_every_profile_survives_its_own_dump(section):
    config = parse_config(JOB | {"cache": section})
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("job", [job for *_, job in LEVELS])
def test_every_form_of_a_value_survives_its_own_dump(job):
    config = parse_config(job)
    assert parse_config(config.model_dump(mode="json")) == config
    assert parse_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    "section, temperature, expected",
    [
        ({"profile": "threshold"}, 2, "use profile tempered"),
        ({"profile": "topk"}, 0.5, "use profile tempered"),
        (WARM, 0.9, "covers temperatures 1 to 2"),
        (WARM, 1.5, None),
        ({"profile": "dense"}, 4, None),
        ({"profile": "hidden"}, 0.1, None),
    ],
)
def test_a_temperature_that_the_profile_cannot_serve_is_refused_by_naming_one_that_can(
    section, temperature, expected
):
    job = JOB | {"cache": section, "loss": {"temperature": temperature}}
    if expected is None:
        assert parse_config(job).loss.temperature == temperature
    else:
        assert expected in problems(job)[0].detail


def test_a_server_gives_its_most_probable_tokens_only():
    job = changed(
        "teacher", {"backend": "http", "model": "x", "url": "http://127.0.0.1:1", "tokenizer": "t"}
    )
    assert "set cache.profile to topk" in problems(job)[0].detail
    assert parse_config(job | {"cache": {"profile": "topk"}}).cache.entries == 64


def test_a_sealed_cache_takes_the_place_of_teacher_and_text():
    job = without(
        "teacher", "data", kind="train", cache={"fingerprint": "0" * 32}, student={"model": "x"}
    )
    assert parse_config(job).needs_cache


def test_what_is_held_out():
    fraction = {
        "data.validation": ("v.txt", 0.0),
        "data.validation_fraction": (0.25, 0.25),
        "name": ("x", 0.02),
    }
    for path, (value, expected) in fraction.items():
        assert parse_config(changed(path, value)).data.held_out_fraction == expected


@pytest.mark.parametrize(
    "teacher, reason",
    [
        ({"quantization": "int8"}, "cannot be combined with teacher.quantization"),
        ({"gguf_file": "m.gguf"}, "cannot be combined with teacher.gguf_file"),
        (
            {"backend": "http", "url": "http://host", "tokenizer": "t"},
            "teacher.backend http has no use for parallel",
        ),
    ],
)
def test_only_plain_weights_on_this_machine_are_spread(teacher, reason):
    (found,) = problems(JOB | {"teacher": {"model": "m", "parallel": "device_map"} | teacher})
    assert reason in found.detail


@pytest.mark.parametrize("field", ["gpu_memory", "host_memory"])
def test_the_memory_of_layers_is_limited_where_a_teacher_is_spread(field):
    (found,) = problems(JOB | {"teacher": {"model": "m", field: "1GiB"}})
    assert f"teacher.{field} is for a teacher that is spread" in found.detail
    config = parse_config(
        JOB | {"teacher": {"model": "m", "parallel": "device_map", field: "1GiB"}}
    )
    assert getattr(config.teacher, field) == 2**30
