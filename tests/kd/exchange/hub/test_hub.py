"""``kd push`` and ``kd pull`` against a hub on loopback: every byte, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from bench.support.paths import ROOT
from bench.support.small.caches import make_cache, make_identity
from cache.checking.verify import verify_cache
from kd.errors import ModelError
from kd.exchange.hub.pushing import push_to_folder
from kd.files import write_json
from tests.support.caches import content
from tests.support.commands import KD, kd
from tests.support.hub.fake_hub import TOKEN, FakeHub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as running:
        yield running


@pytest.fixture
def online(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """The environment of a user of the hub, with a token and without Xet."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(tmp_path / "huggingface"),
    }


@pytest.fixture
def student(tiny_teacher: Path, tmp_path: Path) -> Path:
    """A student's folder: a real tiny model with its card."""
    folder = tmp_path / "student"
    folder.mkdir()
    for path in tiny_teacher.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# A student\n")
    return folder


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A sealed cache in a data folder."""
    return make_cache(tmp_path / "home" / "caches")


def done(*arguments: object, **environment: str) -> dict[str, Any]:
    finished = kd(*arguments, "--json", **environment)
    assert finished.returncode == 0, finished.stderr
    assert TOKEN not in finished.stdout + finished.stderr
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def refused(*arguments: object, **environment: str) -> str:
    finished = kd(*arguments, **environment)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert TOKEN not in finished.stdout + finished.stderr
    assert "hub_error" in finished.stderr or "cache_corrupt" in finished.stderr
    return " ".join(finished.stderr.split())


def killed(hub: FakeHub, *arguments: object, **environment: str) -> None:
    """Start a command, wait until the hub no longer answers, and kill it."""
    process = subprocess.Popen(
        [*KD, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert hub.stalled.wait(120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    hub.stalled.clear()
    hub.stall_after_puts = None


@pytest.mark.long
def test_a_student_goes_to_the_hub_and_comes_back_to_the_byte(
    hub: FakeHub, online: dict[str, str], student: Path, tmp_path: Path
) -> None:
    sent = done("push", student, "ann/small", "--private", **online)
    assert hub.repositories["model", "ann/small"].private
    assert hub.files("model", "ann/small") == content(student)
    assert sent["files"] == len(content(student))
    sent_before = (hub.commits, hub.puts.total())
    again = done("push", student, "ann/small", **online)
    assert again["commit"] == sent["commit"]
    assert (hub.commits, hub.puts.total()) == sent_before

    pulled = done("pull", "ann/small", "--out", tmp_path / "elsewhere", **online)
    assert pulled["commit"] == sent["commit"]
    assert content(tmp_path / "elsewhere") == content(student)
    hub.served.clear()
    assert done("pull", "ann/small", "--out", tmp_path / "elsewhere", **online)["reused"]
    assert hub.served.total() == 0
    ids = torch.tensor([[1, 2, 3]])
    logits = [
        AutoModelForCausalLM.from_pretrained(each)(ids).logits
        for each in (student, tmp_path / "elsewhere")
    ]
    assert torch.equal(*logits)


@pytest.mark.long
def test_a_new_repository_is_private_unless_asked_otherwise(
    hub: FakeHub, online: dict[str, str], student: Path
) -> None:
    for words, private in (((), True), (("--no-private",), False)):
        name = f"ann/private-{private}"
        done("push", student, name, *words, **online)
        assert hub.repositories["model", name].private is private
    made = hub.commits
    done("push", student, "ann/private-False", **online)
    assert hub.commits == made


@pytest.mark.long
def test_a_push_can_be_listed_and_can_go_to_a_folder(student: Path, tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": ""}
    target = tmp_path / "shared" / "small"
    for listed in (
        done("push", student, "ann/small", "--dry-run", **nowhere),
        done("push", student, str(target), "--dry-run", **nowhere),
    ):
        assert listed["files"] == {name: len(data) for name, data in content(student).items()}
    assert not target.parent.exists()
    assert done("push", student, str(target), **nowhere)["bytes"] == listed["bytes"]
    assert content(target) == content(student)
    assert "exists" in refused("push", student, str(target), **nowhere)


def test_a_pushed_job_names_no_folder_of_this_machine(student: Path, tmp_path: Path) -> None:
    private = tmp_path / "käthe's models" / "private"
    job = {
        "teacher": {"model": f"{private}/teacher"},
        "data": {
            "train": [f"{private}/a-*.txt", {"path": "ann/texts"}],
            "validation": ["/n/v.txt"],
        },
        "loss": {"alpha": 0.5},
    }
    card = student / "distillation.json"
    write_json(card, {"job": job, "report": {"teacher": f"{private}/teacher", "steps": 1}})
    before = card.read_bytes()
    push_to_folder(student, tmp_path / "pushed")
    pushed = json.loads((tmp_path / "pushed" / card.name).read_bytes())
    assert pushed["report"] == {"teacher": "teacher", "steps": 1}
    assert pushed["job"]["teacher"] == {"model": "teacher"}
    data = {"train": ["a-*.txt", {"path": "ann/texts"}], "validation": ["v.txt"]}
    assert pushed["job"]["data"] == data
    # Here the names stay: they keep texts from being removed.
    assert card.read_bytes() == before


def test_hidden_files_are_no_weights_of_a_student(student: Path) -> None:
    (student / ".copy").mkdir()
    for path in student.glob("*.safetensors"):
        path.rename(student / ".copy" / path.name)
    with pytest.raises(ModelError, match="holds no weights"):
        push_to_folder(student, None)


@pytest.mark.long
def test_a_student_that_replaces_another_leaves_no_weights_and_no_template_of_it(
    hub: FakeHub, online: dict[str, str], student: Path
) -> None:
    hub.make("model", "ann/small")
    hub.change("model", "ann/small", "model-00002-of-00002.safetensors", b"old")
    hub.change("model", "ann/small", "chat_template.jinja", b"old")
    hub.change("model", "ann/small", "picture.svg", b"<svg/>")
    done("push", student, "ann/small", "--revision", "next", **online)
    assert hub.files("model", "ann/small", "next") == {
        **content(student),
        "picture.svg": b"<svg/>",
    }
    assert "config.json" not in hub.files("model", "ann/small")


@pytest.mark.long
def test_a_cache_goes_to_the_hub_with_its_card_and_comes_back_sound(
    hub: FakeHub, online: dict[str, str], sealed: Path, tmp_path: Path
) -> None:
    done("push", sealed.name[:8], "ann/records", "--home", tmp_path / "home", **online)
    there = hub.files("dataset", "ann/records")
    card = there.pop("README.md").decode()
    assert there == content(sealed)
    facts = yaml.safe_load(card.split("---")[1])
    assert (facts["license"], facts["fingerprint"]) == ("unknown", sealed.name)
    assert "Bytes a token" in card

    home = tmp_path / "other home"
    pulled = done("pull", "ann/records", "--home", home, **online)
    assert Path(pulled["folder"]) == home / "caches" / sealed.name
    assert content(Path(pulled["folder"])) == content(sealed)
    assert verify_cache(Path(pulled["folder"])) == []
    assert sorted(path.name for path in (home / "caches").iterdir() if path.is_dir()) == [
        sealed.name
    ]
    assert done("pull", "ann/records", "--type", "dataset", "--home", home, **online)["reused"]


@pytest.mark.long
def test_a_pulled_cache_trains_the_student_that_the_first_one_trains(
    hub: FakeHub, online: dict[str, str], tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    job = {
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher)},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {"train": str(tiny_text), "sequence_length": 32, "max_train_samples": 8},
        "train": {"max_steps": 2, "batch_size": 4},
        "evaluation": {"continuations": 0, "teacher": False},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    homes = [tmp_path / "here", tmp_path / "elsewhere"]
    done("run", tmp_path / "job.yaml", "--home", homes[0])
    (cache_folder,) = (path for path in (homes[0] / "caches").iterdir() if path.is_dir())
    done("push", cache_folder, "ann/records", **online)
    done("pull", "ann/records", "--home", homes[1], **online)
    finished = kd("run", tmp_path / "job.yaml", "--home", homes[1])
    assert finished.returncode == 0, finished.stderr
    assert json.loads((homes[1] / "runs" / "tiny" / "cache.json").read_text())["reused"]
    weights = [home / "runs" / "tiny" / "student" / "model.safetensors" for home in homes]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("kind", ["student", pytest.param("sealed", marks=pytest.mark.long)])
def test_bytes_go_through_a_xet_store_where_the_hub_has_one(
    kind: str,
    hub: FakeHub,
    online: dict[str, str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    pytest.importorskip("hf_xet")
    folder: Path = request.getfixturevalue(kind)
    online = online | {"HF_HUB_DISABLE_XET": "0", "HF_XET_TELEMETRY_ENABLED": "0"}
    hub.store = tmp_path / "store"
    hub.store.mkdir()
    hub.announce(folder)
    done("push", folder, "ann/stored", **online)
    assert hub.puts.total() == 0
    made = hub.commits
    done("push", folder, "ann/stored", **online)
    assert hub.commits == made
    place = ("--out", tmp_path / "other") if kind == "student" else ("--home", tmp_path / "other")
    pulled = done("pull", "ann/stored", *place, **online)
    assert content(Path(pulled["folder"])) == content(folder)


@pytest.mark.parametrize("kind", [pytest.param("student", marks=pytest.mark.long), "sealed"])
def test_a_push_that_was_killed_sends_only_what_is_missing(
    kind: str,
    hub: FakeHub,
    online: dict[str, str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    folder: Path = request.getfixturevalue(kind)
    if kind == "student":  # of several large files
        for number in range(3):
            (folder / f"part-{number}.bin").write_bytes(os.urandom(1 << 16) + b"\0")
    hub.stall_after_puts = 2
    killed(hub, "push", folder, "ann/cut", **online)
    assert hub.puts.total() == 2
    done("push", folder, "ann/cut", **online)
    assert set(hub.puts.values()) == {1}
    there = hub.files("model" if kind == "student" else "dataset", "ann/cut")
    assert content(folder).items() <= there.items()


@pytest.mark.long
def test_a_cache_or_a_student_whose_push_was_cut_off_is_not_taken_for_whole(
    hub: FakeHub, online: dict[str, str], sealed: Path, student: Path, tmp_path: Path
) -> None:
    done("push", sealed, "ann/records", **online)
    files = content(sealed)
    last = max(files)
    repository = hub.repositories["dataset", "ann/records"]
    del repository.trees[repository.branches["main"][-1]][last]
    pull = ("pull", "ann/records", "--home", tmp_path / "other")
    said = refused(*pull, **online)
    assert "damaged or not complete" in said and "let it finish first" in said
    assert not (tmp_path / "other" / "caches" / sealed.name).exists()

    done("push", sealed, "ann/records", **online)
    hub.served.clear()
    assert content(Path(done(*pull, **online)["folder"])) == files
    assert set(hub.served) == {last}

    hub.make("model", "ann/half")
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    hub.change("model", "ann/half", "config.json", (student / "config.json").read_bytes())
    hub.change("model", "ann/half", "model.safetensors.index.json", json.dumps(index).encode())
    out = tmp_path / "half"
    said = refused("pull", "ann/half", "--out", out, **online)
    assert "model-00002-of-00002.safetensors is missing" in said
    assert not out.exists()


@pytest.mark.long
def test_a_pull_that_was_killed_asks_for_nothing_that_has_arrived(
    hub: FakeHub, online: dict[str, str], student: Path, tmp_path: Path
) -> None:
    (student / "zz.bin").write_bytes(os.urandom(1 << 20) + b"\0")
    done("push", student, "ann/small", **online)
    hub.half = ("zz.bin", "stall")
    out = tmp_path / "elsewhere"
    killed(hub, "pull", "ann/small", "--out", out, **online)
    assert not out.exists()
    arrived = {path.name: path.stat().st_size for path in (tmp_path / ".tmp-elsewhere").glob("*.*")}
    hub.served.clear()
    done("pull", "ann/small", "--out", out, **online)
    assert content(out) == content(student)
    assert arrived
    assert not set(arrived) & set(hub.served)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


@pytest.mark.long
def test_a_download_whose_connection_closes_goes_on_in_the_middle_of_a_file(
    hub: FakeHub, online: dict[str, str], sealed: Path, tmp_path: Path
) -> None:
    done("push", sealed, "ann/records", **online)
    largest = max(content(sealed), key=lambda name: len(content(sealed)[name]))
    hub.half = (largest, "close")
    pulled = done("pull", "ann/records", "--home", tmp_path / "other", **online)
    assert content(Path(pulled["folder"])) == content(sealed)
    assert hub.served[largest] <= 2 * (sealed / largest).stat().st_size


@pytest.mark.long
def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    hub: FakeHub, online: dict[str, str], student: Path
) -> None:
    hub.lose_answer = True
    said = refused("push", student, "ann/small", **online)
    assert "connection" in said and "Run the same command again" in said
    made = hub.commits
    done("push", student, "ann/small", **online)
    assert hub.commits == made


@pytest.mark.long
@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "Private repository storage limit reached"), "Free space on the hub"),
        ((403, "You do not have the rights"), "HF_TOKEN"),
        ((412, "A commit has happened since"), "changed while"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(
    refusal: tuple[int, str],
    words: str,
    hub: FakeHub,
    online: dict[str, str],
    sealed: Path,
) -> None:
    hub.make("dataset", "ann/records")
    hub.refusal = refusal
    said = refused("push", sealed, "ann/records", **online)
    assert refusal[1] in said
    assert words in said


@pytest.mark.long
def test_what_cannot_be_pushed_or_pulled_is_refused(
    hub: FakeHub, online: dict[str, str], sealed: Path, student: Path, tmp_path: Path
) -> None:
    assert "HF_TOKEN" in refused("push", student, "ann/x", **online | {"HF_TOKEN": ""})
    assert "owner/name" in refused("push", student, "no name", **online)
    assert "neither a student nor" in refused("push", sealed.parent, "ann/x", **online)
    assert "neither a folder, nor a run" in refused("push", "nothing", "ann/x", **online)
    assert "HF_HUB_OFFLINE" in refused("push", student, "ann/x", **online | {"HF_HUB_OFFLINE": "1"})
    assert "There is no model ann/none" in refused("pull", "ann/none", **online)
    hub.make("model", "ann/empty")
    assert "holds neither" in refused("pull", "ann/empty", **online)
    assert "no revision" in refused("pull", "ann/empty", "--revision", "v9", **online)
    assert "is public" in refused("push", student, "ann/empty", "--private", **online)
    closed = online | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "connection" in refused("pull", "ann/small", **closed).lower()

    for number, name in enumerate((".git/config", "a/.x/b", "x\0y", "n" * 256, "../up", "a\\b")):
        hub.make("model", f"ann/names{number}")
        hub.change("model", f"ann/names{number}", name, b"x")
        assert "has a file with the name" in refused("pull", f"ann/names{number}", **online), name

    other = make_cache(tmp_path / "home" / "caches", make_identity(train_sequences=3))
    hub.make("dataset", "ann/records")
    hub.change("dataset", "ann/records", "table.csv", b"a,b\n")
    assert "table.csv" in refused("push", other, "ann/records", **online)
    shard = next(
        path for path in sorted(sealed.rglob("*")) if "shards" in path.parts and path.is_file()
    )
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert "damaged" in refused("push", sealed, "ann/damaged", **online)
    assert ("dataset", "ann/damaged") not in hub.repositories
