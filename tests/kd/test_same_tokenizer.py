"""A student whose tokenizer numbers rare tokens otherwise is refused at every door."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.errors import TokenizerMismatch
from kd.examine import ExaminedModel, examine
from kd.models.loading import build_student
from kd.models.tokenizers import PROBE_TEXTS, encode_probes, load_tokenizer
from kd.overfit_check import check_overfitting
from kd.pipeline import run_stages
from kd.preflight.problems import Folders, find_problems
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from tests.support.kd.tokenizers import exchange_ids, list_rare_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

Job = dict[str, Any]


class Captured:
    """A sealed cache, and a student whose tokenizer differs where its text does not reach."""

    def __init__(self, teacher: Path, text: Path, tokenizer: Any, home: Path) -> None:
        self.home = home
        self.student = home / "student"
        self.job: Job = {
            "name": "tiny",
            "teacher": {"model": str(teacher)},
            "student": {"model": str(self.student)},
            "data": {
                "train": str(text), "validation_fraction": 0.1, "sequence_length": 32,
                "max_train_samples": 8, "max_eval_samples": 3,
            },
            "train": {"max_steps": 1, "batch_size": 4, "learning_rate": 1e-2},
        }  # fmt: skip
        config = parse_config(self.job | {"student": {"init": {"layers": 1, "hidden_size": 16}}})
        (home / "made").mkdir()
        self.fingerprint = run_precompute(config, home, home / "made", SILENT).cache["fingerprint"]
        build_student(config.student, tokenizer, 32).save_pretrained(self.student)
        (pair,) = list_rare_tokens(tokenizer, 1, text.read_text(encoding="utf-8"))
        exchange_ids(tokenizer, self.student, [pair])
        self.ids = sorted(tokenizer.convert_tokens_to_ids(list(pair)))
        self.line = "2 id(s) with other tokens: " + "; ".join(
            f"id {number}: expected {tokenizer.convert_ids_to_tokens(number)!r}, got "
            f"{load_tokenizer(self.student).convert_ids_to_tokens(number)!r}"
            for number in self.ids
        )

    def train(self) -> Any:
        """The job that trains the student from the cache by name."""
        return parse_config(
            self.job | {"kind": "train", "cache": {"fingerprint": self.fingerprint}, "data": {}}
        )


@pytest.fixture(scope="module")
def captured(
    tiny_teacher: Path, tiny_text: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Captured:
    return Captured(tiny_teacher, tiny_text, tokenizer, tmp_path_factory.mktemp("home"))


def test_no_probe_of_the_cache_shows_the_difference(captured: Captured, tokenizer: Any) -> None:
    store = open_cache(captured.home / "caches" / captured.fingerprint)
    other = load_tokenizer(captured.student)
    texts = [probe.text for probe in store.manifest.provenance.probes]
    assert encode_probes(other, texts) == store.manifest.provenance.probes
    assert len(texts) == len(PROBE_TEXTS) + 1
    assert store.manifest.token_map.bytes < 25_000


def test_a_job_file_is_refused_before_it_runs(captured: Captured) -> None:
    (problem,) = find_problems(captured.train(), Folders(Path(), captured.home, opened=True))
    assert problem.pointer == "/student/model" and captured.line in problem.detail


def test_the_run_and_the_check_of_a_job_compare_all_ids(captured: Captured, tmp_path: Path) -> None:
    for attempt in (
        lambda: run_stages(captured.train(), captured.home, tmp_path),
        lambda: check_overfitting(captured.train(), captured.home),
    ):
        with pytest.raises(TokenizerMismatch) as caught:
            attempt()
        assert captured.line in caught.value.detail
        assert "The student's tokenizer is not the cache's." in caught.value.detail


def test_before_a_capture_the_student_is_compared_with_the_teacher(
    captured: Captured, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerMismatch) as caught:
        run_stages(parse_config(captured.job), tmp_path, tmp_path / "run")
    assert captured.line in caught.value.detail and not (tmp_path / "caches").exists()


@pytest.mark.parametrize("by_name", [True, False])
def test_an_examined_model_is_compared_with_cache_and_teacher(
    captured: Captured, tmp_path: Path, by_name: bool
) -> None:
    fresh = {"init": {"layers": 1, "hidden_size": 16}}
    named = {"kind": "train", "cache": {"fingerprint": captured.fingerprint}, "data": {}}
    config = parse_config(captured.job | {"student": fresh} | (named if by_name else {}))
    target = ExaminedModel(captured.student, None)
    with pytest.raises(TokenizerMismatch) as caught:
        examine(config, target, captured.home, tmp_path)
    whose = "The model's tokenizer is not the cache's" if by_name else "is not that of"
    assert captured.line in caught.value.detail and whose in caught.value.detail


def test_other_rules_are_refused_at_every_door_by_a_word_of_the_text(
    captured: Captured, tokenizer: Any, tiny_text: Path, tmp_path: Path
) -> None:
    student = tmp_path / "student"
    shutil.copytree(captured.student, student)
    tokenizer.save_pretrained(student)
    word = tiny_text.read_text(encoding="utf-8")[:2000].split()[40]
    path = student / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "Replace", "pattern": {"String": word}, "content": "Zounds"}
    path.write_text(json.dumps(content), encoding="utf-8")
    other = captured.job | {"student": {"model": str(student)}}
    said = rf"other rules \(normalizer\): {re.escape(repr(word))[:-1]}.* becomes"
    (problem,) = find_problems(parse_config(other), Folders(Path(), tmp_path, opened=True))
    assert problem.pointer == "/student/model" and re.search(said, problem.detail)
    with pytest.raises(TokenizerMismatch, match=said):
        run_stages(parse_config(other), tmp_path, tmp_path / "run")
    named = {"kind": "train", "cache": {"fingerprint": captured.fingerprint}, "data": {}}
    doors = Folders(Path(), captured.home, opened=True)
    (problem,) = find_problems(parse_config(other | named), doors)
    assert re.search(said, problem.detail)
