"""Settings of a call -> the job of a YAML file with the same settings, and the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kd.config.jobfile import load_config, parse_config
from kd.errors import ConfigError
from kd.python.inputs import DEFAULT_HOME, find_home
from kd.python.jobs import load_job, make_job
from services.settings import Settings
from tests.support.kd.jobs import JOB

YAML = """
kind: train
student: {model: some/student}
data: {train: a.txt}
loss: {alpha: 1}
train: {max_steps: 10, batch_size: 4}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(YAML)
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"batch_size": 2}, "name": "other"},
        {"set": {"train.batch_size": 2, "name": "other"}},
        {"set": ["train.batch_size=2", "name=other"]},
        {"train": {"batch_size": 3}, "set": {"train.batch_size": 2, "name": "other"}},
    ],
)
def test_settings_change_the_given_keys_alone(file: Path, settings: dict[str, Any]) -> None:
    expected = load_config(file, ["train.batch_size=2", "name=other"])
    assert load_job(file, **settings) == load_job(str(file), **settings) == expected
    assert load_job(load_config(file), **settings) == expected


def test_a_mapping_is_a_job_and_does_not_change() -> None:
    before = str(JOB)
    assert load_job(JOB) == parse_config(JOB)
    assert load_job(JOB, train={"max_steps": 3}).require_train().max_steps == 3
    assert str(JOB) == before


@pytest.mark.parametrize(
    ("settings", "override"),
    [
        ({"train": {"max_step": 3}}, "train.max_step=3"),
        ({"set": {"train.max_steps": 0}}, "train.max_steps=0"),
        ({"trian": {"max_steps": 3}}, "trian.max_steps=3"),
    ],
)
def test_a_wrong_setting_raises_the_error_of_the_file(
    file: Path, settings: dict[str, Any], override: str
) -> None:
    with pytest.raises(ConfigError) as here:
        load_job(file, **settings)
    with pytest.raises(ConfigError) as there:
        load_config(file, [override])
    assert here.value.problems == there.value.problems


@pytest.mark.parametrize("wrong", ["train.max_steps=3", 3])
def test_dotted_names_come_in_a_mapping(file: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="set must be a mapping of dotted names"):
        load_job(file, set=wrong)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no job file at"):
        load_job(tmp_path / "none.yaml")


def test_equal_calls_have_one_name_and_others_another() -> None:
    data = {name: value for name, value in JOB.items() if name not in ("name", "train")}
    first, same, other = (make_job(data, {"train": {"seed": seed}}) for seed in (1, 1, 2))
    assert first.name == same.name != other.name
    assert first.name.startswith("distill-")
    assert make_job(data, {"name": "mine"}).name == "mine"


def test_a_training_without_a_length_takes_one_epoch() -> None:
    data = {name: value for name, value in JOB.items() if name != "train"}
    assert make_job(data, {}).require_train().epochs == 1
    steps = make_job(data, {"set": {"train.max_steps": 5}}).require_train()
    assert (steps.max_steps, steps.epochs) == (5, None)


def test_the_data_folder_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KD_HOME", raising=False)
    assert find_home() == Settings().home == tmp_path / DEFAULT_HOME
    monkeypatch.setenv("KD_HOME", "~/here")
    assert find_home() == Settings().home == Path.home() / "here"
    assert find_home(tmp_path / "x") == tmp_path / "x"
