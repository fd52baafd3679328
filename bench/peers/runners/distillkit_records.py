"""Write DistillKit's records without vLLM: python distillkit_records.py SETTINGS COMPRESSION OUT.

DistillKit's sampler asks vLLM for the k most probable tokens of each position. Here transformers
computes them; DistillKit's own code compresses, writes and packs them, with the sampler's sizes.
"""

import json
import sys
from pathlib import Path

import datasets
import numpy as np
import torch
import yaml
from distillkit.compression import DistributionQuantizationConfig, LogprobCompressor
from distillkit.pack_logits import iterative_packing
from distillkit.sample_common import StreamingParquetWriter, compressed_logit_schema
from transformers import AutoModelForCausalLM

#: Rows of a file, as the sampler has it.
MACROBATCH = 256


@torch.no_grad()
def write_records(settings, config, folder):
    compressor = LogprobCompressor(config=config)
    teacher = AutoModelForCausalLM.from_pretrained(settings["teacher"], dtype=torch.float32).eval()
    rows = torch.from_numpy(np.load(settings["rows"]).astype(np.int64))
    writer = StreamingParquetWriter(
        str(folder), compressed_logit_schema(), MACROBATCH, queue_maxsize=2 * MACROBATCH
    )
    with writer:
        for ids in rows.split(settings["batch"]):
            logits = teacher(ids, use_cache=False).logits[:, :-1]
            values, indices = torch.log_softmax(logits, dim=-1).topk(config.k, dim=-1)
            for row, *top in zip(ids, indices, values, strict=True):
                packed = compressor.compress_from_sparse(*(each.unsqueeze(0) for each in top))
                columns = {name: each.squeeze(0).tolist() for name, each in packed.items()}
                writer.write({"input_ids": row.tolist(), **columns})


def main(settings, compression, out):
    settings = json.loads(Path(settings).read_text())
    content = yaml.safe_load(Path(compression).read_text())
    config = DistributionQuantizationConfig.model_validate(content)
    records = Path(out) / "records"
    write_records(settings, config, records)
    files = sorted(map(str, records.glob("*.parquet")), key=lambda name: (len(name), name))
    written = datasets.load_dataset("parquet", data_files=files, split="train")
    # With more rows in a batch the packing would reverse their order.
    packed = iterative_packing(written, settings["length"] - 1, batch_size=1)
    packed.save_to_disk(str(Path(out) / "packed"))


if __name__ == "__main__":
    main(*sys.argv[1:])
