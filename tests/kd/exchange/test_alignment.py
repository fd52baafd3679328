"""The records of a server's answer belong to the tokens that the server made."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.support.paths import AUSTEN
from cache.rounding import KNOWN_STEP
from cache.store import Cache, open_cache
from kd.errors import DataError
from kd.exchange.importing import ImportRequest, import_records

TOKENIZER = AUSTEN / "teacher"


def write_row(path: Path, row: Any) -> Path:
    path.write_text(json.dumps(row) + "\n")
    return path


def bring(format: str, path: Path, root: Path, tokenizer: Path, ahead: bool = False) -> Cache:
    request = ImportRequest(format, (path,), tokenizer, ahead=ahead)
    return open_cache(root / "caches" / import_records(request, root / "caches")["fingerprint"])


@pytest.fixture(scope="module")
def served(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tokenizer whose template writes a line feed after the end of turn, and a row of an answer
    of a server, with K or K + 1 entries for each token up to that end.
    """
    folder = tmp_path_factory.mktemp("served")
    copy = deepcopy(tokenizer)
    copy.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    copy.save_pretrained(folder)
    messages = [
        {"role": "user", "content": "To be claimed as a good,"},
        {"role": "assistant", "content": "pretence, heard by Miss Bennet, rather"},
    ]
    ids = copy.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompt = copy.apply_chat_template(messages[:1], tokenize=True, return_dict=False)
    begin = len(prompt) + len(copy("<|im_start|>assistant\n", add_special_tokens=False).input_ids)
    model = AutoModelForCausalLM.from_pretrained(TOKENIZER)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    lists = []
    for place in range(begin, len(ids) - 1):
        own = logprobs[place - 1]
        entries = dict.fromkeys([*own.topk(8).indices.tolist(), ids[place]])
        lists.append(
            [{"token": f"token_id:{each}", "logprob": float(own[each])} for each in entries]
        )
    assert {len(each) for each in lists} == {8, 9}
    return folder, {"messages": messages, "input_ids": ids, "logprobs": lists}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("named", ["messages", "input_ids"])
def test_the_lists_of_a_served_answer_belong_to_its_own_tokens(
    served: tuple[Path, dict[str, Any]], tmp_path: Path, named: str, ahead: bool
) -> None:
    folder, row = served
    path = write_row(tmp_path / "rows.jsonl", {each: row[each] for each in (named, "logprobs")})
    store = bring("axolotl", path, tmp_path, folder, ahead)
    sequences, records = store.read([0])
    last = len(row["input_ids"]) - 1
    places = np.flatnonzero(sequences.target_mask[0])
    np.testing.assert_array_equal(places, np.arange(last - len(row["logprobs"]) - 1, last - 1))
    for ids, known, place, entries in zip(
        records["top_ids"], records["known"][:, 0], places, row["logprobs"], strict=True
    ):
        expected = {int(each["token"][9:]): each["logprob"] for each in entries}
        assert set(ids[: len(expected)].tolist()) == expected.keys()
        own = expected[row["input_ids"][place + 1]]
        assert known * -KNOWN_STEP == pytest.approx(own, abs=2 * KNOWN_STEP)


def test_the_lists_of_another_answer_are_refused(
    served: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, row = served
    said = row["messages"][1] | {"content": "pretence, heard by"}
    cut = {"messages": [row["messages"][0], said], "logprobs": row["logprobs"]}
    path = write_row(tmp_path / "rows.jsonl", cut)
    with pytest.raises(DataError, match=r"row 1: the \d+ lists .* cannot be shown to belong"):
        bring("axolotl", path, tmp_path, folder)


@pytest.mark.parametrize("cut", [0, 2])
def test_one_shifted_row_of_plain_parquet_is_named_with_its_reason(
    served: tuple[Path, dict[str, Any]], tmp_path: Path, cut: int
) -> None:
    _, row = served
    begin = len(row["input_ids"]) - 1 - len(row["logprobs"])
    entries = [{int(e["token"][9:]): e["logprob"] for e in each} for each in row["logprobs"]]
    # Right is a shift of 1: a record stands one place before its token.
    lists = [{}] * (begin - cut) + entries + [{}] * (1 + cut)
    rows = {
        "input_ids": [row["input_ids"]],
        "ids": [[list(each) for each in lists]],
        "logprobs": [[list(each.values()) for each in lists]],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    said = r"row 1, position \d+: the records are off by one"
    with pytest.raises(DataError, match=said):
        bring("parquet", tmp_path / "rows.parquet", tmp_path, TOKENIZER)
