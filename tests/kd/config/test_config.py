"""The job's configuration: every mistake has its place and words; YAML, JSON and --set agree."""

import copy
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from bench.support.paths import ROOT
from kd.config.cache import CacheConfig
from kd.config.data import DatasetSpec
from kd.config.fields.described import explain_field
from kd.config.job import JobConfig
from kd.config.jobfile import apply_overrides, load_config, parse_config, parse_yaml
from kd.config.loss import LossConfig
from kd.config.optimisation.rates import SCHEDULER_KWARGS, Scheduler
from kd.config.student import StudentConfig, StudentInit
from kd.config.train import OPTIMIZERS, Optimizer, TrainConfig
from kd.errors import ConfigError, Problem
from tests.support.kd.jobs import (
    JOB,
    LEARNED,
    LEVELS,
    RAMP,
    SEARCHING,
    all_sections,
    changed,
    problems,
)
from tests.support.kd.quantizers import needs_torchao

# ---------------------------------------------------------------------- unknown keys


def test_levels_name_every_section_of_the_tree():
    assert {section for _, section, _ in LEVELS} == all_sections()
    for *_, job in LEVELS:
        parse_config(job)


@pytest.mark.parametrize(
    "level, section, job",
    LEVELS,
    ids=[f"{level} {section.__name__}" for level, section, _ in LEVELS],
)
def test_an_unknown_key_at_every_level_is_refused_with_what_was_meant(level, section, job):
    for known in section.model_fields:
        for typo in (
            f"{known}z",
            known.capitalize(),
            known[:-1] + "q" if len(known) > 4 else f"_{known}",
        ):
            found = problems(changed(f"{level}.{typo}".lstrip("."), 1, job))
            pointer = f"/{level}/{typo}".replace(".", "/").replace("//", "/")
            assert [each.pointer for each in found] == [pointer]
            assert found[0].detail == f"unknown key {typo!r}."
            assert found[0].remedy.startswith("Did you mean ")
            assert found[0].remedy.removeprefix("Did you mean ").rstrip("?") in section.model_fields
    exact = next(iter(section.model_fields))
    assert (
        problems(changed(f"{level}.{exact}z".lstrip("."), 1, job))[0].remedy
        == f"Did you mean {exact}?"
    )


def test_a_key_like_no_other_is_refused_with_the_known_ones():
    (found,) = problems(changed("loss.qqqqqq", 1))
    assert found.remedy == f"Known keys: {', '.join(LossConfig.model_fields)}."


def test_every_problem_is_reported_at_once():
    job = changed("train.batch_size", 0, changed("loss.alpha", 2, changed("techer", {})))
    assert {each.pointer for each in problems(job)} == {
        "/train/batch_size",
        "/loss/alpha",
        "/techer",
    }


def test_a_problem_reads_as_a_sentence_with_its_place():
    (found,) = problems(changed("train.batch_size", 0))
    wrong = "Input should be greater than or equal to 1, but got 0."
    remedy = "`kd explain train.batch_size` describes the field."
    assert str(found) == f"train.batch_size: {wrong} {remedy}"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.batch_size", 0),
        ("train.max_steps", None),
        ("train.learning_rate", "fast"),
        ("loss.temperature", {"start": 2.0}),
        ("loss.temperature.mode", "guess"),
        ("data.train", []),
        ("data.train.1", {"paht": "x"}),
        ("data.train.1", ""),
        ("student", {"lora": {"rank": 0}}),
        ("cache.fingerprint", "x"),
        ("kind", "distil"),
        ("nonsense", 1),
        ("train", [1]),
    ],
)
def test_every_problem_of_a_field_says_what_to_do(path, value):
    found = problems(changed(path, value))
    assert found
    for each in found:
        assert each.remedy, each
        if command := re.search("`kd explain ([a-z0-9_.]+)`", each.remedy):
            assert explain_field(command[1]), each


def test_the_remedy_of_a_configuration_is_that_of_its_problem():
    one = Problem("/train/max_steps", "it is 0.", "Set it to 1.")
    alone = ConfigError([one])
    assert (alone.detail, alone.remedy) == ("train.max_steps: it is 0.", "Set it to 1.")
    assert str(alone) == str(one)
    both = ConfigError([one, Problem("/kind", "it is x.", "Set it to train.")])
    parts = "train.max_steps: it is 0. Set it to 1.; kind: it is x. Set it to train."
    assert both.detail == parts and both.remedy


def test_a_mistake_in_a_dataset_spec_is_not_blamed_on_the_other_form_of_a_source():
    assert [
        (each.pointer, each.detail) for each in problems(changed("data.train.1", {"paht": "x"}))
    ] == [
        ("/data/train/1/path", "is required but missing."),
        ("/data/train/1/paht", "unknown key 'paht'."),
    ]
    assert [each.pointer for each in problems(changed("data.train.1", 3))] == ["/data/train/1"]


FORMS = [
    # path, value, pointer of each problem, words of the first
    (
        "loss.alpha",
        "much",
        ["/loss/alpha"],
        "valid number, unable to parse string as a number, but got 'much'",
    ),
    ("loss.alpha", [0.1], ["/loss/alpha"], "valid number"),
    ("loss.alpha", 2, ["/loss/alpha"], "less than or equal to 1, but got 2"),
    (
        "loss.alpha",
        RAMP | {"start": -1},
        ["/loss/alpha/start"],
        "greater than or equal to 0, but got -1",
    ),
    (
        "loss.alpha",
        {"schedule": "linear", "start": 1},
        ["/loss/alpha/end"],
        "is required but missing",
    ),
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
    (
        "loss.temperature",
        LEARNED | {"start": 1},
        ["/loss/temperature/start"],
        "Known keys: mode, min, max, init",
    ),
    (
        "loss.temperature",
        LEARNED | {"mode": "entrop"},
        ["/loss/temperature/mode"],
        "Did you mean entropy?",
    ),
    (
        "loss.temperature",
        LEARNED | {"init": 3},
        ["/loss/temperature"],
        "init 3 must lie between min 0.5 and max 2",
    ),
    (
        "loss.temperature",
        LEARNED | RAMP,
        ["/loss/temperature"],
        "mode (it is learned) or schedule (it goes from",
    ),
    ("loss.temperature", LEARNED | RAMP, ["/loss/temperature"], "not both"),
    (
        "loss.temperature",
        {"Mode": "entropy", "init": 1},
        ["/loss/temperature"],
        "neither: its keys are Mode, init",
    ),
    ("loss.temperature", {}, ["/loss/temperature"], "but got neither"),
    (
        "search.space",
        {"train.seed": {"mim": 1}},
        ["/search/space/train.seed/mim"],
        "Did you mean min?",
    ),
    ("search.space", {"a/b~": {"mim": 1}}, ["/search/space/a~1b~0/mim"], "Did you mean min?"),
    (
        "search.space",
        {"train.seed": {}},
        ["/search/space/train.seed"],
        "give min and max, or choices",
    ),
    ("search.space", {"train.seed": 3}, ["/search/space/train.seed"], "but got 3"),
    (
        "search.space.x.choices",
        [[1], 2],
        ["/search/space/x/choices/0"],
        "string, or a valid number, or a valid integer",
    ),
    (
        "train.gradient_checkpointing",
        "ful",
        ["/train/gradient_checkpointing"],
        "Did you mean full?",
    ),
    (
        "train.gradient_checkpointing",
        1,
        ["/train/gradient_checkpointing"],
        "'sqrt', or greater than or equal to 2",
    ),
    ("train.optim_args", {"amsgrad": "x"}, ["/train/optim_args/amsgrad"], "valid number"),
    (
        "train.optim",
        "adam",
        ["/train/optim"],
        "'adamw', 'adamw_8bit', 'adafactor', 'muon', 'lion', 'lars' or 'schedule_free'",
    ),
    ("train.optim", "adam", ["/train/optim"], "Did you mean adamw?"),
    ("train.report_to", ["wand"], ["/train/report_to/0"], "Did you mean wandb?"),
    ("student.lora.targets", [1], ["/student/lora/targets/0"], "valid string"),
    ("evaluation", {1: 2}, ["/evaluation/1"], "Keys should be strings"),
    ("body", 1, ["/body"], "unknown key 'body'"),
    ("teacher.model", None, ["/teacher/model"], "Input should be a valid string, but got null."),
    ("name", True, ["/name"], "Input should be a valid string, but got true."),
    ("nothing", None, ["/nothing"], "unknown key 'nothing'"),
    (
        "evaluation.tasks",
        "hellaswag",
        ["/evaluation/tasks"],
        "Input should be a list, but got 'hellaswag'.",
    ),
    (
        "evaluation.tasks",
        ["a"] * 65,
        ["/evaluation/tasks"],
        "List should have at most 64 items, not 65.",
    ),
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
def test_a_mistake_in_one_form_of_a_value_or_in_a_mapping_is_told_once_at_its_place(
    path, value, pointers, words
):
    found = problems(changed(path, value, SEARCHING))
    assert [each.pointer for each in found] == pointers
    assert words in f"{found[0].detail} {found[0].remedy}"


@pytest.mark.parametrize("mode", ["minimise", "minimize", "plain"])
def test_plain_minimisation_of_the_temperature_is_refused_with_the_reason(mode):
    (found,) = problems(changed("loss.temperature", {"mode": mode}))
    assert found.pointer == "/loss/temperature/mode"
    assert f"{mode} is not offered" in found.detail and "moves to a bound" in found.detail
    assert found.detail.endswith("Use adversarial, entropy, lookahead or teacher_only.")


# ---------------------------------------------------------------------- one tree from every
# spelling


def set_lines(value: Any, path: str = "") -> Iterator[str]:
    """Yield the tree as ``a.b=value`` overrides."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from set_lines(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}={json.dumps(inner)}"


def test_yaml_json_and_overrides_give_the_same_tree(tmp_path):
    expected = parse_config(JOB)
    for name, text in {
        "job.yaml": yaml.safe_dump(JOB),
        "job.json": json.dumps(JOB),
        "empty.yaml": "",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "job.yaml") == expected
    assert load_config(tmp_path / "job.json") == expected
    assert load_config(tmp_path / "empty.yaml", set_lines(JOB)) == expected
    assert parse_config(json.loads(expected.model_dump_json())) == expected
    assert parse_config(expected.model_dump(mode="json")) == expected


def test_overrides_reach_every_depth_and_the_last_one_wins(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB), encoding="utf-8")
    lines = [
        "train.max_steps=7",
        "train.max_steps=8",
        "train.learning_rate=2e-4",
        "student.init.hidden_size=128",
    ]
    lines += [
        "data.train=[x.txt, {path: y}]",
        "teacher.revision=main",
        "cache={seed: 3}",
        "data.packing=false",
    ]
    config = load_config(path, lines)
    assert (config.train.max_steps, config.train.learning_rate) == (8, 2e-4)
    assert (config.student.init.hidden_size, config.student.init.layers) == (128, 2)
    assert config.data.train == ("x.txt", DatasetSpec(path="y"))
    assert (config.teacher.revision, config.cache.seed, config.cache.threshold) == ("main", 3, 0.04)
    assert config.data.packing is False and config.data.sequence_length == 128
    assert load_config(path) == parse_config(JOB)


def test_a_value_may_hold_an_equals_sign_and_null_takes_a_choice_back():
    config = parse_config(
        apply_overrides(JOB, ["teacher.model=a=b", "train.max_steps=null", "train.epochs=2"])
    )
    assert config.teacher.model == "a=b" and (config.train.max_steps, config.train.epochs) == (
        None,
        2,
    )


def nulled(section: type[BaseModel]) -> Iterator[str]:
    """Yield the fields of ``section`` that have a default and do not accept null."""
    for name, field in section.model_fields.items():
        if not field.is_required() and type(None) not in typing.get_args(field.annotation):
            yield name


def outcome(job: dict[str, Any]) -> JobConfig | list[Problem]:
    """Return the job, or its problems: a section may need more than its defaults."""
    try:
        return parse_config(job)
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize(
    "level, section, job",
    LEVELS,
    ids=[f"{level} {section.__name__}" for level, section, _ in LEVELS],
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
    config = parse_config(
        apply_overrides(JOB, ["student.init=null", "student.model=x", "cache=null"])
    )
    assert config.student == StudentConfig(model="x") and config.cache == CacheConfig()
    assert "init" in config.student.model_fields_set and "cache" not in config.model_fields_set


def test_the_schema_takes_null_where_a_job_does():
    schema = JobConfig.model_json_schema()
    for section in all_sections():
        properties = (
            schema["properties"]
            if section is JobConfig
            else schema["$defs"][section.__name__]["properties"]
        )
        for name, field in section.model_fields.items():
            forms = properties[name].get("anyOf", [])
            assert ({"type": "null"} in forms) == (
                name in set(nulled(section)) or type(None) in typing.get_args(field.annotation)
            ), (section, name)


def test_overrides_leave_the_original_alone():
    job = copy.deepcopy(JOB)
    apply_overrides(job, ["train.max_steps=99", "student.init.layers=9"])
    assert job == JOB


@pytest.mark.parametrize(
    "line", ["train.max_steps", "=3", "a..b=1", ".a=1", "", "train.max_steps=[1", "a={b: "]
)
def test_an_override_that_cannot_be_read_is_refused(line):
    with pytest.raises(ConfigError, match="override"):
        apply_overrides(JOB, [line])


def test_an_unknown_key_in_an_override_is_refused_like_any_other():
    (found,) = problems(apply_overrides(JOB, ["train.max_step=3"]))
    assert (found.pointer, found.remedy) == ("/train/max_step", "Did you mean max_steps?")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("5f1d", "`kd cache info 5f1d` prints it."),
        ("5F1D" * 8, "`kd explain cache.fingerprint` describes the field."),
        ("caches/5f1d", "`kd explain cache.fingerprint` describes the field."),
        ("", "`kd explain cache.fingerprint` describes the field."),
    ],
)
def test_a_fingerprint_is_given_whole(name, remedy):
    (found,) = problems({"kind": "verify", "cache": {"fingerprint": name}})
    detail = f"must be a whole fingerprint, 32 hexadecimal digits, but got {name!r}."
    assert found == Problem("/cache/fingerprint", detail, remedy)


@pytest.mark.parametrize("name", ["Bad_Name", "-a", "a b", "", "a" * 64])
def test_what_a_name_may_hold_is_said(name):
    (found,) = problems(changed("name", name))
    allowed = (
        "1 to 63 lower-case letters, digits, dots, dashes and underscores, "
        "the first a letter or a digit"
    )
    remedy = "`kd explain name` describes the field."
    assert found == Problem("/name", f"must be {allowed}, but got {name!r}.", remedy)


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
        (
            "name: x\ntrain:\n  max_steps: 3\n  max_steps: 300\n",
            r"key 'max_steps' is given twice \(lines 3 and 4\)\.",
        ),
        ('{"name": "x", "name": "y"}', r"key 'name' is given twice \(line 1\)\."),
        (
            "name: x\ndata:\n  train: [{path: a, 'path': b}]\n",
            r"key 'path' is given twice \(line 3\)\.",
        ),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=found):
            load_config(file)
    with pytest.raises(ConfigError, match="key 'seed' is given twice"):
        apply_overrides(JOB, ["train={seed: 1, seed: 2}"])


def test_what_a_merge_key_brings_may_be_given_anew():
    text = (
        "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {y: 4, <<: *b}\nd: {<<: [*a, {z: 5}], x: 6}\n"
    )
    assert parse_yaml(text) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 1, "y": 4},
        "d": {"x": 6, "y": 2, "z": 5},
    }


@pytest.mark.parametrize(
    "path",
    # Those of examples/deploy are no jobs; tests/system/deployment reads them.
    sorted(set((ROOT / "examples").rglob("*.yaml")) - set((ROOT / "examples/deploy").rglob("*"))),
    ids=lambda path: path.name,
)
def test_the_examples_are_valid(path):
    assert load_config(path).name


# ---------------------------------------------------------------------- frozen


def test_nothing_can_be_assigned():
    config = parse_config(JOB)
    for section, name in [
        (config, "name"),
        (config.train, "max_steps"),
        (config.student.init, "layers"),
    ]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, getattr(section, name))
    assert isinstance(config.data.train, tuple)


# ---------------------------------------------------------------------- what other libraries must
# accept


def test_schedulers_are_those_of_transformers_that_need_no_metric():
    """Two schedules of transformers take a metric, so they do not depend on the step alone."""
    from transformers.trainer_utils import SchedulerType

    ours = {"onecycle", "step", "multistep", "reduce_lr_on_plateau"}
    assert set(typing.get_args(Scheduler)) - ours == {each.value for each in SchedulerType} - {
        "reduce_lr_on_plateau",
        "greedy",
    }


def test_a_schedules_arguments_are_those_of_transformers_that_are_numbers():
    import inspect

    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for name in set(SCHEDULER_KWARGS) - {"onecycle", "step", "multistep", "reduce_lr_on_plateau"}:
        optional, needed = SCHEDULER_KWARGS[name]
        signature = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[name]).parameters
        numbers = {key for key, each in signature.items() if not isinstance(each.default, str)}
        assert optional | needed == numbers - ours, name
        assert {
            key for key in numbers - ours if signature[key].default is inspect.Parameter.empty
        } <= needed


def test_the_arguments_of_one_cycle_are_those_of_torch_that_are_numbers():
    """Schedules that would change the momentum are left out, because training does not use it."""
    import inspect

    from torch.optim.lr_scheduler import OneCycleLR

    parameters = inspect.signature(OneCycleLR).parameters
    numbers = {key for key, each in parameters.items() if isinstance(each.default, float)}
    assert SCHEDULER_KWARGS["onecycle"] == (numbers - {"base_momentum", "max_momentum"}, set())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_torchao) if name == "adamw_8bit" else name
        for name in typing.get_args(Optimizer)
    ],
)
def test_an_optimisers_arguments_are_those_of_its_library(name):
    from kd.optim.optimizers import list_optimizer_arguments

    options = TrainConfig(max_steps=1, optim=name, lr_scheduler_type="constant")
    assert OPTIMIZERS[name].arguments == set(list_optimizer_arguments(name, options))


@pytest.mark.parametrize(
    "name, arguments, complaint",
    [
        ("cosine_with_min_lr", {}, "must hold min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0, "min_lr_rate": 0}, "must hold min_lr or min_lr_rate"),
        ("warmup_stable_decay", {}, "must hold num_decay_steps"),
        ("constant", {"num_cycles": 1}, "cannot hold num_cycles, only nothing"),
        ("cosine", {"num_cycle": 1}, "cannot hold num_cycle, only num_cycles"),
        ("step", {"gamma": 0.5}, "must hold step_size"),
        ("step", {"step_size": 1.5}, "step_size must be whole numbers"),
        ("step", {"step_size": 2, "gamma": 1.5}, "gamma must be from 0 to 1"),
        ("step", {"step_size": [2, 3]}, "step_size must be a number"),
        ("multistep", {"milestones": 5}, "milestones must be a list of steps"),
        ("multistep", {"milestones": [5, 5]}, "milestones must be steps from 1 on that rise"),
        ("multistep", {"milestones": []}, "milestones must be steps from 1 on that rise"),
        ("reduce_lr_on_plateau", {"factor": 1}, "factor must be less than 1"),
        ("reduce_lr_on_plateau", {"patience": -1}, "patience must be from 0 to 10000"),
    ],
)
def test_a_schedule_without_its_arguments_is_refused_before_anything_runs(
    name, arguments, complaint
):
    schedule = {"max_steps": 1, "lr_scheduler_type": name, "lr_scheduler_kwargs": arguments}
    (found,) = problems(JOB | {"train": schedule})
    assert found.pointer == "/train" and complaint in found.detail


def test_a_rate_that_follows_the_held_out_loss_needs_some() -> None:
    job = changed("train.lr_scheduler_type", "reduce_lr_on_plateau")
    job["train"].pop("lr_scheduler_kwargs")
    parse_config(job)
    (found,) = problems(changed("data.validation_fraction", 0, job))
    assert "reduce_lr_on_plateau follows the held-out loss" in found.detail


def test_only_a_training_run_goes_on() -> None:
    parse_config(changed("resume", {}))
    (found,) = problems(changed("resume", {}, SEARCHING))
    assert "kind search trains none: remove resume" in found.detail


def test_dropout_that_changes_cannot_be_compiled() -> None:
    (found,) = problems(changed("train.dropout", RAMP, changed("train.compile", "default")))
    assert "would compile again" in found.detail
    parse_config(changed("train.dropout", 0.1, changed("train.compile", "default")))


SCHEDULE_KWARGS: dict[str, dict[str, typing.Any]] = {
    "step": {"step_size": 4},
    "multistep": {"milestones": [4, 6]},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
}


@pytest.mark.parametrize("name", typing.get_args(Scheduler))
def test_every_scheduler_can_be_made_and_stepped(name):
    import torch

    from kd.optim.schedules import make_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    options = {
        "max_steps": 10,
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": SCHEDULE_KWARGS.get(name, {}),
    }
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
        assert hidden % init.attention_heads == 0 and (hidden // init.attention_heads) % 2 == 0
        assert init.mlp_width % 32 == 0 and 0 <= init.mlp_width - hidden * 8 / 3 < 32
        if hidden > 48 and hidden % 64:
            continue  # building takes the time: all small ones, and every 64th
        shape = LlamaConfig(
            vocab_size=16,
            hidden_size=hidden,
            intermediate_size=init.mlp_width,
            num_hidden_layers=1,
            num_attention_heads=init.attention_heads,
            num_key_value_heads=init.attention_heads,
        )
        with torch.no_grad():
            logits = LlamaForCausalLM(shape)(input_ids=torch.arange(8)[None]).logits
        assert logits.shape == (1, 8, 16) and logits.isfinite().all()


@pytest.mark.parametrize("hidden", [9, 33, 511])
def test_a_width_that_no_head_divides_is_refused_not_crashed_on(hidden):
    (found,) = problems(changed("student.init.hidden_size", hidden))
    assert found.pointer == "/student/init" and "even" in found.detail
