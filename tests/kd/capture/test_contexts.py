"""A teacher that reads a context: its records lie at the student's positions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cache.store import Cache, open_cache
from kd.cached.loss import DistillationLoss, make_training_batch
from kd.cached.opening import open_cache as open_for_torch
from kd.capture.fidelity.live import TeacherLocation
from kd.config.jobfile import parse_config
from kd.config.loss import Divergence
from kd.errors import ConfigError, FidelityError, ModelError
from kd.models.layers import compute_hidden_states
from kd.progress import Interrupted, Monitor
from kd.stages.capture import run_precompute
from tests.support.remote_server import RemoteServer

ROWS = [
    {
        "prompt": f"Question {number}: what comes after {number}?",
        "completion": f" It is {number + 1}, which" + " is more" * (number % 5) + ".",
        "hint": "one more " * (number % 4),
    }
    for number in range(24)
]
CONTEXT = {"context": "Know that {hint}is meant. {prompt}", "max_length": 96}
DENSE = {"profile": "dense", "dtype": "float32"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def make_job(teacher: Path, rows: Path, cache: dict[str, Any], **section: Any) -> dict[str, Any]:
    return {
        "kind": "precompute",
        "teacher": {"model": str(teacher), "batch_size": 3, **section},
        "data": {
            "train": str(rows), "format": "prompt_completion", "sequence_length": 48,
            "validation_fraction": 0.2, "packing": False,
        },
        "cache": {"shard_sequences": 7, **cache},
    }  # fmt: skip


def capture(
    teacher: Path,
    rows: Path,
    home: Path,
    cache: dict[str, Any],
    monitor: Monitor | None = None,
    **section: Any,
) -> Cache:
    config = parse_config(make_job(teacher, rows, cache, **section))
    found = run_precompute(config, home, home / "run", monitor or Monitor()).cache
    return open_cache(home / "caches" / str(found["fingerprint"]))


def read_bytes(store: Cache) -> dict[str, bytes]:
    """Return the bytes of every file with records, by its name."""
    files = sorted((store.folder / "shards").rglob("*"))
    return {
        str(each.relative_to(store.folder)): each.read_bytes() for each in files if each.is_file()
    }


def read_wide(teacher: Path, tokenizer: Any, store: Cache) -> Tensor:
    """Return log p (N, V) of plain float64 passes over what the teacher reads, answer by answer."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    found = []
    sequences, _ = store.read(range(len(store)))
    for row, places in zip(ROWS, sequences.target_mask, strict=True):
        prompt = CONTEXT["context"].format(**row)  # type: ignore[attr-defined]
        ids = [*tokenizer(prompt + row["completion"])["input_ids"], tokenizer.eos_token_id]
        answer = int(np.count_nonzero(places))
        with torch.no_grad():
            logits_LV = model(torch.tensor([ids])).logits[0, :, : store.codec.vocabulary_size]
        found.append(logits_LV.log_softmax(1)[len(ids) - answer - 1 : -1])
    return torch.cat(found)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_records_are_those_of_a_float64_pass_over_the_teachers_own_sequence(
    tiny_teacher: Path, tokenizer: Any, rows: Path, tmp_path: Path, batch_size: int
) -> None:
    theirs = capture(tiny_teacher, rows, tmp_path, DENSE, **CONTEXT | {"batch_size": batch_size})
    plain = capture(tiny_teacher, rows, tmp_path, DENSE)
    (sequences, records), (same, others) = (
        each.read(range(len(theirs))) for each in (theirs, plain)
    )
    assert records is not None and others is not None
    assert all(map(np.array_equal, sequences.arrays, same.arrays))
    expected = read_wide(tiny_teacher, tokenizer, theirs)
    found = torch.from_numpy(np.asarray(records["logprobs"], np.float64))
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    unlike = torch.from_numpy(np.asarray(others["logprobs"], np.float64))
    assert (unlike - expected).abs().max() > 0.1


@pytest.mark.parametrize("profile", ["threshold", "tempered", "topk", "hidden"])
def test_the_prompt_alone_as_context_gives_the_bytes_of_no_context(
    tiny_teacher: Path, rows: Path, tmp_path: Path, profile: str
) -> None:
    options = {"profile": profile, **({"k": 8} if profile == "topk" else {})}
    plain = capture(tiny_teacher, rows, tmp_path, options)
    empty = capture(tiny_teacher, rows, tmp_path / "empty", options, context="", system="")
    same = capture(tiny_teacher, rows, tmp_path, options, context="{prompt}")
    assert empty.folder.name == plain.folder.name != same.folder.name
    assert read_bytes(empty) == read_bytes(plain) == read_bytes(same)
    assert "context_sha256" not in plain.identity.to_json()["data"]
    assert plain.manifest.fidelity == same.manifest.fidelity != ()


def test_a_server_gets_the_tokens_of_the_teachers_own_sequence(
    tiny_teacher: Path, tokenizer: Any, rows: Path, tmp_path: Path
) -> None:
    options = {"profile": "topk", "k": 6}
    local = capture(tiny_teacher, rows, tmp_path, options, **CONTEXT)
    with RemoteServer(tiny_teacher, len(tokenizer)) as server:
        served = {
            "backend": "http", "url": server.url, "model": "teacher", "revision": None,
            "tokenizer": str(tiny_teacher), "concurrency": 2,
        }  # fmt: skip
        remote = capture(tiny_teacher, rows, tmp_path, options, **CONTEXT | served)
        asked = {tuple(body["prompt"]) for body in server.asked}
    for row in ROWS:
        prompt = CONTEXT["context"].format(**row)  # type: ignore[attr-defined]
        whole = tuple(tokenizer(prompt + row["completion"])["input_ids"])
        assert any(each[: len(whole)] == whole for each in asked)
    (sequences, own), (same, theirs) = (each.read(range(len(local))) for each in (local, remote))
    assert all(map(np.array_equal, sequences.arrays, same.arrays))
    assert own is not None and theirs is not None
    np.testing.assert_array_equal(own["top_ids"], theirs["top_ids"])
    with RemoteServer(tiny_teacher, len(tokenizer)) as server:
        server.max_model_len = 96
        with pytest.raises(ModelError, match=r"of 96 tokens, but teacher\.max_length is 96"):
            capture(tiny_teacher, rows, tmp_path, options, **CONTEXT | served | {"url": server.url})


def compute_loss(folder: Path, teacher: Path, divergence: Divergence) -> tuple[float, float]:
    """Return loss and largest gradient of the teacher itself as student, on unequal lengths.

    The student computes in float64, and its LM head has the rows of the vocabulary.
    """
    opened = open_for_torch(folder)
    batch = opened.collate([opened.train[number] for number in (0, 4)])
    made = make_training_batch(batch)
    assert len(set(made.count_targets().tolist())) == 2
    student = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    weight = student.lm_head.weight.detach()[: opened.codec.vocabulary_size].requires_grad_()
    with torch.no_grad():
        hidden_BLD = compute_hidden_states(student, made.tokens_BL, made.packed)
    hidden_BLD.requires_grad_()
    loss = DistillationLoss(opened, divergence=divergence)(hidden_BLD, weight, batch)
    loss.backward()
    assert hidden_BLD.grad is not None and weight.grad is not None
    return float(loss.detach()), max(
        float(each.abs().max()) for each in (hidden_BLD.grad, weight.grad)
    )


@pytest.mark.parametrize("context", [{}, {"context": "{prompt}"}], ids=["none", "the prompt"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn_without_a_context(
    tiny_teacher: Path, rows: Path, tmp_path: Path, context: dict[str, Any]
) -> None:
    store = capture(tiny_teacher, rows, tmp_path, DENSE, **context)
    # The entropy that forward KL subtracts is stored in few bits: it moves only the value.
    assert compute_loss(store.folder, tiny_teacher, "forward_kl")[1] < 1e-6
    loss, gradient = compute_loss(store.folder, tiny_teacher, "reverse_kl")
    assert abs(loss) < 1e-9 and gradient < 1e-6


def test_a_student_that_is_its_teacher_learns_the_context(
    tiny_teacher: Path, rows: Path, tmp_path: Path
) -> None:
    theirs = capture(tiny_teacher, rows, tmp_path, DENSE, **CONTEXT)
    loss, gradient = compute_loss(theirs.folder, tiny_teacher, "reverse_kl")
    assert loss > 1e-2 and gradient > 1e-3


# ---------------------------------------------------------------------- interruptions, identity


def test_a_capture_that_is_stopped_goes_on_with_the_same_bytes(
    tiny_teacher: Path, rows: Path, tmp_path: Path
) -> None:
    whole = capture(tiny_teacher, rows, tmp_path, {}, **CONTEXT)
    seen: list[int] = []
    stopping = Monitor(
        lambda event: seen.append(1) if event.type == "shard" else None, lambda: bool(seen)
    )
    with pytest.raises(Interrupted):
        capture(tiny_teacher, rows, tmp_path / "other", {}, stopping, **CONTEXT)
    again = capture(tiny_teacher, rows, tmp_path / "other", {}, **CONTEXT | {"batch_size": 7})
    assert again.folder.name == whole.folder.name
    assert read_bytes(again) == read_bytes(whole)


def test_each_context_makes_a_cache_of_its_own(
    tiny_teacher: Path, rows: Path, tmp_path: Path
) -> None:
    contexts = [{}, CONTEXT, CONTEXT | {"context": "Know {hint} {prompt}"}, {"context": "{prompt}"}]
    stores = [capture(tiny_teacher, rows, tmp_path, {}, **each) for each in contexts]
    assert len({each.folder.name for each in stores}) == len(stores)
    assert len({each.identity.data.sha256 for each in stores}) == 1
    again = capture(tiny_teacher, rows, tmp_path, {}, **CONTEXT)
    assert again.folder == stores[1].folder


def test_a_sealed_cache_does_not_hold_what_its_teacher_read(
    tiny_teacher: Path, rows: Path, tmp_path: Path
) -> None:
    store = capture(tiny_teacher, rows, tmp_path, {}, **CONTEXT)
    assert store.manifest.fidelity  # compared while the text was there
    with pytest.raises(FidelityError, match="its teacher read a context"):
        TeacherLocation.find(store, str(tiny_teacher), tmp_path)


def test_a_context_beyond_the_teachers_window_is_refused_before_a_row_is_read(
    tiny_teacher: Path, rows: Path, tmp_path: Path
) -> None:
    from kd.preflight.problems import Folders, find_problems

    job = make_job(tiny_teacher, rows, {}, **CONTEXT | {"max_length": 513})
    (problem,) = find_problems(parse_config(job), Folders(tmp_path, tmp_path / "home"))
    assert problem.pointer == "/teacher/max_length"
    assert "a context of 512 tokens" in problem.detail


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("teacher", {"context": "{prompt"}, "its braces do not match"),
        ("teacher", {"context": "{}"}, "{} is not the name of a column"),
        ("teacher", {"context": "{hint!r}"}, "{hint!r} is not the name"),
        ("teacher", {"context": "{hint:>9}"}, "{hint:>9} is not the name"),
        ("teacher", {"context": "", "max_length": 64}, "neither teacher.context nor"),
        ("data", {"packing": True}, "cannot be combined with data.packing true"),
        ("data", {"assistant_only_loss": False}, "data.assistant_only_loss false"),
        ("cache", {"extends": "0" * 32}, "cannot be combined with cache.extends"),
        ("evaluation", {"teacher": True}, "cannot be combined with evaluation.teacher"),
    ],
)
def test_a_context_that_cannot_be_told_is_refused_by_name(
    tiny_teacher: Path, rows: Path, section: str, change: dict[str, Any], message: str
) -> None:
    job = copy.deepcopy(make_job(tiny_teacher, rows, {}, **CONTEXT))
    job[section] = job.get(section, {}) | change
    with pytest.raises(ConfigError) as caught:
        parse_config(job)
    assert message in str(caught.value)


def test_a_system_message_needs_chats(tiny_teacher: Path, rows: Path) -> None:
    job = make_job(tiny_teacher, rows, {}, system="Be brief.")
    job["data"]["format"] = "jsonl"
    with pytest.raises(ConfigError, match=r"system needs chats, but data\.format is jsonl"):
        parse_config(job)
