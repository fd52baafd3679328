"""A confined job reads only a dataset's own files, and does not even look at others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml

from kd.config.data import DataConfig, DatasetSpec
from kd.config.jobfile import parse_config
from kd.errors import DataError, Problem
from kd.preflight.confinement import confined_datasets, find_confinement_problems
from kd.preflight.dataset_files import (
    QUICK_BYTES,
    check_builder,
    find_foreign_file,
    leads_out,
    opens_files,
)
from kd.preflight.limits import Confinement
from kd.text.sources import read_documents
from services.worker import stage_child
from services.worker.stage_messages import Order

pytestmark = pytest.mark.usefixtures("hub_caches")

OWN = "Its own text."
SECRET = "Not for everybody."


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """root/set is a dataset without a card; no job may read outside/secret.jsonl."""
    for folder in ("root/set", "root/home", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "root/set/train.jsonl", OWN)
    write(tmp_path / "outside/secret.jsonl", SECRET)
    return tmp_path / "root"


@pytest.fixture
def limits(root: Path) -> Confinement:
    return Confinement(home=root / "home", roots=(root,), denied=(root / "keys.jsonl",))


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_card(folder: Path, data_files: Any, name: str = "README.md", **more: Any) -> None:
    """Write a card for the dataset in ``folder`` that names ``data_files``."""
    card = yaml.safe_dump(
        {"configs": [{"config_name": "default", "data_files": data_files, **more}]}
    )
    (folder / name).write_text(
        f"---\n{card}---\n# Text\n" if name.endswith(".md") else card, encoding="utf-8"
    )


def job(folder: Path, **data: Any) -> Any:
    return parse_config(
        {
            "teacher": {"model": "org/model"},
            "student": {"init": {"layers": 1, "hidden_size": 32}},
            "data": {"train": {"path": str(folder)}, **data},
            "train": {"max_steps": 1},
        }
    )


def refused_at_post(folder: Path, limits: Confinement) -> list[Problem]:
    return find_confinement_problems(job(folder), folder.parent, limits)


def read(
    folder: Path | str, limits: Confinement | None, streaming: bool = False, **spec: Any
) -> list[str]:
    """Return the texts that a process confined to ``limits`` reads."""
    options = DataConfig(train="unused", streaming=streaming, max_train_samples=9)
    # As in a worker's process, which is sent the limits as JSON.
    sent = None if limits is None else limits.to_order(job(Path(folder)), Path())
    with confined_datasets(None if sent is None else Confinement.from_order(sent)):
        source = DatasetSpec(path=str(folder), **spec)
        return [content for _, content in read_documents((source,), "train", options)]


def refusal(folder: Path | str, limits: Confinement, streaming: bool = False) -> str:
    with pytest.raises(DataError) as caught:
        read(folder, limits, streaming)
    assert caught.value.remedy and SECRET not in str(caught.value)
    return str(caught.value)


STREAMED_OR_NOT = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])

OUTSIDE: dict[str, Callable[[Path], Any]] = {
    "absolute": lambda outside: f"{outside}/secret.jsonl",
    "a pattern": lambda outside: f"{outside}/*.jsonl",
    "upwards": lambda _: "../../outside/secret.jsonl",
    "upwards from a folder": lambda _: "deep/../../../outside/*",
    "one of several": lambda outside: ["train.jsonl", f"{outside}/secret.jsonl"],
    "of another split": lambda outside: [
        {"split": "train", "path": "train.jsonl"},
        {"split": "test", "path": ["train.jsonl", f"{outside}/secret.jsonl"]},
    ],
    "by a URL of a file": lambda outside: f"file://{outside}/secret.jsonl",
    "by a chain": lambda outside: f"simplecache::{outside}/secret.jsonl",
    "an archive": lambda outside: f"zip://*.jsonl::{outside}/secret.zip",
    "a host": lambda _: "http://127.0.0.1:9/secret.jsonl",
    "the hub": lambda _: "hf://datasets/org/other@main/secret.jsonl",
}


@STREAMED_OR_NOT
@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("where", OUTSIDE)
def test_a_card_that_names_files_elsewhere_is_refused_at_post_and_where_they_are_read(
    root: Path, limits: Confinement, where: str, name: str, streaming: bool
) -> None:
    (root / "set/deep").mkdir()
    write_card(root / "set", OUTSIDE[where](root.parent / "outside"), name)
    (problem,) = refused_at_post(root / "set", limits)
    assert (
        problem.pointer == "/data/train/0/path"
        and f"in its {name}, which jobs may not" in problem.detail
    )
    assert "relative to its folder" in problem.remedy
    assert f"in its {name}, which jobs may not" in refusal(root / "set", limits, streaming)


@pytest.mark.parametrize("link", ["set", "README.md", ".huggingface.yaml"])
def test_a_card_or_folder_that_was_turned_elsewhere_is_not_read(
    root: Path, limits: Confinement, link: str
) -> None:
    outside = root.parent / "outside"
    if link == "set":
        (root / "set").rename(root / "moved")
        (root / "set").symlink_to(outside)
    else:
        (outside / link).write_text(f"{SECRET}: [", encoding="utf-8")
        (root / "set" / link).symlink_to(outside / link)
    assert f"includes {link!r}" in refusal(root / "set", limits)


def test_a_folder_of_files_elsewhere_is_refused(root: Path, limits: Confinement) -> None:
    for number, data_dir in enumerate(("../../outside", str(root.parent / "outside"))):
        write_card(root / "set", "*.jsonl", data_dir=data_dir)
        assert len(refused_at_post(root / "set", limits)) == 1, number
        assert data_dir in refusal(root / "set", limits)


@STREAMED_OR_NOT
def test_the_files_are_asked_too_where_the_card_was_not(
    root: Path, limits: Confinement, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """A card may be written after the check at POST."""
    write_card(root / "set", f"{root.parent}/outside/secret.jsonl")
    monkeypatch.setattr("kd.preflight.dataset_files.check_cards", lambda *_: None)
    assert "includes" in refusal(root / "set", limits, streaming)


@STREAMED_OR_NOT
@pytest.mark.parametrize("link", ["train-2.jsonl", "deep", "README.md"])
def test_a_link_that_leads_out_is_refused(
    root: Path, limits: Confinement, link: str, streaming: bool
) -> None:
    outside = root.parent / "outside"
    write_card(outside, f"{outside}/secret.jsonl")
    target = {
        "train-2.jsonl": outside / "secret.jsonl",
        "deep": outside,
        "README.md": outside / "README.md",
    }[link]
    (root / "set" / link).symlink_to(target)
    if link == "deep":  # a pattern of the library's own does not follow it
        write_card(root / "set", "deep/*.jsonl")
    (problem,) = refused_at_post(root / "set", limits)
    assert problem.pointer == "/data/train/0/path" and "includes" in problem.detail
    assert "includes" in refusal(root / "set", limits, streaming)


@pytest.mark.parametrize("file", ["keys.jsonl", ".hidden.jsonl", "home/logs.jsonl"])
def test_what_no_job_may_read_of_a_root_no_dataset_takes_in(
    root: Path, limits: Confinement, file: str
) -> None:
    write(root / file, SECRET)
    write_card(root / "set", str(root / file))
    assert len(refused_at_post(root / "set", limits)) == 1
    assert "which jobs may not read" in refusal(root / "set", limits)


@STREAMED_OR_NOT
def test_a_dataset_that_holds_its_files_is_read(
    root: Path, limits: Confinement, streaming: bool
) -> None:
    assert refused_at_post(root / "set", limits) == []
    assert read(root / "set", limits, streaming) == [OWN]
    (root / "set/deep").mkdir()
    write(root / "set/deep/b.jsonl", "In a folder.")
    write(root / "beside.jsonl", "Beside it.")
    (root / "set/linked.jsonl").symlink_to("../beside.jsonl")
    for named, expected in (
        ("deep/*.jsonl", "In a folder."),
        ([{"split": "train", "path": ["linked.jsonl"]}], "Beside it."),
        (str(root / "beside.jsonl"), "Beside it."),  # a job might name it itself
    ):
        write_card(root / "set", named)
        assert refused_at_post(root / "set", limits) == []
        assert read(root / "set", limits, streaming) == [expected]


@STREAMED_OR_NOT
def test_a_saved_dataset_is_read_from_its_own_files_alone(
    root: Path, limits: Confinement, streaming: bool
) -> None:
    saved = datasets.Dataset.from_dict({"text": [OWN]})
    saved.save_to_disk(root / "saved")
    assert refused_at_post(root / "saved", limits) == []
    assert read(root / "saved", limits, streaming) == [OWN]
    datasets.Dataset.from_dict({"text": [SECRET]}).save_to_disk(root.parent / "outside/saved")
    (foreign,) = (root.parent / "outside/saved").glob("*.arrow")
    state = json.loads((root / "saved/state.json").read_text())
    for name in (str(foreign), f"../../outside/saved/{foreign.name}"):
        for field in ("_data_files", "_indices_data_files"):
            changed = state | {field: [{"filename": name}]}
            (root / "saved/state.json").write_text(json.dumps(changed))
            assert "state.json, which jobs may not read" in refusal(root / "saved", limits)
    (root / "saved/state.json").write_text(json.dumps(state))
    (own,) = (root / "saved").glob("*.arrow")
    own.unlink()
    own.symlink_to(foreign)
    assert "which jobs may not read" in refusal(root / "saved", limits)
    assert refused_at_post(root / "saved", limits) != []
    (root / "saved/dataset_dict.json").write_text('{"splits": ["../../outside/saved"]}')
    own.unlink()
    assert "dataset_dict.json, which jobs may not read" in refusal(root / "saved", limits)


def test_splits_and_configurations_are_told_apart_as_ever(root: Path, limits: Confinement) -> None:
    write(root / "set/test.jsonl", "One.", "Two.")
    assert read(root / "set", limits, split="test") == ["One.", "Two."]
    assert read(root / "set", limits, split="test[1:]") == ["Two."]
    with pytest.raises(DataError, match="cannot be loaded"):
        read(root / "set", limits, split="dev")


def test_who_is_free_reads_whatever_a_dataset_names(root: Path, limits: Confinement) -> None:
    write_card(root / "set", f"{root.parent}/outside/secret.jsonl")
    free = replace(limits, free_datasets=True)
    assert refused_at_post(root / "set", free) == []
    assert read(root / "set", free) == [SECRET]
    assert read(root / "set", None) == [SECRET]


def test_the_copy_of_a_folder_of_the_same_name_is_not_read(root: Path, limits: Confinement) -> None:
    """The library names its copies by the folder's last name and the card's patterns."""
    for folder, text in ((root.parent / "outside/set", SECRET), (root / "set", OWN)):
        folder.mkdir(exist_ok=True)
        write(folder / "train.jsonl", text)
        write_card(folder, "train.jsonl")
    assert read(root.parent / "outside/set", None) == [SECRET]
    assert read(root / "set", limits) == [OWN]


@pytest.mark.parametrize("version", ["../../../../../out", "{root}/out"])
def test_a_version_is_no_way_out_of_the_library_s_cache(
    root: Path, limits: Confinement, version: str
) -> None:
    write_card(root / "set", "train.jsonl", version=version.format(root=root))
    assert "leads out of the library's cache" in refusal(root / "set", limits)
    assert not (root / "out").exists()


@pytest.mark.long
def test_a_card_that_cannot_be_read_is_refused_and_a_long_one_is_read_later(
    root: Path, limits: Confinement
) -> None:
    for bad in (
        "---\na: [\n---\n",
        "---\n- a\n---\n",
        "---\nconfigs: 5\n---\n",
        "---\na: " + "[" * 5000 + "\n---\n",
    ):
        (root / "set/README.md").write_text(bad, encoding="utf-8")
        (problem,) = refused_at_post(root / "set", limits)
        assert "README.md that cannot be read" in problem.detail and problem.remedy
    write_card(root / "set", f"{root.parent}/outside/secret.jsonl", description="x" * QUICK_BYTES)
    assert refused_at_post(root / "set", limits) == []
    assert "in its README.md" in refusal(root / "set", limits)


def test_aliases_that_multiply_cost_nothing(root: Path, limits: Confinement) -> None:
    lines = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
    ]
    card = "\n".join([*lines, "configs: [{config_name: a, data_files: *a11}]"])
    for name, text in ((".huggingface.yaml", card), ("README.md", f"---\n{card}\n---\n")):
        (root / "set" / name).write_text(text, encoding="utf-8")
        # Nine to the power of eleven strings would fit into no memory.
        assert refused_at_post(root / "set", limits) == []


# Patterns, formats and columns


@pytest.mark.parametrize(
    "pattern", ["a.jsonl", "data/*.parquet", "**", "a..b/c", "~/x", "data/{a,b}", "a:b"]
)
def test_plain_patterns_stay(pattern: str) -> None:
    assert not leads_out(pattern, lambda _: False)


@pytest.mark.parametrize(
    "pattern", ["..", "a/../b", "/a", "http://a/b", "zip://a::b", "gzip::a", "file:///a", "s3://a"]
)
def test_others_lead_out(pattern: str) -> None:
    assert leads_out(pattern, lambda _: False)


BASE = "hf://datasets/org/set@" + "0" * 40


@pytest.mark.parametrize(
    "file", [f"{BASE}/train.jsonl", f"{BASE}/a/b.parquet", "hf://datasets/org/set@main/x"]
)
def test_a_dataset_of_the_hub_may_take_in_its_own_files(limits: Confinement, file: str) -> None:
    assert find_foreign_file([file], "org/set", limits) is None


@pytest.mark.parametrize(
    "file",
    [
        "/tmp/secret.txt",
        "{root}/set/train.jsonl",
        "file:///tmp/secret.txt",
        "hf://datasets/org/other@main/x",
        "hf://datasets/org/set-2@main/x",
        "hf://datasets/org/set/x",
        "hf://buckets/org/set@main/x",
        f"{BASE}/../../other@main/x",
        f"{BASE}/x.zip::/tmp/secret.txt",
        f"zip://x::{BASE}/x.zip",
        "https://huggingface.co/datasets/org/set/resolve/main/x",
        "http://169.254.169.254/x",
    ],
)
def test_and_no_others(root: Path, limits: Confinement, file: str) -> None:
    file = file.format(root=root)
    assert find_foreign_file([f"{BASE}/train.jsonl", file], "org/set", limits) == file


@pytest.mark.parametrize(
    "file", ["zip://x::{root}/x.zip", "file://{root}/x", "http://h/x", "hf://datasets/a/b@c/d"]
)
def test_a_dataset_in_a_folder_takes_in_no_url_whatever_host_is_allowed(
    root: Path, limits: Confinement, file: str
) -> None:
    file = file.format(root=root)
    allowed = replace(limits, hosts=("h", "datasets"))
    assert find_foreign_file([str(root / "set/train.jsonl"), file], None, allowed) == file
    assert find_foreign_file([str(root / "set/train.jsonl")], None, allowed) is None


def test_the_card_of_the_hub_is_asked_before_the_library_looks(
    root: Path, limits: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the hub, because a test cannot upload such a card."""
    write_card(
        root, f"{root}/set/*.jsonl"
    )  # on the hub, even what a job might name itself is not the dataset's
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(root / "README.md"))
    monkeypatch.setattr(
        "datasets.load_dataset_builder", lambda *_, **__: pytest.fail("it was asked")
    )
    assert "in its README.md, which jobs may not read" in refusal("evil/set", limits)


def test_an_id_that_is_nowhere_is_said_as_ever(
    limits: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network the hub's library asks again and again for a minute, so it is told."""
    for place in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", True)
    assert "cannot be loaded" in refusal("nobody/nothing", limits)


def builder(name: str = "json", repo_id: str | None = None, cache_dir: str = "/c/x") -> Any:
    config = SimpleNamespace(data_files=None)
    return SimpleNamespace(name=name, repo_id=repo_id, cache_dir=cache_dir, config=config)


def test_formats_whose_files_name_others_are_refused(limits: Confinement) -> None:
    def find_reason(asked: Any) -> str | None:
        reason = check_builder(asked, Path("/c"), limits)
        return reason and reason[0]

    assert find_reason(builder()) is None and find_reason(builder("cache", "org/set")) is None
    assert "not on the hub" in str(find_reason(builder("cache", "set")))
    for name in ("hdf5", "lance", "iceberg", "imagefolder", "pandas", "vortex", "webdataset"):
        assert "whose files may name others" in str(find_reason(builder(name)))
    assert "cache" in str(find_reason(builder(cache_dir="/c/../d")))


@STREAMED_OR_NOT
def test_a_column_that_is_decoded_from_files_is_refused(
    root: Path, limits: Confinement, streaming: bool
) -> None:
    from datasets import Features, Image, Value

    features = Features({"text": Value("string"), "shown": Image()})
    rows = pa.table(
        {
            "text": [OWN],
            "shown": [{"bytes": None, "path": str(root.parent / "outside/secret.jsonl")}],
        }
    )
    (root / "set/train.jsonl").unlink()
    parquet.write_table(rows.cast(features.arrow_schema), root / "set/train.parquet")
    assert read(root / "set", limits, streaming) == [OWN]  # the other column is not decoded
    write_card(root / "set", "train.parquet")
    assert "the column 'shown', which is decoded" in refusal(root / "set", limits, streaming)


def test_only_such_columns_are() -> None:
    from datasets import Audio, ClassLabel, Features, Image, Json, List, Translation, Value

    plain = {
        "a": Value("string"),
        "b": [{"role": Value("string")}],
        "c": List(Value("int8")),
        "d": ClassLabel(2),
    }
    assert not opens_files(Features(plain | {"e": Json(), "f": Translation(["de", "fr"])}))
    for feature in (Image(), Audio(), List(Image()), {"a": {"b": Audio()}}, [Image()]):
        assert opens_files(Features({"x": feature}))


# In the process that runs a job


def test_the_process_that_runs_a_job_is_held_to_its_order(
    root: Path, limits: Confinement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a card that is written while the stage runs."""
    monkeypatch.chdir(root)
    sent: list[Any] = []

    def stage(_: str, config: Any, *__: Any) -> dict[str, Any]:
        write_card(root / "set", f"{root.parent}/outside/secret.jsonl")
        return {
            "texts": [
                content for _, content in read_documents(config.data.train, "train", config.data)
            ]
        }

    def run(order: dict[str, Any] | None) -> Any:
        (root / "set/README.md").unlink(missing_ok=True)
        whole = Order("train", plain, "/h", str(root / "run"), 600, confinement=order)
        stage_child.attempt_stage(
            stage, whole, SimpleNamespace(send=sent.append), threading.Event()
        )
        return sent[-1].data

    config = job(root / "set")
    plain = config.model_dump(mode="json", exclude_unset=True)
    failure = run(limits.to_order(config, Path()))
    assert (
        failure["type"] == "data_error"
        and "in its README.md, which jobs may not read" in failure["detail"]
    )
    assert run(None) == {"texts": [SECRET]}
