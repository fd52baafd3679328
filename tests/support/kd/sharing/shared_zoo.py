"""A rank that compares teachers which two processes share with those of one process.

torchrun starts it through ``kd.parallel.launch``. The order's configuration has ``parallel``,
``names`` of models in the zoo and ``folder``, where the models are saved by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kd.config.teacher import TeacherConfig
from kd.models.attention.isolation import isolate_documents
from kd.models.distributed.following import follow
from kd.models.distributed.leading import leading
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_teacher
from kd.models.teacher_files import TeacherFiles
from kd.parallel.group import Group, join_group, leave_group
from kd.parallel.launch import RankOrder
from kd.progress import Monitor
from kd.rank import run_rank
from kd.text.packed_rows import PackedRows
from tests.support.kd.zoo import LEAKS, VOCABULARY, some_tokens

CPU = torch.device("cpu")
PACKED = PackedRows.of(torch.tensor([[*range(5), *range(7)]] * 2))


def work(order: RankOrder, _: Monitor) -> dict[str, Any]:
    """Compare the models of the order, or follow rank 0."""
    torch.set_num_threads(1)
    group = join_group()
    found = compare_all(group, order.config)
    leave_group(group)
    return found


def compare_all(group: Group, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what ``compare`` finds of each model."""
    if not group.leads:
        follow()
        return {}
    with leading():
        return {
            name: compare(Path(asked["folder"]) / name, asked["parallel"], name not in LEAKS)
            for name in asked["names"]
        }


@torch.no_grad()
def compare(folder: Path, parallel: Any, packs: bool) -> dict[str, Any]:
    """Return relative differences of hidden states, logits and packed rows, and the share held."""
    models = [
        load_teacher(TeacherFiles(TeacherConfig(model=str(folder), parallel=each), folder), CPU)
        for each in ("none", parallel)
    ]
    states = [compute_hidden_states(each, some_tokens()) for each in models]
    heads = [find_lm_head(each, VOCABULARY) for each in models]
    found = {
        "hidden": measure(*states),
        "logits": measure(*(head.compute_logits(states[0][0]) for head in heads)),
        "held": count_held(models[1]) / count_held(models[0]),
    }
    if packs:
        for each in models:
            isolate_documents(each)
        found["packed"] = measure(
            *(compute_hidden_states(each, some_tokens(), PACKED) for each in models)
        )
    return found


def measure(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest number."""
    return float((got - expected).abs().max() / expected.abs().max())


def count_held(model: PreTrainedModel) -> int:
    """Count the numbers of the body's parameters that this process holds."""
    body = model.base_model.parameters()
    return sum(getattr(each, "to_local", lambda each=each: each)().numel() for each in body)


if __name__ == "__main__":
    run_rank(work)
