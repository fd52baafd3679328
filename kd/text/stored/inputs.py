"""The inputs of a token store: its name is a digest of this, so that the same text is kept once.

The tokenizer counts with all its rules. A file counts with its path, its bytes, its inode and the
times of its last writing and of its last change, which no program can set back: its content is not
read, because that would take as long as to tokenize it. Only a young file is hashed, too: it may
change again within one tick of the clock of its disk. A folder of a dataset counts with its files,
and a dataset of the hub with its name, its revision and the fingerprint that ``datasets`` gives it;
a stream of the hub has none.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.disk import hash_file
from kd.config.data import DataConfig, DatasetSpec, TextSources
from kd.errors import DataError
from kd.text.sources import open_dataset
from kd.text.text_files import describe_file, find_source_files, list_all_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The inputs of a store, as JSON.
Inputs = dict[str, Any]
#: The fields of the section ``data`` that change the sequences of a source.
_FIELDS = (
    "format", "text_column", "document_separator", "assistant_only_loss", "sequence_length",
    "streaming", "packing",
)  # fmt: skip
#: The fields of a source that change nothing of its text.
_ROUTE = {"teacher", "mixture"}
#: The age from which a file does not change without another time.
_YOUNG_NS = 2_000_000_000
#: Digits of a digest in a name.
_DIGITS = 32


def describe_inputs(
    sources: TextSources,
    field: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    size: int | None,
    wanted: int | None,
) -> Inputs:
    """Describe everything that decides the first ``wanted`` sequences of ``sources``, as JSON.

    ``field`` is train or validation, and ``size`` is V, the size of the vocabulary.
    """
    return {
        "data": {name: getattr(config, name) for name in _FIELDS},
        "sequences": wanted,
        "sources": [_describe_source(source, field, config) for source in sources],
        "tokenizer": hash_rules(tokenizer),
        "vocabulary_size": size,
    }


def name_inputs(inputs: Inputs) -> str:
    """Return the name of the store that is made of ``inputs``."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def require_inputs(folder: Path, found: Any, expected: Inputs) -> None:
    """Raise ``DataError`` if the store in ``folder`` was made of other inputs."""
    if found == expected:
        return
    found = found if isinstance(found, dict) else {}
    differing = [name for name in expected if found.get(name) != expected[name]]
    raise DataError(
        f"The token store {folder} was made of another {' and '.join(differing) or 'input'}: "
        f"expected {_show(expected, differing)}, but got {_show(found, differing)}.",
        "Delete that folder and run again: the text is then tokenized again.",
    )


def _show(inputs: Inputs, names: list[str]) -> str:
    return ", ".join(f"{name} {str(inputs.get(name))[:80]}" for name in names)


def hash_rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all rules of a tokenizer: those of its library, its template, its ids."""
    library = getattr(tokenizer, "backend_tokenizer", None)
    if library is None:
        options = {name: str(value) for name, value in tokenizer.init_kwargs.items()}
        # Without its folder.
        options = {name: options[name] for name in options if not options[name].startswith("/")}
        rules: Any = [sorted(tokenizer.get_vocab().items()), options]
    else:
        rules = json.loads(library.to_str())
        # The state of the last call, not a rule.
        rules |= {"truncation": None, "padding": None}
    content = [
        type(tokenizer).__name__,
        rules,
        tokenizer.chat_template,
        [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _describe_source(source: str | DatasetSpec, field: str, config: DataConfig) -> Inputs:
    found = find_source_files(source, split=field)
    spec = source if isinstance(source, DatasetSpec) else DatasetSpec(path=source)
    if found is not None:
        # A folder has neither name nor revision. Stores that the library read have both, so that
        # none of them counts as made of these inputs: it took a text file for one row a line.
        unread = {"name", "revision", *_ROUTE}
        known = spec.model_dump(mode="json", exclude=unread) if spec is source else {}
        return {**known, "files": list(map(describe_file, found.files))}
    known = spec.model_dump(mode="json", exclude=_ROUTE)
    if (folder := Path(spec.path)).is_dir():
        return {**known, "files": list(map(describe_file, list_all_files(folder)))}
    rows = None if config.streaming else open_dataset(spec, False)
    return {**known, "fingerprint": getattr(rows, "_fingerprint", None)}


def hash_young_files(inputs: Inputs) -> dict[str, str]:
    """Map each file in ``inputs`` that may change again without another time to its sha256."""
    now = time.time_ns()
    files = [file for source in inputs["sources"] for file in source.get("files", ())]
    return {file[0]: hash_file(Path(file[0])) for file in files if now - file[-1] < _YOUNG_NS}
