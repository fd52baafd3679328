"""The list of checks: each caller gets all problems that its arguments can reveal."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError
from kd.models.precision import Hardware, Precision
from kd.preflight.limits import Confinement
from kd.preflight.problems import Folders, Machine, find_problems, require_no_problems

CPU = torch.device("cpu")
OLD = Hardware("before Ampere", "fp16", tf32=False)


def make_job(**changes: Any) -> JobConfig:
    """Make a job whose search, files, trackers, benchmark tasks and precision are all wrong."""
    return parse_config(
        {
            "kind": "search",
            "teacher": {"model": "no/such/model"},
            "student": {"init": {"layers": 1, "hidden_size": 32}},
            "data": {"train": "no-such-text.txt", "validation_fraction": 0},
            "train": {"max_steps": 1, "precision": "fp16", "report_to": ["mlflow"]},
            "evaluation": {"tasks": ["arc_easy"]},
            "search": {"space": {"train.learning_rate": {"choices": [0.1]}}},
        }
        | changes
    )


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No optional package is installed."""
    monkeypatch.setattr("kd.config.extras.find_spec", lambda _: None)


def find_pointers(*arguments: Any, **changes: Any) -> list[str]:
    return [problem.pointer for problem in find_problems(make_job(**changes), *arguments)]


def test_the_configuration_alone_shows_what_contradicts_itself() -> None:
    assert find_pointers() == ["/search"]


def find_sharing_problems(gpus: int | None, kind: str = "distill", **train: Any) -> list[str]:
    """The problems of a job that asks for ``gpus`` devices."""
    section = {"max_steps": 1, "batch_size": 2, "gradient_accumulation_steps": 3} | train
    job = make_job(kind=kind, search=None, resources={"gpus": gpus}, train=section)
    return [str(problem) for problem in find_problems(job)]


@pytest.mark.parametrize("parallel", ["tensor", "fsdp"])
def test_a_teacher_is_shared_by_several_devices_alone(parallel: str) -> None:
    teacher = {"model": "no/such/model", "parallel": parallel}
    capture = {"kind": "precompute", "search": None, "student": None, "train": None}

    def find(gpus: int | None, **changes: Any) -> list[str]:
        return find_pointers(teacher=teacher, resources={"gpus": gpus}, **(capture | changes))

    assert find(None, evaluation={}) == find(1, evaluation={}) == ["/teacher/parallel"]
    assert find(2, evaluation={}) == []
    # A student on one device may learn from a teacher that needs two.
    alone = {"max_steps": 1, "strategy": "single"}
    whole = {"kind": "distill", "student": {"init": {"layers": 1, "hidden_size": 32}}}
    assert find(2, **whole, train=alone) == []
    assert find_pointers(kind="distill", search=None, train=alone, resources={"gpus": 2}) == [
        "/train/strategy"
    ]


def test_a_step_is_shared_equally_by_all_devices_or_refused() -> None:
    for gpus in (None, 0, 1, 2, 3, 6):
        assert find_sharing_problems(gpus) == []
    (found,) = find_sharing_problems(4)
    assert found == (
        "train.batch_size: a step has 6 sequences (batch_size 2 x gradient_accumulation_steps 3), "
        "which 4 devices cannot share equally. Make the product a multiple of 4, or change "
        "resources.gpus."
    )


def test_devices_that_a_job_could_not_use_are_refused() -> None:
    (found,) = find_sharing_problems(2, strategy="single")
    assert found.startswith("train.strategy: single uses one device, but resources.gpus asks for 2")
    (found,) = find_sharing_problems(2, kind="precompute")
    assert found.startswith("resources.gpus: it asks for 2 devices, but only a training uses")


def find_stage_problems(gpus: int | None = 2, **train: Any) -> list[str]:
    return find_sharing_problems(gpus, **({"strategy": "pipeline"} | train))


def test_a_step_has_a_micro_batch_for_each_stage_or_is_refused() -> None:
    for gpus in (None, 1, 2, 3):
        assert find_stage_problems(gpus) == []
    (found,) = find_stage_problems(4)
    assert found == (
        "train.gradient_accumulation_steps: train.strategy is pipeline, which needs a micro-batch "
        "for each of 4 stages, but a step has 3. Set it to 4 or more, with a smaller "
        "train.batch_size."
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", "fp16"),
        ("precision", "bf16_pure"),
        ("optim", "adamw_8bit"),
        ("auto_batch", True),
        ("compile", "default"),
        ("activation_offload", True),
        ("order", "length"),
    ],
)
def test_stages_refuse_what_they_cannot_do(name: str, value: Any) -> None:
    (found,) = find_stage_problems(2, **{name: value})
    assert found.startswith(f"train.{name}: train.strategy is pipeline, but ")
    assert found.endswith(" Change it, or set train.strategy to ddp or fsdp.")


def test_stages_refuse_a_device_whose_half_precision_is_float16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kd.models.precision.find_hardware", lambda _: OLD)
    monkeypatch.setattr("kd.parallel.devices.count_devices", lambda: 2)
    for strategy, wanted in (("ddp", []), ("pipeline", ["/train/precision"])):
        train = {"max_steps": 1, "gradient_accumulation_steps": 2, "strategy": strategy}
        changes = {"kind": "distill", "search": None, "evaluation": {}, "resources": {"gpus": 2}}
        machine = Machine(device=torch.device("cuda"))
        assert find_pointers(None, machine, **changes, train=train) == wanted


def test_stages_refuse_losses_that_need_the_whole_student() -> None:
    train = {
        "max_steps": 1, "batch_size": 2, "gradient_accumulation_steps": 2, "strategy": "pipeline",
    }  # fmt: skip
    for profile, loss, pointer in (
        ("tempered", {"temperature": {"mode": "lookahead"}}, "/loss/temperature/mode"),
        ("hidden", {"features": {"weight": 0.5}}, "/loss/features"),
        ("threshold", {"router_balance": 0.1}, "/loss/router_balance"),
    ):
        changes = {"kind": "distill", "search": None, "evaluation": {}, "resources": {"gpus": 2}}
        changes |= {"cache": {"profile": profile}, "train": train, "loss": loss}
        changes["data"] = {"train": "no-such-text.txt", "validation_fraction": 0.1}
        assert find_pointers(**changes) == [pointer]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optim", "adamw_8bit"),
        ("auto_batch", True),
        ("compile", "reduce-overhead"),
        ("activation_offload", True),
    ],
)
def test_what_parts_of_parameters_cannot_do_is_refused_by_name(field: str, value: Any) -> None:
    step = {"batch_size": 6, "gradient_accumulation_steps": 1, field: value}
    (found,) = find_sharing_problems(2, strategy="fsdp", **step)
    assert found.startswith(f"train.{field}: train.strategy is fsdp, but ")
    assert find_sharing_problems(2, strategy="ddp", **step) == []


def test_gradients_on_the_host_have_no_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Precision("cuda", torch.float16)
    monkeypatch.setattr(Precision, "choose", lambda *_: half)
    parts = {"max_steps": 1, "strategy": "fsdp", "fsdp_offload": True}
    job = make_job(kind="train", search=None, train=parts, evaluation={})
    (found,) = find_problems(job, machine=Machine(device=CPU))
    assert found.pointer == "/train/fsdp_offload"


def test_the_folders_show_what_is_missing(tmp_path: Path) -> None:
    found = find_pointers(Folders(tmp_path, tmp_path))
    assert found == ["/search", "/teacher/model", "/data/train/0"]


def test_what_a_job_may_not_name_is_not_looked_up(tmp_path: Path) -> None:
    limits = Confinement(home=tmp_path / "home", roots=(tmp_path,))
    nothing_outside = Folders(tmp_path, tmp_path, limits)
    outside = {"data": {"train": ["/etc/passwd", "no-such-text.txt"], "validation_fraction": 0}}
    assert find_pointers(nothing_outside, **outside) == ["/search", "/data/train/0"]


def test_without_a_data_folder_only_the_limits_count(tmp_path: Path) -> None:
    limits = Confinement(home=tmp_path / "home", roots=(tmp_path,))
    assert find_pointers(Folders(tmp_path, None, limits)) == ["/search"]
    assert find_pointers(Folders(tmp_path, None)) == ["/search"]


def test_the_machine_shows_what_is_not_installed_and_what_its_device_lacks() -> None:
    extras = ["/train/report_to/0", "/evaluation/tasks"]
    assert find_pointers(None, Machine()) == ["/search", *extras]
    assert find_pointers(None, Machine(device=CPU)) == ["/search", *extras, "/train/precision"]


def test_a_machine_that_only_measures_needs_no_trackers() -> None:
    assert find_pointers(None, Machine(trains=False)) == ["/search", "/evaluation/tasks"]


def test_a_library_that_the_optimiser_lacks_is_named() -> None:
    job = make_job(train={"max_steps": 1, "optim": "adamw_8bit"}, evaluation={})
    assert [each.pointer for each in find_problems(job, machine=Machine(trains=False))] == [
        "/search"
    ]
    found = find_problems(job, machine=Machine())
    assert [each.pointer for each in found] == ["/search", "/train/optim"]
    assert "pip install 'potstill[quantization]'" in found[1].remedy


def test_activations_are_offloaded_from_a_gpu_only() -> None:
    job = make_job(train={"max_steps": 1, "activation_offload": True}, evaluation={})
    (_, found) = find_problems(job, machine=Machine(device=CPU))
    assert found.pointer == "/train/activation_offload"
    assert "the device of this run is cpu" in found.detail and "false" in found.remedy
    assert len(find_problems(job, machine=Machine())) == 1


def test_every_problem_is_raised_at_once(tmp_path: Path) -> None:
    folders = Folders(tmp_path, tmp_path)
    with pytest.raises(ConfigError) as caught:
        require_no_problems(make_job(), folders, Machine(device=CPU))
    assert caught.value.problems == find_problems(make_job(), folders, Machine(device=CPU))
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize(
    ("names", "gpus", "refused"),
    [
        ("", 1, True), ("cpu", 1, True), ("", 0, False), ("", None, False),
        ("cpu,cpu", 1, False), ("cpu,cpu", 2, False), ("cpu,cpu", 4, True),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_there_is_refused_before_the_capture(
    monkeypatch: pytest.MonkeyPatch, names: str, gpus: int | None, refused: bool
) -> None:
    monkeypatch.setenv("KD_DEVICES", names)
    found = find_pointers(None, Machine(device=CPU), resources={"gpus": gpus})
    assert ("/resources/gpus" in found) is refused


def test_more_gpus_than_this_machine_has_are_refused_before_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kd.models.precision.find_hardware", lambda _: OLD)
    monkeypatch.setattr("kd.parallel.devices.count_devices", lambda: 1)
    changes = {"kind": "distill", "search": None, "evaluation": {}}
    changes["train"] = {"max_steps": 1, "batch_size": 4}
    machine = Machine(device=torch.device("cuda"))
    assert find_pointers(None, machine, **changes, resources={"gpus": 1}) == []
    job = make_job(**changes, resources={"gpus": 4})
    (found,) = find_problems(job, machine=machine)
    assert str(found).startswith(
        "resources.gpus: it asks for 4 devices, but this process may use 1."
    )
    # A service does not run the job, so its own devices do not count.
    assert find_problems(job) == []
