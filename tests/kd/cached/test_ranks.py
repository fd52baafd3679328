"""The trainer on two ranks has the losses of one process that reads the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments

from bench.support.paths import ROOT
from bench.support.small.caches import make_cache, make_codec, make_identity
from bench.support.waiting import PATIENCE_SECONDS
from kd.cached.opening import open_cache
from kd.cached.trainer import CachedDistillationTrainer
from tests.support.kd.own_loops import LENGTH, VOCABULARY
from tests.support.kd.students import make_llama

STEPS = 6

PROGRAM = f"""
import json, os, sys
from pathlib import Path
from transformers import TrainingArguments
from kd.cached.opening import open_cache
from kd.cached.trainer import CachedDistillationTrainer
from tests.support.kd.students import make_llama

folder, out = sys.argv[1:]
args = TrainingArguments(
    out, max_steps={STEPS}, per_device_train_batch_size=2, learning_rate=1e-3,
    lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=1, max_grad_norm=0.0,
)
opened = open_cache(folder)
trainer = CachedDistillationTrainer(make_llama({VOCABULARY}), args, opened=opened)
assert trainer.accelerator.num_processes == 2
trainer.train()
if trainer.is_world_process_zero():
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    Path(out, "losses.json").write_text(json.dumps(losses))
# As kd.rank ends: threads of gloo that still run while Python ends can abort the process
# (https://github.com/pytorch/pytorch/pull/179291).
trainer.accelerator.wait_for_everyone()
os._exit(0)
"""


@pytest.mark.long
def test_two_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, make_identity(VOCABULARY, LENGTH, 24, 4, make_codec()))
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "out").mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(folder), str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "losses.json").read_text(encoding="utf-8"))

    args = TrainingArguments(
        str(tmp_path / "alone"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_grad_norm=0.0,
    )
    alone = CachedDistillationTrainer(make_llama(VOCABULARY), args, opened=open_cache(folder))
    alone.train()
    expected = [line["loss"] for line in alone.state.log_history if "loss" in line]
    assert found == pytest.approx(expected, abs=1e-5)
