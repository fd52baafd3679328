"""A job with a teacher behind a server, and one that reads a context, in other tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.support.paths import AUSTEN
from tests.support.kd.students import save_teacher
from tests.support.kd.teachers.several import make_several_job
from tests.support.kd.tokenizers import train_fallback

#: The teacher that is served, and the rows of its vocabulary.
SERVED = AUSTEN / "teacher"
VOCABULARY = 2048


def make_job_of_every_kind(folder: Path, url: str, student: Path, method: str) -> dict[str, Any]:
    """Make the job, and in ``folder`` the second teacher and two texts of rows.

    ``student`` is the folder of the student's tokenizer, ``method`` is loss.tokenizers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    other = save_teacher(
        folder / "other", train_fallback(), 32, max_position_embeddings=512, initializer_range=0.4
    )
    words = (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[2000:14000]
    rows = [
        {"text": words[start : start + 200], "by": f"It is written by {start} authors."}
        for start in range(0, len(words), 200)
    ]
    for name, part in (("served", rows[::2]), ("context", rows[1::2])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    sources = [
        {"path": str(folder / f"{name}.jsonl"), "teacher": name} for name in ("served", "context")
    ]
    job = make_several_job(
        {"context": other}, sources, cache={"k": 32}, loss={"tokenizers": method}
    )
    job["student"]["init"]["tokenizer"] = str(student)
    job["data"] |= {"sequence_length": 64, "packing": False}
    job["teachers"]["context"] |= {"context": "{by}", "max_length": 128}
    job["teachers"]["served"] = {
        "backend": "http", "model": "teacher", "url": url, "tokenizer": str(SERVED),
        "proposal": str(SERVED), "concurrency": 2,
    }  # fmt: skip
    return job
