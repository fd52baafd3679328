"""Which paths, models and hosts a job of the service may name, also by links and patterns."""

from __future__ import annotations

import glob
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from cache.errors import StorageError
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, Problem
from kd.preflight import confinement
from kd.preflight.confinement import BUILDERS, find_confinement_problems
from kd.preflight.limits import AllowedModel, Confinement, read_allow_list
from kd.preflight.named_paths import list_named_resources
from kd.preflight.problems import Folders, find_problems, require_no_problems

MINE = "job_" + "1" * 26
OTHER = "job_" + "2" * 26
CACHE = "a" * 32
OTHER_CACHE = "b" * 32


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """root/ holds text, a model and home/ (runs, caches); data/ and outside/ stand beside it."""
    for folder in (
        "root/text",
        "root/model",
        "data",
        "outside/model",
        f"root/home/runs/{MINE}/student",
    ):
        (tmp_path / folder).mkdir(parents=True)
    for folder in (
        f"root/home/runs/{OTHER}/student",
        "root/home/redis",
        "root/home/logs",
        "root/.ssh",
    ):
        (tmp_path / folder).mkdir(parents=True)
    for cache_name in (CACHE, OTHER_CACHE):
        (tmp_path / "root/home/caches" / cache_name).mkdir(parents=True)
        (tmp_path / "root/home/caches" / cache_name / "manifest.json").write_text("{}")
    for name in (
        "root/text/a.txt",
        "data/b.txt",
        "outside/c.txt",
        "root/home/logs/api.txt",
        "root/.ssh/id.txt",
    ):
        (tmp_path / name).write_text("Some text.")
    for name in (
        "root/.env.txt",
        "root/keys.txt",
        f"root/home/runs/{MINE}/m.txt",
        f"root/home/runs/{OTHER}/o.txt",
    ):
        (tmp_path / name).write_text("Some text.")
    runs = tmp_path / "root/home/runs"
    for model in (
        tmp_path / "root/model",
        tmp_path / "outside/model",
        runs / MINE / "student",
        runs / OTHER / "student",
    ):
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def root(place: Path) -> Path:
    return place / "root"


@pytest.fixture
def limits(place: Path) -> Confinement:
    return Confinement(
        home=place / "root/home",
        roots=(place / "root", place / "data"),
        denied=(place / "root/keys.txt",),
        may_read_run={MINE}.__contains__,
        may_read_cache={CACHE}.__contains__,
    )


def job(**changes: Any) -> JobConfig:
    plain = {
        "teacher": {"model": "model"},
        "student": {"init": {"layers": 1, "hidden_size": 32}},
        "data": {"train": "text/a.txt"},
        "train": {"max_steps": 1},
    }
    return parse_config(plain | changes)


def pointers(config: JobConfig, root: Path, limits: Confinement) -> list[str]:
    return [problem.pointer for problem in find_confinement_problems(config, root, limits)]


def reading(source: Any, **data: Any) -> JobConfig:
    return job(data={"train": source, **data})


# Places


@pytest.mark.parametrize(
    "path",
    [
        "root",
        "root/text/a.txt",
        "root/none/at/all.txt",
        "root/text/../model",
        "data/b.txt",
        f"root/home/runs/{MINE}",
        f"root/home/runs/{MINE}/m.txt",
        f"root/home/caches/{CACHE}/x",
    ],
)
def test_what_lies_in_a_root_may_be_read(place: Path, limits: Confinement, path: str) -> None:
    assert limits.permits(place / path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "outside/c.txt",
        "root/../outside/c.txt",
        "rootless",
        "root/keys.txt",
        "root/text/../keys.txt",
        "root/.env.txt",
        "root/.ssh/id.txt",
        "root/home",
        "root/home/redis/appendonly.aof",
        "root/home/logs/api.txt",
        "root/home/runs",
        f"root/home/runs/{OTHER}/o.txt",
        f"root/home/runs/{MINE}/../{OTHER}/o.txt",
        f"root/home/caches/{OTHER_CACHE}",
        "root/home/caches",
        "root/home/file.txt",
        "\0",
        "x" * 300,
    ],
)
def test_what_lies_elsewhere_or_is_the_service_s_may_not(
    place: Path, limits: Confinement, path: str
) -> None:
    assert not limits.permits(place / path)


def test_links_are_followed(place: Path, root: Path, limits: Confinement) -> None:
    (root / "out").symlink_to(place / "outside")
    (root / "out.txt").symlink_to("../outside/c.txt")
    (root / "other").symlink_to(root / "home/runs" / OTHER)
    (root / "loop").symlink_to(root / "loop")
    (root / "secret.txt").symlink_to(root / "keys.txt")
    (root / "fine").symlink_to(place / "data")
    assert not any(
        map(
            limits.permits,
            (root / name for name in ("out", "out/c.txt", "out.txt", "other", "loop/x")),
        )
    )
    assert not limits.permits(root / "secret.txt")
    assert limits.permits(root / "fine/b.txt")


def test_a_folder_of_data_inside_home_may_be_named_by_the_operator(
    root: Path, limits: Confinement
) -> None:
    (root / "home/data").mkdir()
    within = replace(limits, roots=(*limits.roots, root / "home/data"))
    assert not limits.permits(root / "home/data/x") and within.permits(root / "home/data/x")
    assert not within.permits(root / "home/redis/x")


# Every field


FIELDS: dict[str, tuple[Callable[[str], JobConfig], str]] = {
    "teacher": (lambda path: job(teacher={"model": path}), "/teacher/model"),
    "a teacher nobody asks": (
        lambda path: job(
            teacher={"model": path}, kind="train", loss={"alpha": 1}, student={"model": "model"}
        ),
        "/teacher/model",
    ),
    "student": (lambda path: job(student={"model": path}), "/student/model"),
    "tokenizer": (
        lambda path: job(student={"init": {"layers": 1, "hidden_size": 32, "tokenizer": path}}),
        "/student/init/tokenizer",
    ),
    "text": (reading, "/data/train/0"),
    "the second text": (lambda path: reading(["text", path]), "/data/train/1"),
    "validation": (lambda path: reading("text", validation=path), "/data/validation/0"),
    "dataset": (lambda path: reading({"path": path}), "/data/train/0/path"),
    "held-out dataset": (
        lambda path: reading("text", validation={"path": path}),
        "/data/validation/0/path",
    ),
    "task": (lambda path: job(evaluation={"tasks": [f"{path}/task.yaml"]}), "/evaluation/tasks/0"),
    "search": (
        lambda path: job(
            kind="search",
            student={"model": "model"},
            search={"space": {"student.model": {"choices": ["model", path]}}},
        ),
        "/search/space/student.model",
    ),
    "search of a tokenizer": (
        lambda path: job(
            kind="search",
            search={"space": {"student.init.tokenizer": {"choices": ["model", path]}}},
        ),
        "/search/space/student.init.tokenizer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "path",
    [
        "/etc",
        "..",
        "{place}/outside",
        "home/redis",
        f"home/runs/{OTHER}",
        "link",
        "link/model",
        "/",
        "text/../..",
    ],
)
def test_every_field_that_takes_a_path_is_confined(
    place: Path, root: Path, limits: Confinement, field: str, path: str
) -> None:
    (root / "link").symlink_to(place / "outside")
    make, pointer = FIELDS[field]
    config = make(path.format(place=place))
    (found,) = find_confinement_problems(config, root, limits)
    assert (
        found.pointer == pointer
        and "outside the folders" in found.detail
        and "KD_DATA_ROOTS" in found.remedy
    )
    if path != "/":  # where it would look at the whole disk
        assert found not in find_problems(config, Folders(root, root / "home"))  # kd run is free
    assert found in find_problems(config, Folders(root, root / "home", limits))


def test_a_job_keeps_its_cache_where_the_operator_says(root: Path, limits: Confinement) -> None:
    """The credentials of a bucket are the operator's."""
    named = replace(limits, store="s3://ours/caches")
    for place in ("s3://theirs/caches", "/tmp/caches", "../caches"):
        config = job(cache={"store": place})
        assert pointers(config, root, limits) == ["/cache/store"]
        assert pointers(config, root, named) == ["/cache/store"]
        assert pointers(config, root, rebuilt(named, config, root)) == ["/cache/store"]
    config = job(cache={"store": "s3://ours/caches"})
    assert pointers(config, root, limits) == ["/cache/store"]
    assert pointers(config, root, named) == []
    assert pointers(config, root, rebuilt(named, config, root)) == []


def rebuilt(limits: Confinement, config: JobConfig, root: Path) -> Confinement:
    """The limits as the process that runs the job has them."""
    return Confinement.from_order(json.loads(json.dumps(limits.to_order(config, root))))


def test_a_tokenizer_of_a_remote_teacher_is_confined(root: Path, limits: Confinement) -> None:
    http = {
        "backend": "http",
        "model": "/any/name",
        "url": "http://192.0.2.1:8000",
        "tokenizer": "../outside/model",
    }
    config = job(teacher=http, cache={"profile": "topk"})
    assert pointers(config, root, limits) == ["/teacher/tokenizer", "/teacher/url"]


def text_fields(form: Any, above: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a job that can hold text."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        for name, field in form.model_fields.items():
            yield from text_fields(field.annotation, f"{above}.{name}".lstrip("."))
    elif form is str:
        yield above
    elif get_origin(form) is not None and "Literal" not in str(get_origin(form)):
        for part in get_args(form):
            yield from text_fields(part, above)


CONFINED = {
    "teacher.proposal",
    "teacher.model", "teacher.revision", "teacher.gguf_file", "teacher.url", "teacher.tokenizer",
    "student.model", "student.revision", "student.init.tokenizer",
    "data.train", "data.train.path", "data.train.revision",
    "data.validation", "data.validation.path", "data.validation.revision",
    "cache.fingerprint", "cache.store", "cache.extends", "evaluation.tasks", "search.space.choices",
}  # fmt: skip
NO_PLACE = {
    "kind",  # one of a table
    "name", "labels", "depends_on", "webhook",  # webhooks have rules of their own
    "teacher.api_key_env", "data.text_column", "data.document_separator", "data.train.name",
    "data.train.split",
    "data.validation.name", "data.validation.split", "student.lora.targets", "evaluation.prompts",
    "search.space", "train.optim_args", "train.lr_scheduler_kwargs",
    "teacher.context", "teacher.system",
    "resume.run",  # the API asks whose job it is
    "teachers",  # their names
    "data.train.teacher", "data.train.mixture",
    "data.validation.teacher", "data.validation.mixture",
}  # fmt: skip
#: Each of several teachers is confined as one is.
CONFINED |= {each.replace("teacher.", "teachers.") for each in CONFINED if "teacher." in each}
NO_PLACE |= {each.replace("teacher.", "teachers.") for each in NO_PLACE if "teacher." in each}


def test_every_text_in_a_job_is_confined_or_names_no_place() -> None:
    """A new field must be added to one of the two lists."""
    assert set(text_fields(JobConfig)) - NO_PLACE == CONFINED


def test_everything_is_listed(root: Path, limits: Confinement) -> None:
    config = job(
        teacher={"model": "/a"},
        student={"model": "/b"},
        data={"train": ["/c", "text"], "validation": {"path": "/d"}},
    )
    found = ["/teacher/model", "/student/model", "/data/train/0", "/data/validation/0/path"]
    assert pointers(config, root, limits) == found
    assert len(list(list_named_resources(config))) == 5


def test_a_proposal_is_confined_as_a_model(root: Path, limits: Confinement) -> None:
    served = {"backend": "http", "model": "m", "url": "http://127.0.0.1:1", "tokenizer": "model"}
    config = job(teacher=served | {"proposal": "/b"}, cache={"k": 128})
    assert "/teacher/proposal" in pointers(config, root, limits)


def test_each_of_several_teachers_and_its_text_are_confined(
    root: Path, limits: Confinement
) -> None:
    served = {"backend": "http", "model": "m", "url": "http://192.0.2.1:8000", "tokenizer": "model"}
    config = parse_config(
        {
            "teachers": {"one": {"model": "/a"}, "two": served | {"proposal": "/b"}},
            "student": {"model": "model"},
            "data": {
                "train": [
                    {"path": "/c/*.txt", "teacher": "one"},
                    {"path": "text/a.txt", "teacher": "one"},
                    {"path": "/d", "mixture": {"one": 0.5, "two": 0.5}},
                ]
            },
            "cache": {"k": 8},
            "train": {"max_steps": 1},
        }
    )
    found = [each.pointer for each in find_problems(config, Folders(root, None, limits))]
    places = ["/data/train/2", "/teachers/one/model", "/teachers/two/proposal"]
    assert sorted(found) == ["/data/train/0", *places, "/teachers/two/url"]


def test_what_is_refused_says_nothing_of_what_is_there(
    place: Path, root: Path, limits: Confinement
) -> None:
    there, not_there = (reading(f"{place}/outside/{name}.txt") for name in ("c", "z"))
    (one,), (two,) = (
        find_problems(each, Folders(root, root / "home", limits)) for each in (there, not_there)
    )
    assert replace(one, detail="") == replace(two, detail="")
    assert one.detail.replace("/c.txt", "/z.txt") == two.detail


def test_nothing_is_looked_at_where_something_is_refused(
    root: Path, limits: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "kd.preflight.confinement.find_files", lambda source, _: seen.append(source) or []
    )
    monkeypatch.setattr(
        "kd.preflight.validate.find_source_files", lambda source, *_: seen.append(source)
    )
    found = find_problems(reading("/**/*"), Folders(root, root / "home", limits))
    assert [each.pointer for each in found] == ["/data/train/0"] and seen == []


# Folders and patterns


@pytest.mark.parametrize(
    "source", ["text", "text/*.txt", "*/a.txt", "text/**/*.txt", "{place}/data", "{place}/data/*"]
)
def test_patterns_and_folders_inside_are_fine(
    place: Path, root: Path, limits: Confinement, source: str
) -> None:
    assert find_confinement_problems(reading(source.format(place=place)), root, limits) == []


@pytest.mark.parametrize(
    "source, what",
    [
        (".", "includes"),
        ("**/*.txt", "includes"),
        ("*.txt", "includes"),  # keys.txt
        ("home/runs/*/*.txt", "outside"),
        ("text/*/../../../outside/*", ".. or more"),
        ("**/**/*.txt", ".. or more"),
        ("/**", "outside"),
        ("/*/*", "outside"),
    ],
)
def test_patterns_that_reach_out_are_refused(
    root: Path, limits: Confinement, source: str, what: str
) -> None:
    (found,) = find_confinement_problems(reading(source), root, limits)
    assert what in found.detail and found.remedy


def test_more_patterns_than_anybody_needs_are_refused_and_the_same_one_is_looked_up_once(
    root: Path, limits: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = []
    find = confinement.find_files
    monkeypatch.setattr(
        confinement, "find_files", lambda *all: looked_up.append(all[0]) or find(*all)
    )
    assert find_confinement_problems(reading(["text/*.txt"] * 500), root, limits) == []
    assert looked_up == ["text/*.txt"]
    (found,) = find_confinement_problems(
        reading([f"text/{number}*.txt" for number in range(500)]), root, limits
    )
    assert "more than 64 patterns" in found.detail and len(looked_up) == 1


def test_a_link_in_a_folder_of_text_is_refused(
    place: Path, root: Path, limits: Confinement
) -> None:
    (root / "text/z.txt").symlink_to(place / "outside/c.txt")
    for source in ("text", "text/*.txt", "text/z.txt"):
        assert pointers(reading(source), root, limits) == ["/data/train/0"]
    assert pointers(reading("text/a.txt"), root, limits) == []


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/x"]
)
def test_a_link_out_of_a_model_s_folder_is_refused(
    place: Path, root: Path, limits: Confinement, name: str
) -> None:
    (root / "model" / name).unlink(missing_ok=True)
    (root / "model" / name).parent.mkdir(exist_ok=True)
    (root / "model" / name).symlink_to(place / "outside/c.txt")
    (found,) = find_confinement_problems(job(), root, limits)
    assert found.pointer == "/teacher/model" and "includes" in found.detail


def test_a_gguf_file_behind_a_link_in_a_folder_of_a_model_s_is_refused(
    place: Path, root: Path, limits: Confinement
) -> None:
    (root / "model/deep").mkdir()
    (root / "model/deep/link").symlink_to(place / "outside")
    config = job(teacher={"model": "model", "gguf_file": "deep/link/c.txt"})
    (found,) = find_confinement_problems(config, root, limits)
    assert found.pointer == "/teacher/model" and "leads out" in found.detail


def test_links_within_a_root_are_fine_as_a_hub_s_snapshots_have_them(
    root: Path, limits: Confinement
) -> None:
    (root / "blobs").mkdir()
    (root / "model/config.json").rename(root / "blobs/1")
    (root / "model/config.json").symlink_to("../blobs/1")
    assert find_confinement_problems(job(), root, limits) == []


def test_a_folder_of_a_dataset_may_not_hold_the_service_or_links_out(
    place: Path, root: Path, limits: Confinement
) -> None:
    (root / "set/deep").mkdir(parents=True)
    assert pointers(reading({"path": "set"}), root, limits) == []
    assert pointers(reading({"path": "."}), root, limits) == ["/data/train/0/path"]
    (root / "set/deep/x.parquet").symlink_to(place / "outside/c.txt")
    assert pointers(reading({"path": "set"}), root, limits) == ["/data/train/0/path"]


def test_a_format_is_no_dataset(root: Path, limits: Confinement) -> None:
    """``datasets`` would search for files by itself, and one of the formats is pickle."""
    for name in sorted(BUILDERS):
        assert pointers(reading({"path": name}), root, limits) == ["/data/train/0/path"]
    assert pointers(reading({"path": "org/json"}), root, limits) == []


def test_every_builder_of_datasets_is_known() -> None:
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    assert set(_PACKAGED_DATASETS_MODULES) <= BUILDERS


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "~/x"])
def test_files_and_revisions_stay_in_their_folder(
    root: Path, limits: Confinement, path: str
) -> None:
    jobs = [
        job(teacher={"model": "model", "gguf_file": path}),
        job(teacher={"model": "org/model", "revision": path}),
        job(student={"model": "org/model", "revision": path}),
        reading({"path": "org/set", "revision": path}),
    ]
    assert [pointers(each, root, limits) for each in jobs] == [
        ["/teacher/model"], ["/teacher/model"], ["/student/model"], ["/data/train/0/path"],
    ]  # fmt: skip
    assert (
        pointers(job(teacher={"model": "org/model", "revision": "refs/pr/1"}), root, limits) == []
    )


def test_a_task_that_can_run_code_is_the_operator_s_to_allow(
    root: Path, limits: Confinement
) -> None:
    (root / "tasks").mkdir()
    (root / "tasks/mine.yaml").write_text("task: mine")
    config = job(evaluation={"tasks": ["hellaswag", "tasks/mine.yaml"]})
    (found,) = find_confinement_problems(config, root, limits)
    assert found.pointer == "/evaluation/tasks/1" and "run code" in found.detail
    assert find_confinement_problems(config, root, replace(limits, remote_code=True)) == []


@pytest.mark.parametrize("field", ["fingerprint", "extends"])
def test_a_cache_of_another_is_as_one_that_is_not_there(
    field: str, root: Path, limits: Confinement
) -> None:
    trains = {"kind": "train", "student": {"model": "model"}, "data": {}}

    def answers(name: str) -> list[Problem]:
        wanted = job(cache={field: name}, **(trains if field == "fingerprint" else {}))
        found = find_problems(wanted, Folders(root, root / "home", limits))
        return [each for each in found if each.pointer == f"/cache/{field}"]

    (own,) = answers(CACHE)
    assert "damaged" in own.detail, "it is opened, and is no whole cache"
    (other,) = answers(OTHER_CACHE)
    (none,) = answers("c" * 32)
    assert other.detail.replace("b" * 32, "c" * 32) == none.detail and other.remedy == none.remedy


def test_the_student_of_an_earlier_job_is_its_owner_s_alone(
    root: Path, limits: Confinement
) -> None:
    assert pointers(job(student={"model": f"home/runs/{MINE}/student"}), root, limits) == []
    assert pointers(job(student={"model": f"home/runs/{OTHER}/student"}), root, limits) == [
        "/student/model"
    ]


@pytest.mark.long
@given(st.text(max_size=40) | st.text(alphabet="./*[]~\0 ab\ud800:\\-@", max_size=40))
@settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_no_text_whatever_ends_in_an_error_or_outside(
    root: Path, limits: Confinement, text: str
) -> None:
    for make, _ in FIELDS.values():
        try:
            config = make(text)
        except ConfigError:  # of no form at all
            continue
        for problem in find_problems(config, Folders(root, root / "home", limits)):
            json.dumps(problem.to_json()).encode()
        if not find_confinement_problems(config, root, limits):
            assert all(
                limits.permits(root / each.name) or glob.has_magic(each.name)
                for each in list_named_resources(config)
                if each.kind != "task"
            )


# The limits as JSON, for the process that runs the job


def test_the_order_grants_what_was_granted_and_is_plain_json(
    root: Path, limits: Confinement
) -> None:
    config = job(
        student={"model": f"home/runs/{MINE}/student"},
        data={"train": ["text", f"home/runs/{MINE}/*.txt"]},
    )
    order = json.loads(json.dumps(limits.to_order(config, root)))
    assert order["runs"] == [MINE] and order["caches"] == []
    granted = Confinement.from_order(order)
    assert find_confinement_problems(config, root, granted) == []
    of_another = job(student={"model": f"home/runs/{OTHER}/student"})
    with pytest.raises(ConfigError, match="outside the folders"):
        require_no_problems(of_another, Folders(root, root / "home", granted))
    named_cache = job(
        kind="train", student={"model": "model"}, data={}, cache={"fingerprint": CACHE}
    )
    assert limits.to_order(named_cache, root)["caches"] == [CACHE]
    assert limits.to_order(job(cache={"extends": CACHE}), root)["caches"] == [CACHE]
    with_cache = Confinement.from_order(limits.to_order(named_cache, root))
    assert find_confinement_problems(named_cache, root, with_cache) == []
    with pytest.raises(ConfigError, match="no sealed cache"):
        require_no_problems(named_cache, Folders(root, root / "home", granted))


def test_the_order_keeps_every_limit(limits: Confinement, root: Path) -> None:
    full = replace(
        limits,
        models=(AllowedModel("a", "b"), AllowedModel("c")),
        hosts=("h", "10.0.0.0/8"),
        remote_code=True,
        free_datasets=True,
    )
    back = Confinement.from_order(json.loads(json.dumps(full.to_order(job(), root))))
    kept = ("home", "roots", "denied", "models", "hosts", "remote_code", "free_datasets")
    assert [getattr(back, name) for name in kept] == [getattr(full, name) for name in kept]


@pytest.mark.parametrize("field", ["models", "denied", "home", "runs"])
def test_an_order_that_lacks_a_limit_is_refused(
    limits: Confinement, root: Path, field: str
) -> None:
    """The default of a limit permits most, so it must not stand for one that was lost."""
    order = limits.to_order(job(), root)
    del order[field]
    with pytest.raises(KeyError, match=field):
        Confinement.from_order(order)


def test_a_link_that_was_turned_after_the_post_is_seen_when_the_stage_begins(
    place: Path, root: Path, limits: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = root / "now"
    link.symlink_to(root / "text")
    config = reading("now/*.txt")
    assert find_problems(config, Folders(root, root / "home", limits)) == []
    folders = Folders(Path(), root / "home", Confinement.from_order(limits.to_order(config, root)))
    link.unlink()
    link.symlink_to(place / "outside")
    monkeypatch.chdir(root)  # as the process that runs the job
    with pytest.raises(ConfigError, match=r"data\.train\.0"):
        require_no_problems(config, folders)
    link.unlink()
    link.symlink_to(root / "home/runs" / OTHER)
    with pytest.raises(ConfigError, match=r"data\.train\.0"):
        require_no_problems(config, folders)


def test_without_limits_everything_is_granted(root: Path) -> None:
    config = job(data={"train": "/etc/passwd", "format": "text"})
    require_no_problems(config, Folders(root, root / "home", limits=None))


# The operator's list of models


def test_the_list_of_models(tmp_path: Path) -> None:
    file = tmp_path / "models"
    file.write_text("# ours\norg/a\n\n  org/b@1234  # pinned\n/models/c\n", encoding="utf-8")
    assert read_allow_list(file) == (
        AllowedModel("org/a"),
        AllowedModel("org/b", "1234"),
        AllowedModel("/models/c"),
    )
    assert read_allow_list(None) is None
    for bad in (tmp_path / "none", tmp_path):
        with pytest.raises(StorageError, match="KD_MODEL_ALLOW_LIST"):
            read_allow_list(bad)


@pytest.mark.parametrize(
    "model, allowed",
    [
        ({"model": "org/a"}, True),
        ({"model": "org/a", "revision": "any"}, True),
        ({"model": "org/b", "revision": "1234"}, True),
        ({"model": "org/b"}, False),
        ({"model": "org/b", "revision": "main"}, False),
        ({"model": "org/A"}, False),
        ({"model": "org/a/"}, False),
        ({"model": "org/c"}, False),
        ({"model": "model"}, True),
        ({"model": "./model"}, True),
        ({"model": "text/../model"}, True),
        ({"model": "text"}, False),
        ({"model": "linked"}, True),
        ({"model": f"home/runs/{MINE}/student"}, True),
    ],
)
def test_only_what_is_listed_may_be_loaded(
    root: Path, limits: Confinement, model: dict[str, str], allowed: bool
) -> None:
    (root / "linked").symlink_to(root / "model")
    listed = replace(
        limits, models=(AllowedModel("org/a"), AllowedModel("org/b", "1234"), AllowedModel("model"))
    )
    for config, pointer in (
        (job(teacher=model), "/teacher/model"),
        (job(student=model), "/student/model"),
    ):
        found = find_confinement_problems(config, root, listed)
        assert [each.pointer for each in found] == ([] if allowed else [pointer])
        assert all("list of models" in each.detail for each in found)


def test_an_empty_list_allows_none_and_tokenizers_are_models(
    root: Path, limits: Confinement
) -> None:
    nothing = replace(limits, models=())
    config = job(student={"init": {"layers": 1, "hidden_size": 32, "tokenizer": "org/t"}})
    assert pointers(config, root, nothing) == ["/teacher/model", "/student/init/tokenizer"]
    searched = {"space": {"student.model": {"choices": ["org/a", "org/x"]}}}
    config = job(
        kind="search", teacher={"model": "org/a"}, student={"model": "org/a"}, search=searched
    )
    only = replace(limits, models=(AllowedModel("org/a"),))
    assert pointers(config, root, only) == ["/search/space/student.model"]


# Hosts


def url_job(url: str) -> JobConfig:
    http = {"backend": "http", "model": "m", "url": url, "tokenizer": "model"}
    return job(teacher=http, cache={"profile": "topk"})


def test_no_host_is_allowed_until_the_operator_names_it(root: Path, limits: Confinement) -> None:
    (found,) = find_confinement_problems(url_job("http://127.0.0.1:8000/v1"), root, limits)
    assert (
        found.pointer == "/teacher/url"
        and "the operator does not allow the host" in found.detail
        and "KD_REMOTE_HOSTS" in found.remedy
    )
    allowed = replace(limits, hosts=("127.0.0.1",))
    assert find_confinement_problems(url_job("http://127.0.0.1:8000/v1"), root, allowed) == []
    assert pointers(url_job("http://127.0.0.2:8000"), root, allowed) == ["/teacher/url"]


@pytest.mark.parametrize("url", ["http://[::1", "http://[x]/", "http://:80"])
def test_what_is_no_url_is_refused(root: Path, limits: Confinement, url: str) -> None:
    assert pointers(url_job(url), root, replace(limits, hosts=("127.0.0.1",))) == ["/teacher/url"]


@pytest.mark.parametrize(
    "source", ["http://169.254.169.254/x", "hf://datasets/a/b", "file:///etc/passwd", "s3://b/k"]
)
def test_a_url_in_place_of_a_path_is_one(root: Path, limits: Confinement, source: str) -> None:
    assert pointers(reading(source), root, limits) == ["/data/train/0"]
    assert pointers(reading({"path": source}), root, limits) == ["/data/train/0/path"]
    assert pointers(job(teacher={"model": source}), root, limits) == ["/teacher/model"]


def test_a_url_with_a_port_that_is_not_listed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 0))]
    # A test cannot make the real resolver know this name.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    limits = Confinement(Path("/h"), (), hosts=("a.example:443",))
    for url, is_refused in (("https://a.example/v1", False), ("https://a.example:8443/v1", True)):
        http = {"backend": "http", "model": "m", "url": url, "tokenizer": "model"}
        asked = job(teacher=http, cache={"profile": "topk"})
        assert ("/teacher/url" in pointers(asked, Path(), limits)) == is_refused


def test_the_working_folder_is_a_root_as_good_as_another(place: Path, limits: Confinement) -> None:
    before = Path.cwd()
    os.chdir(place / "root")
    try:
        assert find_confinement_problems(job(), Path(), limits) == []
        assert pointers(reading("../outside"), Path(), limits) == ["/data/train/0"]
    finally:
        os.chdir(before)
