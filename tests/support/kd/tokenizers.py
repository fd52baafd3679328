"""Tokenizers that differ from the example's where no probe text shows it."""

import json
from pathlib import Path
from typing import Any

from kd.models.tokenizers import PROBE_TEXTS


def exchange_ids(tokenizer: Any, folder: Path, pairs: list[tuple[str, str]]) -> Path:
    """Save a tokenizer in which the tokens of each pair have exchanged their ids."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    for left, right in pairs:
        vocabulary[left], vocabulary[right] = vocabulary[right], vocabulary[left]
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def list_rare_tokens(tokenizer: Any, count: int, *texts: str) -> list[tuple[str, str]]:
    """List pairs of tokens that occur neither in the probe texts nor in ``texts``."""
    used = {number for text in (*PROBE_TEXTS, *texts) for number in tokenizer(text)["input_ids"]}
    special = set(tokenizer.all_special_ids)
    free = [
        token
        for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        if number not in used | special
    ]
    return list(zip(free[: 2 * count : 2], free[1 : 2 * count : 2], strict=True))
