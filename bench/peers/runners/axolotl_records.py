"""Write the rows that axolotl's KD trainer reads: python axolotl_records.py SETTINGS K OUT.

axolotl has no tool for it: its users bring the teacher's k most probable tokens. As its own dataset
reader does, the k probabilities are normalised.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Features, Sequence, Value
from transformers import AutoModelForCausalLM

FEATURES = Features(
    {name: Sequence(Value("int32")) for name in ("input_ids", "attention_mask", "labels")}
    | {
        "target_logprobs": Sequence(Sequence(Value("float32"))),
        "target_token_ids": Sequence(Sequence(Value("int32"))),
        "target_mask": Sequence(Sequence(Value("int8"))),
    }
)


@torch.no_grad()
def score(settings, k):
    teacher = AutoModelForCausalLM.from_pretrained(settings["teacher"], dtype=torch.float32).eval()
    rows = torch.from_numpy(np.load(settings["rows"]).astype(np.int64))
    for ids in rows.split(settings["batch"]):
        values, indices = teacher(ids, use_cache=False).logits.topk(k, dim=-1)
        logprobs = torch.log_softmax(values, dim=-1)
        mask = torch.ones_like(indices, dtype=torch.int8)
        mask[:, -1] = 0
        for row, *targets in zip(ids, logprobs, indices, mask, strict=True):
            columns = [row, torch.ones_like(row), row, *targets]
            yield {name: each.numpy() for name, each in zip(FEATURES, columns, strict=True)}


def main(path, k, out):
    settings = json.loads(Path(path).read_text())
    rows = Dataset.from_generator(
        lambda: score(settings, int(k)), features=FEATURES, cache_dir=f"{out}, cache"
    )
    rows.save_to_disk(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
