"""Read saved students with transformers 4, and print what differs from what is expected of them.

A program of its own: it runs with transformers 4, without this repository. Each folder that it is
given holds a tokenizer, ``expected.json`` with texts and their ids, and perhaps a model and
``expected.safetensors`` with token ids and logits. One JSON object is printed: the differences by
folder.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

warnings.simplefilter("ignore")
#: Its types are those of another version.
library: Any = transformers
library.logging.set_verbosity_error()


@torch.no_grad()
def compare_logits(folder: Path) -> float:
    """Return the largest difference of the logits, as a share of the largest logit."""
    if not (folder / "expected.safetensors").exists():
        return 0.0
    expected = load_file(folder / "expected.safetensors")
    model, report = library.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"], report["missing_keys"]
    logits = model.eval()(input_ids=expected["ids"], use_cache=False).logits
    return float((logits - expected["logits"]).abs().max() / expected["logits"].abs().max())


def compare_ids(folder: Path) -> dict[str, Any]:
    """Return the texts that are encoded otherwise, each with its ids."""
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    expected = json.loads((folder / "expected.json").read_text())
    found = {text: tokenizer(text)["input_ids"] for text in expected["texts"]}
    other = {text: ids for text, ids in found.items() if ids != expected["texts"][text]}
    if tokenizer.chat_template != expected["template"]:
        other["template"] = tokenizer.chat_template
    return other


def try_both(folder: Path) -> dict[str, Any]:
    """Return the differences, or the error, of the logits and of the ids."""
    found: dict[str, Any] = {}
    for name, compare in (("logits", compare_logits), ("ids", compare_ids)):
        try:
            found[name] = compare(folder)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


print(json.dumps({path: try_both(Path(path)) for path in sys.argv[1:]}))
