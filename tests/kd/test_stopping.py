"""A stop is heard inside every long part of a run, and what was done before it is kept.

Each test counts the work that is done after the request, not the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoTokenizer, PreTrainedModel

from cache.checking.verify import verify_cache
from cache.store import open_cache
from kd.config.data import DataConfig
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.exchange.exporting import export_records
from kd.models.folder import compute_fingerprint
from kd.pipeline import run_stage, run_stages
from kd.progress import Event, Monitor
from kd.search.trials import TrialMonitor
from kd.text.corpus import load_corpus
from kd.training.checkpoint import list_checkpoints
from tests.support.kd.training import read_history

pytestmark = pytest.mark.usefixtures("one_thread")

Job = dict[str, Any]


class Stopper:
    """Asks for a stop from the moment when ``when`` says so, and counts passes after it."""

    def __init__(self, when: Callable[[Event], bool]) -> None:
        self.events: list[Event] = []
        self.when = when
        self.asked = False
        self.passes = 0
        self.monitor = Monitor(self._listen, lambda: self.asked)

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        self.asked = self.asked or self.when(event)

    def count(self, module: nn.Module, inputs: Any) -> None:
        """Count a forward pass of a whole model after the request."""
        self.passes += self.asked and isinstance(module, PreTrainedModel)

    def list_types(self) -> list[str]:
        return [event.type for event in self.events]


@pytest.fixture
def counting() -> Iterator[Callable[[Stopper], Stopper]]:
    handles = []

    def count(stopper: Stopper) -> Stopper:
        handles.append(register_module_forward_pre_hook(stopper.count))
        return stopper

    yield count
    for handle in handles:
        handle.remove()


def at_phase(phase: str) -> Callable[[Event], bool]:
    return lambda event: event.type == "stage" and str(event.data.get("phase")) == phase


def at_type(type: str) -> Callable[[Event], bool]:
    return lambda event: event.type == type


def at_step(step: int) -> Callable[[Event], bool]:
    """The training step, of the four of the job."""
    return lambda event: (
        event.type == "progress" and event.data["total"] == 4 and event.data["done"] == step
    )


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    return {
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher), "batch_size": 2},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text),
            "validation_fraction": 0.2,
            "sequence_length": 32,
            "max_train_samples": 24,
            "max_eval_samples": 6,
        },
        "cache": {"shard_sequences": 8},
        "train": {"max_steps": 4, "batch_size": 1, "eval_steps": 2, "save_steps": 4},
        "evaluation": {"max_new_tokens": 4, "continuations": 0},
    }


#: Where a stop is asked for, and the words of the message.
MOMENTS = [
    (at_phase("loading data"), "while reading the text"),
    (at_phase("checking fidelity"), "in the fidelity check; every shard is sealed"),
    (at_type("cache"), "before stage train"),
    (at_type("profile"), "after the last step; the training is saved"),
    (at_step(2), "in the evaluation after step 2 of 4"),
    (at_phase("saving"), "while the student was measured; its training is saved"),
    (at_phase("measuring on the held-out text"), "while the student was measured"),
]


@pytest.mark.parametrize("number", range(len(MOMENTS)), ids=[words for _, words in MOMENTS])
@pytest.mark.long
def test_a_stop_is_heard_before_the_next_pass_and_the_run_goes_on_from_there(
    number: int, job: Job, tmp_path: Path, counting: Callable[[Stopper], Stopper]
) -> None:
    when, words = MOMENTS[number]
    stopper = counting(Stopper(when))
    config = parse_config(job)
    with pytest.raises(Interrupted, match=words) as caught:
        run_stages(config, tmp_path, tmp_path / "run", stopper.monitor)
    assert stopper.asked and stopper.passes <= 1, stopper.passes
    assert "Run the same job again" in caught.value.remedy
    assert not (tmp_path / "run" / "student").exists()
    assert not list((tmp_path / "run").glob(".tmp-*"))
    again = Stopper(lambda event: False)
    run_stages(config, tmp_path, tmp_path / "run", again.monitor)
    assert (tmp_path / "run" / "student").is_dir()
    captured = [event for event in again.events if event.data.get("unit") == "sequences"]
    if "fidelity" in words:
        assert not captured, "no sealed shard is captured again"


def test_a_stop_within_a_shard_says_what_is_read_again(job: Job, tmp_path: Path) -> None:
    stopper = Stopper(at_type("progress"))
    with pytest.raises(
        Interrupted, match=r"the 2 of its \d sequences that were read are read again"
    ):
        run_stage("precompute", parse_config(job), tmp_path, tmp_path / "run", stopper.monitor)
    assert stopper.list_types().count("progress") == 1


@pytest.mark.long
def test_an_evaluation_that_was_stopped_is_made_anew(job: Job, tmp_path: Path) -> None:
    """The resumed run has the evaluation of the step at which it was stopped, once."""
    config = parse_config(job)
    run_stages(config, tmp_path, tmp_path / "whole")
    stopper = Stopper(at_step(4))
    with pytest.raises(Interrupted, match="after step 4 of 4"):
        run_stages(config, tmp_path, tmp_path / "cut", stopper.monitor)
    assert [path.name for path in list_checkpoints(tmp_path / "cut/checkpoints")] == [
        "step-00000004"
    ]
    run_stages(config, tmp_path, tmp_path / "cut")
    lines = [read_history(tmp_path / name) for name in ("cut", "whole")]
    assert lines[0] == lines[1]
    reports = [
        json.loads((tmp_path / name / "report.json").read_text())["student_perplexity"]
        for name in ("cut", "whole")
    ]
    assert reports[0] == reports[1]


def test_text_is_left_after_one_document(tmp_path: Path, tiny_teacher: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_teacher)
    read: list[str] = []

    class Counted:
        """The tokenizer, whose library notes every text that it reads."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.inner, name)
            return Counted(found) if name == "backend_tokenizer" else found

        def __call__(self, text: Any, **options: Any) -> Any:
            return self.inner(text, **options)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            read.extend(texts)
            return self.inner.encode_batch_fast(texts, **options)

    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"It was night {n}."}) + "\n" for n in range(99)))
    config = DataConfig(train=(str(path),), sequence_length=8)
    stop = Monitor(should_stop=lambda: len(read) >= 5)
    with pytest.raises(Interrupted, match="while reading the text"):
        load_corpus(config, Counted(tokenizer), stop)  # type: ignore[arg-type]
    assert len(read) <= 7


@pytest.mark.long
def test_reading_a_cache_or_a_models_files_can_be_given_up(
    job: Job, tmp_path: Path, tiny_teacher: Path
) -> None:
    config = parse_config(job)
    summary = run_stage("precompute", config, tmp_path, tmp_path / "run").cache
    folder = tmp_path / "caches" / summary["fingerprint"]
    calls: list[int] = []

    def give_up() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Interrupted("enough", "")

    with pytest.raises(Interrupted):
        verify_cache(folder, give_up)
    assert len(calls) == 2
    assert compute_fingerprint(tiny_teacher, None, lambda: None) == compute_fingerprint(
        tiny_teacher
    )
    calls[:] = [1]
    with pytest.raises(Interrupted):
        compute_fingerprint(tiny_teacher, None, give_up)
    # A sealed cache is compared with its digests before it is used: this is heard, too.
    stopper = Stopper(at_type("plan"))
    with pytest.raises(Interrupted, match="while the cache was read"):
        run_stage("precompute", config, tmp_path, tmp_path / "other", stopper.monitor)
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 1

    monitor = Monitor(should_stop=stop)
    with pytest.raises(Interrupted, match="no file is kept"):
        export_records(open_cache(folder), "parquet", tmp_path / "out", None, monitor)
    assert len(asked) == 2 and not (tmp_path / "out").exists()


def test_a_trial_that_is_bad_at_its_last_evaluation_still_makes_its_report() -> None:
    watched = TrialMonitor(None, None, Monitor(), pruned=True)  # type: ignore[arg-type]
    assert watched.should_stop()
    watched.listen(Event("stage", {"stage": "train", "phase": "saving"}))
    assert not watched.should_stop()
    stopping = TrialMonitor(None, None, Monitor(should_stop=lambda: True), trained=True)  # type: ignore[arg-type]
    assert stopping.should_stop(), "a request to stop the search is heard then, too"
