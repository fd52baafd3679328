"""One job has teachers of every kind: served and local, with a context, of other tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.files import read_json
from kd.pipeline import run_stages
from kd.progress import Event, Monitor
from tests.support.kd.teachers.every_kind import SERVED, VOCABULARY, make_job_of_every_kind
from tests.support.kd.tokenizers import train_kind
from tests.support.remote_server import RemoteServer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("method", "tokenizer"), [("projected", "served"), ("projected", "third"), ("alm", "third")]
)
def test_a_student_learns_from_a_served_teacher_and_from_one_with_a_context_and_other_tokens(
    tmp_path: Path, method: str, tokenizer: str
) -> None:
    """The student has the tokens of the served teacher, or those of neither."""
    student = SERVED
    if tokenizer == "third":
        student = tmp_path / "third"
        train_kind("Llama 3").save_pretrained(student)
    events = list[Event]()
    with RemoteServer(SERVED, VOCABULARY) as server:
        job = make_job_of_every_kind(tmp_path / "files", server.url, student, method)
        made = run_stages(parse_config(job), tmp_path, tmp_path / "run", Monitor(events.append))
    found = [open_cache(tmp_path / "caches" / name) for name in made.cache["fingerprints"]]
    sizes = {each.identity.tokenizer.vocabulary_size for each in found}
    assert VOCABULARY in sizes and len(sizes) == 2
    served = [each for each in found if each.identity.teacher.server]
    assert len(served) == 1
    (context,) = (each for each in found if each not in served)
    assert context.identity.data.context_sha256
    report = read_json(tmp_path / "run" / "report.json")
    assert report["domains"].keys() == {"served", "context"}
    assert all(domain["tokens"] > 0 for domain in report["domains"].values())
    losses = [each.data["loss"] for each in events if each.type == "metrics"]
    assert losses[-1] < losses[0]
