"""A job whose student has another tokenizer, from POST /jobs to a student, with a killed worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bench.support.paths import AUSTEN
from bench.support.waiting import wait_until
from kd.config.jobfile import parse_config
from kd.files import read_json
from kd.pipeline import run_stages
from kd.progress import SILENT
from tests.support.kd.tiny import make_tiny_job
from tests.support.kd.tokenizers import train_fallback
from tests.support.services.runs import MakeParts

#: The child of a real worker.
CHILD = "services.worker.stage_child"


@pytest.mark.long
def test_a_job_with_another_tokenizer_survives_a_kill_of_its_worker(
    new_parts: MakeParts, tiny_text: Path, tmp_path: Path
) -> None:
    """The second worker goes on from a checkpoint, and the student is that of one attempt."""
    train_fallback().save_pretrained(tmp_path / "own")
    teacher = AUSTEN / "teacher"
    parts = new_parts(
        child_module=CHILD,
        forked=False,
        lease_seconds=15.0,
        silence_seconds=120.0,
        data_roots=[teacher, tiny_text.parent, tmp_path],
    )
    parts.start_api()
    worker = parts.start_worker()
    steps = {"max_steps": 300, "save_steps": 10, "eval_steps": 300, "precision": "fp32"}
    job = make_tiny_job(teacher, tiny_text, train=steps, loss={"tokenizers": "projected"})
    job["student"] = {"init": {"layers": 1, "hidden_size": 16, "tokenizer": str(tmp_path / "own")}}
    job["evaluation"] = {"continuations": 0, "samples": 0}
    response = parts.http.post("/jobs", json=job)
    assert response.status_code == 202, response.text
    job_id = response.json()["id"]
    run_dir = parts.settings.run_dir(job_id)
    wait_until(lambda: any((run_dir / "checkpoints").glob("*")), 120)
    worker.kill()
    parts.start_worker()
    done = parts.wait_for(job_id, "succeeded", "failed", seconds=240)
    assert done.status == "succeeded", done.error
    assert done.attempt == 2
    report = read_json(run_dir / "report.json")
    assert report["tokenizers"] == "projected" and report["student_bits_per_byte"] > 0
    run_stages(parse_config(job), tmp_path / "home", tmp_path / "home" / "runs" / "x", SILENT)
    ours = load_file(run_dir / "student" / "model.safetensors")
    theirs = load_file(tmp_path / "home" / "runs" / "x" / "student" / "model.safetensors")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    saved = AutoTokenizer.from_pretrained(run_dir / "student")
    assert saved.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "own").get_vocab()
