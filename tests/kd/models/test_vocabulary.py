"""V: padded heads, and tokenizers with ids that their model has no rows for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.errors import DataError, TokenizerMismatch
from kd.examine import ExaminedModel, examine
from kd.models.tokenizers import get_vocabulary_size, load_tokenizer
from kd.models.tokenizing.token_map import TokenMap
from kd.pipeline import run_stages

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {**SIZES, "head_dim": 16, "sliding_window": 32, "pad_token_id": 0}
PHI = {**SIZES, "pad_token_id": 0}
#: Rows of the LM head; the tokenizer of the tests has 2,048 ids, and that of Gemma one more.
FAMILIES = {
    "Gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, GEMMA, 2048),
    "Qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, SIZES, 2112),
    "Phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, PHI, 2064),
}  # fmt: skip
#: The token of a tokenizer that its model has no row for.
PICTURE = "<image_soft_token>"
#: A job without a teacher's records.
ALONE: dict[str, Any] = {"kind": "train", "loss": {"alpha": 1.0}}


def make_model(family: str, tokenizer: Any, folder: Path) -> Path:
    kind, model, sizes, rows = FAMILIES[family]
    torch.manual_seed(0)
    model(kind(vocab_size=rows, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wide(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The example's tokenizer with a token of pictures, which is also its padding."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer.save_pretrained(folder)
    more = load_tokenizer(folder)
    more.add_special_tokens({"pad_token": PICTURE})
    assert more.convert_tokens_to_ids(PICTURE) == 2048
    return more


@pytest.fixture(scope="module")
def gemma(wide: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("Gemma3", wide, tmp_path_factory.mktemp("gemma"))


def make_job(teacher: Path, student: Path | dict[str, int], text: Path, **sections: Any) -> Any:
    data = {
        "train": str(text), "validation_fraction": 0.2, "sequence_length": 32,
        "max_train_samples": 4, "max_eval_samples": 1, "packing": False,
    }  # fmt: skip
    job = {
        "name": "wide",
        "teacher": {"model": str(teacher)},
        "student": {"model": str(student)} if isinstance(student, Path) else {"init": student},
        "data": data,
        "train": {"max_steps": 1, "batch_size": 4, "learning_rate": 1e-3},
        "evaluation": {"teacher": True, "prompts": ["She"], "max_new_tokens": 2},
    }
    return parse_config(job | sections)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"It is a truth universally acknowledged, number {n}."} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_v_is_the_smaller_of_ids_and_rows_in_the_whole_run(
    family: str, tokenizer: Any, wide: Any, gemma: Path, text: Path, tmp_path: Path
) -> None:
    teacher = gemma if family == "Gemma3" else make_model(family, tokenizer, tmp_path / "teacher")
    job = make_job(teacher, teacher, text, cache={"profile": "hidden"})
    result = run_stages(job, tmp_path, tmp_path / "runs" / "x")
    store = open_cache(tmp_path / "caches" / result.cache["fingerprint"])
    assert store.identity.tokenizer.vocabulary_size == 2048
    assert TokenMap.of_cache(store).tokens.keys() == set(range(2048))
    found = result.report["evaluation"]["models"]
    # The student begins as the teacher's copy and takes one small step.
    assert found["student"]["perplexity"] == pytest.approx(found["teacher"]["perplexity"], rel=0.5)


@pytest.mark.long
def test_plain_text_needs_no_teacher_to_leave_the_id_out(
    gemma: Path, text: Path, tmp_path: Path
) -> None:
    alone = make_job(gemma, gemma, text, **ALONE)
    assert not alone.needs_cache
    assert run_stages(alone, tmp_path, tmp_path / "runs" / "x").report
    target = ExaminedModel(gemma, None)
    assert examine(make_job(gemma, gemma, text), target, tmp_path, tmp_path / "out")["evaluation"]


def test_only_text_with_such_an_id_is_refused_by_document_and_token(
    gemma: Path, text: Path, tmp_path: Path
) -> None:
    with text.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"text": f"A picture: {PICTURE} of it."}))
    place = len(load_tokenizer(gemma)("A picture: ")["input_ids"]) + 1
    message = rf"rows.jsonl.* 7, token {place}: '{PICTURE}' has the id 2048.* 'A picture: "
    data = make_job(gemma, gemma, text).data
    whole = {"data": data.model_copy(update={"max_train_samples": None})}
    for job in (
        make_job(gemma, gemma, text).model_copy(update=whole),
        make_job(gemma, gemma, text, **ALONE).model_copy(update=whole),
    ):
        with pytest.raises(DataError, match=message):
            run_stages(job, tmp_path, tmp_path / "runs" / "x")
    assert not (tmp_path / "caches").exists()


def test_a_student_without_a_row_for_each_id_is_refused_before_the_capture(
    wide: Any, gemma: Path, text: Path, tmp_path: Path
) -> None:
    """A teacher whose head is padded has the id that the student's head lacks."""
    kind, model, sizes, rows = FAMILIES["Gemma3"]
    model(kind(vocab_size=rows + 64, **sizes)).save_pretrained(tmp_path / "teacher")
    wide.save_pretrained(tmp_path / "teacher")
    with pytest.raises(TokenizerMismatch, match="has 2048 output rows, but the tokenizer has 2049"):
        run_stages(make_job(tmp_path / "teacher", gemma, text), tmp_path, tmp_path / "runs" / "x")
    assert not (tmp_path / "caches").exists()


@pytest.mark.long
def test_a_fresh_student_has_a_row_for_every_id(
    wide: Any, gemma: Path, text: Path, tmp_path: Path
) -> None:
    assert get_vocabulary_size(wide) == 2049
    job = make_job(gemma, {"layers": 1, "hidden_size": 16}, text)
    assert run_stages(job, tmp_path, tmp_path / "runs" / "x").report["evaluation"]
    config = json.loads((tmp_path / "runs" / "x" / "student" / "config.json").read_text())
    assert config["vocab_size"] == 2049
