"""Problems found before a model is loaded: each has its place and its remedy; torch stays out."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.support.paths import ROOT
from bench.support.small.caches import make_cache, make_codec, make_identity
from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, Problem
from kd.preflight.problems import Folders, find_problems
from kd.preflight.validate import FREE_BYTES
from kd.training.preparing.requirements import require_served
from tests.support.users import not_as_root


@pytest.fixture(autouse=True)
def online(monkeypatch) -> None:
    """Switch the hub on: without it every hub id is a problem."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder with text, and with a model and a GGUF file that have only the right names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-f16.gguf").write_bytes(b"GGUF")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("It was a dark night.", encoding="utf-8")
    (tmp_path / "text" / "b.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    return tmp_path


def job(**changes: Any) -> dict[str, Any]:
    return {
        "teacher": {"model": "model"},
        "student": {"init": {"layers": 1, "hidden_size": 32}},
        "data": {"train": "text/a.txt"},
        "train": {"max_steps": 1},
    } | changes


def check(root: Path, home: str | Path = "home", **changes: Any) -> list[Problem]:
    return find_problems(parse_config(job(**changes)), Folders(root, root / home))


GOOD = {
    "as it is": {},
    "a gguf teacher": {"teacher": {"model": "gguf", "gguf_file": "model-f16.gguf"}},
    "a hub teacher": {"teacher": {"model": "org/model-1.5_x"}},
    "an absolute path": {"teacher": {"model": "{root}/model"}},
    "a student of its own": {"student": {"model": "model"}},
    "a tokenizer": {"student": {"init": {"layers": 1, "hidden_size": 32, "tokenizer": "model"}}},
    "folder and glob": {
        "data": {
            "train": ["text", "text/*.txt", "text/**/*.jsonl"], "validation": "text/b.jsonl",
        },
    },
    "a dataset": {"data": {"train": {"path": "org/set"}}},
    "a declared format": {"data": {"train": "model/model.safetensors", "format": "text"}},
    "no teacher": {
        "teacher": None, "kind": "train", "loss": {"alpha": 1}, "student": {"model": "model"},
    },
    "a teacher that is cut and compared": {
        "kind": "train", "loss": {"alpha": 1}, "student": {"from_teacher": {"layers": 1}},
        "evaluation": {"teacher": True},
    },
    "a teacher nobody asks": {
        "teacher": {"model": "no/such/thing"}, "kind": "train", "loss": {"alpha": 1},
        "student": {"model": "model"},
    },
}  # fmt: skip


def rooted(value: Any, root: Path) -> Any:
    return json.loads(json.dumps(value).replace("{root}", str(root)))


@pytest.mark.parametrize("changes", GOOD.values(), ids=GOOD)
def test_a_good_job_has_no_problems(root, changes):
    assert check(root, **rooted(changes, root)) == []


BAD = {
    "missing folder": (
        {"teacher": {"model": "models/none/x"}},
        "/teacher/model",
        "no folder 'models/none/x'",
    ),
    "a file": ({"teacher": {"model": "gguf/model-f16.gguf"}}, "/teacher/model", "is a file"),
    "no config": ({"teacher": {"model": "text"}}, "/teacher/model", "no config.json"),
    "no weights": ({"teacher": {"model": "bare"}}, "/teacher/model", "no *.safetensors"),
    "a teacher to be cut": (
        {
            "teacher": {"model": "text"},
            "kind": "train",
            "loss": {"alpha": 1},
            "student": {"from_teacher": {"layers": 1}},
        },
        "/teacher/model",
        "no config.json",
    ),
    "a teacher to compare with": (
        {
            "teacher": {"model": "text"},
            "kind": "train",
            "loss": {"alpha": 1},
            "student": {"model": "model"},
            "evaluation": {"teacher": True},
        },
        "/teacher/model",
        "no config.json",
    ),
    "a field to search": (
        {"kind": "search", "search": {"space": {"train.max_step": {"choices": [1]}}}},
        "/search/space/train.max_step",
        "there is no field train.max_step",
    ),
    "missing gguf": (
        {"teacher": {"model": "gguf", "gguf_file": "x.gguf"}},
        "/teacher/gguf_file",
        "x.gguf does not",
    ),
    "remote code": (
        {"teacher": {"model": "model", "trust_remote_code": True}},
        "/teacher/trust_remote_code",
        "allow",
    ),
    "student": ({"student": {"model": "text"}}, "/student/model", "no config.json"),
    "student folder": ({"student": {"model": "./x/y/z"}}, "/student/model", "no folder"),
    "tokenizer": (
        {"student": {"init": {"layers": 1, "hidden_size": 32, "tokenizer": "x/y/z"}}},
        "/student/init/tokenizer",
        "no folder 'x/y/z'",
    ),
    "no file": (
        {"data": {"train": "text/none.txt"}},
        "/data/train/0",
        "no file matches 'text/none.txt'",
    ),
    "no match": (
        {"data": {"train": ["text/a.txt", "text/*.md"]}},
        "/data/train/1",
        "no file matches 'text/*.md'",
    ),
    "validation": (
        {"data": {"train": "text", "validation": "v.txt"}},
        "/data/validation/0",
        "no file matches",
    ),
    "empty": ({"data": {"train": "empty.txt"}}, "/data/train/0", "holds no text"),
    "blank": ({"data": {"train": "blank.txt"}}, "/data/train/0", "holds no text"),
    "suffix": (
        {"data": {"train": "bare/config.json.bak"}},
        "/data/train/0",
        "cannot tell the format",
    ),
}


@pytest.fixture
def bad_root(root) -> Path:
    (root / "bare").mkdir()
    (root / "bare" / "config.json").write_text("{}", encoding="utf-8")
    (root / "bare" / "config.json.bak").write_text("{}", encoding="utf-8")
    (root / "empty.txt").write_bytes(b"")
    (root / "blank.txt").write_text(" \n\t\n", encoding="utf-8")
    return root


@pytest.mark.parametrize("changes, pointer, detail", BAD.values(), ids=BAD)
def test_bad_input_is_located_and_has_a_remedy(bad_root, monkeypatch, changes, pointer, detail):
    monkeypatch.delenv("KD_TRUST_REMOTE_CODE", raising=False)
    (problem,) = check(bad_root, **changes)
    assert problem.pointer == pointer
    assert detail in problem.detail
    assert problem.remedy


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_sequences_longer_than_a_model_s_context_are_refused(root, key):
    (root / "model" / "config.json").write_text(json.dumps({key: 64}), encoding="utf-8")
    text = {"train": "text/a.txt"}
    for changes in (
        {},
        {"teacher": None, "kind": "train", "student": {"model": "model"}, "loss": {"alpha": 1}},
    ):
        (problem,) = check(root, **changes, data=text | {"sequence_length": 65})
        assert (
            problem.pointer == "/data/sequence_length" and "64 tokens, but got 65" in problem.detail
        )
        assert check(root, **changes, data=text | {"sequence_length": 64}) == []
    (root / "model" / "config.json").write_text('{"max_position_embeddings": null}', "utf-8")
    assert check(root, data=text | {"sequence_length": 65}) == []
    for unreadable in ("[]", "not JSON"):
        (root / "model" / "config.json").write_text(unreadable, encoding="utf-8")
        (problem,) = check(root, data=text | {"sequence_length": 65})
        assert problem.pointer == "/teacher/model" and "cannot be read" in problem.detail


def test_a_model_with_an_encoder_is_refused_by_name(root):
    (root / "model" / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["T5ForConditionalGeneration"],
                "model_type": "t5",
                "is_encoder_decoder": True,
            }
        ),
        encoding="utf-8",
    )
    for changes, pointer in (
        ({}, "/teacher/model"),
        ({"teacher": {"model": "org/x"}, "student": {"model": "model"}}, "/student/model"),
    ):
        (problem,) = check(root, **changes)
        assert problem.pointer == pointer and "T5ForConditionalGeneration" in problem.detail


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_size_that_no_model_has_is_found_before_the_model_is_built(root, field):
    (root / "model" / "config.json").write_text(json.dumps({"model_type": "llama", field: 10**7}))
    (problem,) = check(root)
    assert problem.pointer == "/teacher/model" and f"has {field} 10000000" in problem.detail


@pytest.mark.parametrize(
    "name", ["x" * 300, "y/" * 3000, "a\0b", "a\0/*", "org/x\n", "\ud800/*", "loop/x"], ids=ascii
)
def test_a_name_that_no_file_can_have_is_a_problem_and_no_crash(root, name):
    (root / "loop").symlink_to(root / "loop")
    jobs = [
        {"teacher": {"model": name}},
        {"student": {"model": name}},
        {"student": {"init": {"layers": 1, "hidden_size": 32, "tokenizer": name}}},
        {"data": {"train": name}},
        {"data": {"train": "text", "validation": name}},
    ]
    for changes in jobs:
        try:
            config = parse_config(job(**changes))
        except ConfigError:  # of no form at all
            continue
        found = find_problems(config, Folders(root, root / "home"))
        assert (
            found or changes.get("student") or changes.get("teacher")
        )  # which may be names on the hub
        assert all(each.detail for each in found)


def test_a_hub_id_ends_where_it_ends(root):
    (problem,) = check(root, teacher={"model": "org/x\n"})
    assert problem.pointer == "/teacher/model"


def test_every_problem_is_listed(bad_root):
    bad = {
        "teacher": {"model": "text"},
        "student": {"model": "x/y/z"},
        "data": {"train": ["empty.txt", "none"]},
    }
    assert [each.pointer for each in check(bad_root, **bad)] == [
        "/teacher/model", "/student/model", "/data/train/0", "/data/train/1",
    ]  # fmt: skip


def test_a_missing_gguf_file_lists_those_that_are_there(root):
    (problem,) = check(root, teacher={"model": "gguf", "gguf_file": "x.gguf"})
    assert problem.remedy == "There are: model-f16.gguf."
    (problem,) = check(root, teacher={"model": "model", "gguf_file": "x.gguf"})
    assert problem.remedy == "There is no *.gguf in it."


def test_a_folder_with_gguf_files_alone_is_told_the_field_that_names_them(root):
    for lacking, config in (("config.json", None), ("*.safetensors", "{}")):
        if config is not None:
            (root / "gguf" / "config.json").write_text(config, encoding="utf-8")
        (problem,) = check(root, teacher={"model": "gguf"})
        assert (problem.pointer, problem.remedy) == (
            "/teacher/model",
            "Set teacher.gguf_file: model-f16.gguf.",
        )
        assert lacking in problem.detail
        (problem,) = check(root, student={"model": "gguf"})
        assert problem.pointer == "/student/model" and lacking in problem.detail
        assert "A student must be" in problem.remedy and "teachers only" in problem.remedy
    (root / "gguf" / "model-q8.gguf").write_bytes(b"GGUF")
    (problem,) = check(root, teacher={"model": "gguf"})
    assert problem.remedy == "Set teacher.gguf_file: model-f16.gguf or model-q8.gguf."


def test_remote_code_is_allowed_by_the_operator_alone(root, monkeypatch):
    asked = {"teacher": {"model": "model", "trust_remote_code": True}}
    monkeypatch.setenv("KD_TRUST_REMOTE_CODE", "0")
    assert [each.pointer for each in check(root, **asked)] == ["/teacher/trust_remote_code"]
    monkeypatch.setenv("KD_TRUST_REMOTE_CODE", "true")
    assert check(root, **asked) == []


def test_relative_paths_are_taken_from_the_given_root(root, monkeypatch):
    monkeypatch.chdir(root / "text")
    assert check(root) == []
    (problem,) = check(root, data={"train": "a.txt"})
    assert str(root) in problem.remedy


@pytest.mark.long
def test_offline_a_hub_id_must_be_in_the_hub_cache(root):
    """It runs in a new process, because ``huggingface_hub`` reads its environment at import."""
    hub = root / "hub"
    snapshot = hub / "models--org--known" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (hub / "models--org--known" / "refs").mkdir()
    (hub / "models--org--known" / "refs" / "main").write_text(snapshot.name, encoding="utf-8")
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub)}
    assert in_a_process(root, {"teacher": {"model": "org/known"}}, environment)["problems"] == []
    (problem,) = in_a_process(root, {"teacher": {"model": "org/unknown"}}, environment)["problems"]
    assert (
        problem["pointer"] == "/teacher/model"
        and "offline" in problem["detail"]
        and problem["remedy"]
    )


# ---------------------------------------------------------------------- disk


@pytest.fixture
def common_root(root) -> Iterator[Path]:
    """A copy of ``root`` in a folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = Path(shutil.copytree(root, Path(folder) / "root"))
        copy.chmod(0o755)
        yield copy


def test_a_home_that_does_not_exist_yet_is_fine_and_is_not_made(root):
    assert check(root, home="deep/er/home") == []
    assert not (root / "deep").exists()


@pytest.mark.parametrize("home", ["text/a.txt", "text/a.txt/below"])
def test_a_home_that_is_a_file_is_refused(root, home):
    (problem,) = check(root, home=home)
    assert "cannot be written" in problem.detail and "KD_HOME" in problem.remedy


@pytest.mark.parametrize("home", ["sealed", "sealed/home"])
def test_a_home_that_cannot_be_written_is_refused(common_root, home):
    (common_root / "sealed").mkdir(mode=0o555)
    with not_as_root():
        (problem,) = check(common_root, home=home)
    assert "cannot be written" in problem.detail and "KD_HOME" in problem.remedy


def test_text_that_cannot_be_read_is_refused(common_root):
    (common_root / "text" / "a.txt").chmod(0)
    (common_root / "home").mkdir(mode=0o777)
    (common_root / "home").chmod(0o777)
    with not_as_root():
        (problem,) = check(common_root)
    assert (problem.pointer, problem.detail) == (
        "/data/train/0",
        "'a.txt' cannot be read.",
    ) and problem.remedy


@pytest.mark.parametrize(
    "changes, pointer",
    [
        ({"teacher": {"model": "closed/model"}}, "/teacher/model"),
        ({"student": {"model": "closed/model"}}, "/student/model"),
        (
            {"student": {"init": {"layers": 1, "hidden_size": 8, "tokenizer": "closed/x"}}},
            "/student/init/tokenizer",
        ),
        ({"data": {"train": ["text/a.txt", "closed/a.txt"]}}, "/data/train/1"),
    ],
)
def test_what_lies_in_a_folder_that_may_not_be_entered_is_refused(common_root, changes, pointer):
    (common_root / "closed").mkdir(mode=0o000)
    (common_root / "home").mkdir()
    (common_root / "home").chmod(0o777)
    with not_as_root():
        (problem,) = check(common_root, **changes)
    assert problem.pointer == pointer and "closed" in problem.detail and problem.remedy


def test_a_home_in_a_folder_that_may_not_be_entered_is_refused(common_root):
    (common_root / "closed").mkdir(mode=0o000)
    with not_as_root():
        (problem,) = check(common_root, home="closed/home")
    assert "closed" in problem.detail and problem.remedy


def make_small_cache(root: Path, **options: Any) -> str:
    return make_cache(root / "home" / "caches", make_identity(codec=make_codec(**options))).name


WEIGHTED = {"alpha": 0.5, "entropy_weighting": 1.0}
#: Caches of profile threshold, by whether they keep the entropies of positions.
WITH_ENTROPIES = [
    ({}, False),
    ({"entropies": True}, True),
    ({"clusters": 0, "fitted": 0}, True),
]


@pytest.mark.parametrize(("options", "keeps"), WITH_ENTROPIES)
def test_a_sealed_cache_without_entropies_of_positions_cannot_weigh_them(root, options, keeps):
    name = make_small_cache(root, **options)
    changes = {"kind": "train", "cache": {"fingerprint": name}, "student": {"model": "model"}}
    assert check(root, **changes) == []
    found = check(root, **changes, loss=WEIGHTED)
    codec = open_cache(root / "home" / "caches" / name).codec
    loss = parse_config(job(**changes, loss=WEIGHTED)).loss
    if keeps:
        assert found == []
        require_served(loss, codec)
        return
    (problem,) = found
    assert problem.pointer == "/loss/entropy_weighting"
    remedy = "capture it with a job that sets loss.entropy_weighting"
    assert f"keeps only the mean of each sequence: {remedy}" in problem.detail
    with pytest.raises(ConfigError, match="keeps only the mean of each sequence"):
        require_served(loss, codec)
    require_served(parse_config(job(**changes)).loss, codec)


@pytest.mark.parametrize("entropies", [False, True])
def test_a_job_that_weighs_positions_extends_a_cache_with_their_entropies(root, entropies):
    name = make_small_cache(root, entropies=entropies)
    cache = {"shard_sequences": 4, "extends": name}
    data = {"train": "text/a.txt", "sequence_length": make_identity().data.sequence_length}
    assert check(root, cache=cache, data=data) == []
    found = check(root, cache=cache, data=data, loss=WEIGHTED)
    assert [problem.pointer for problem in found] == ["/cache/extends"] * (not entropies)
    for problem in found:
        assert name in problem.detail
        assert "capture it with a job that sets loss.entropy_weighting" in problem.detail


def test_a_cache_of_version_0_2_0_cannot_be_extended(root):
    earlier, now = make_small_cache(root, clusters=0, fitted=0), make_small_cache(root)
    extending = {"shard_sequences": 4, "extends": now}
    data = {"train": "text/a.txt", "sequence_length": make_identity().data.sequence_length}
    assert check(root, cache=extending, data=data) == []
    (problem,) = check(root, cache=extending | {"extends": earlier}, data=data)
    assert problem.pointer == "/cache/extends" and earlier in problem.detail
    assert "Potstill 0.2.0 or an earlier version captured it" in problem.detail
    assert problem.remedy == "Remove cache.extends to capture all of the text."


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a file system that never has space"
)
def test_a_disk_without_space_is_refused():
    assert shutil.disk_usage("/proc").free < FREE_BYTES
    config = parse_config(job(teacher={"model": "org/x"}, data={"train": {"path": "org/set"}}))
    (problem,) = find_problems(config, Folders(Path(), Path("/proc")))
    assert (
        re.search(r"has 0 bytes left|cannot be written", problem.detail)
        and "KD_HOME" in problem.remedy
    )


# ---------------------------------------------------------------------- without torch

CHILD = """
import json, sys
from pathlib import Path
from kd.config.jobfile import parse_config
from kd.preflight.problems import Folders, find_problems
job, root = json.loads(sys.argv[1]), Path(sys.argv[2])
folders = Folders(root, root / "home")
problems = [problem.to_json() for problem in find_problems(parse_config(job), folders)]
heavy = sorted({"torch", "transformers", "datasets", "pyarrow", "zarr"} & set(sys.modules))
print(json.dumps({"problems": problems, "heavy": heavy}))
"""


def in_a_process(
    root: Path, changes: dict[str, Any], environment: dict[str, str] | None = None
) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(job(**changes)), str(root)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_checking_imports_nothing_heavy(bad_root):
    bad = {
        "teacher": {"model": "org/x"},
        "student": {"model": "text"},
        "data": {"train": ["text", "empty.txt", "no"]},
    }
    found = in_a_process(
        bad_root, bad, {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(bad_root / "hub")}
    )
    assert [each["pointer"] for each in found["problems"]] == [
        "/teacher/model", "/student/model", "/data/train/1", "/data/train/2",
    ]  # fmt: skip
    assert found["heavy"] == []
