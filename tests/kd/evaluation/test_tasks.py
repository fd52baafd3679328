"""lm-eval's tasks: run where lm-eval is installed, and a clear message where it is not."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kd.errors import ConfigError
from kd.evaluation.tasks import run_tasks, select_numbers
from kd.models.loading import load_model

here = find_spec("lm_eval") is not None


def test_numbers_are_kept_by_metric_and_filter() -> None:
    results: dict[str, dict[str, Any]] = {
        "arc": {
            "alias": "arc",
            "acc,none": 0.25,
            "acc_stderr,none": 0.1,
            "exact_match,strict": 1,
            "sample_len": 8,
        },
        "other": {"alias": " - other", "acc,none": "N/A", "word_perplexity": 7.5},
    }
    assert select_numbers(results) == {
        "arc": {"acc": 0.25, "acc_stderr": 0.1, "exact_match (strict)": 1.0},
        "other": {"word_perplexity": 7.5},
    }


@pytest.mark.skipif(here, reason="lm-eval is installed")
def test_without_lm_eval_the_remedy_is_named(tiny_teacher: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="not installed") as caught:
        run_tasks(load_model(tiny_teacher, torch.float32), tokenizer, ("arc_easy",), 4)
    assert caught.value.problems[0].pointer == "/evaluation/tasks"
    assert "potstill[eval]" in caught.value.problems[0].remedy


@pytest.mark.skipif(not here, reason="needs lm-eval (pip install 'potstill[eval]')")
@pytest.mark.filterwarnings("ignore")
def test_a_task_of_ones_own_is_run(tiny_teacher: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Multiple choice, where the right answer is first the model's own choice, then another."""
    model = load_model(tiny_teacher, torch.float32).eval()
    texts = ["It is a truth", "Anne Elliot was", "The house had"]
    choices = [" universally", " nobody"]

    @torch.no_grad()
    def score(text: str, choice: str) -> float:
        ids = tokenizer(text)["input_ids"]
        whole = tokenizer(text + choice)["input_ids"]
        logp_LV = model(torch.tensor([whole])).logits[0].log_softmax(1)
        return float(sum(logp_LV[place - 1, whole[place]] for place in range(len(ids), len(whole))))

    best = [max((0, 1), key=lambda number: score(text, choices[number])) for text in texts]
    labels = [best[0], best[1], 1 - best[2]]
    rows = [
        {"text": text, "choices": choices, "label": label}
        for text, label in zip(texts, labels, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "ours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(task))
    found = run_tasks(model, tokenizer, (str(tmp_path / "ours.yaml"),), 2)
    assert found["ours"]["acc"] == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="knows no task 'nonesuch'"):
        run_tasks(model, tokenizer, ("nonesuch",), 2)
