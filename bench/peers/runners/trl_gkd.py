"""Distil with TRL's GKDTrainer, on given text alone (lmbda 0): python trl_gkd.py SETTINGS."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer


def collate(examples):
    ids = torch.tensor([each["input_ids"] for each in examples])
    labels = ids.clone()
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def main(path):
    settings = json.loads(Path(path).read_text())
    rows = np.load(settings["rows"])[np.load(settings["order"])]
    trainer = GKDTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["student"], dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(
            settings["teacher"], dtype=torch.float32
        ),
        args=GKDConfig(
            output_dir=settings["out"],
            lmbda=0.0,
            beta=0.0,
            temperature=1.0,
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["batch"],
            max_length=settings["length"],
            learning_rate=settings["rate"],
            lr_scheduler_type="cosine",
            warmup_steps=settings["warmup"],
            weight_decay=settings["weight_decay"],
            adam_beta1=settings["betas"][0],
            adam_beta2=settings["betas"][1],
            adam_epsilon=settings["eps"],
            max_grad_norm=settings["max_grad_norm"],
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=settings["seed"],
        ),
        data_collator=collate,
        train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
        processing_class=AutoTokenizer.from_pretrained(settings["student"]),
    )
    trainer.train()
    trainer.save_model(settings["out"])


if __name__ == "__main__":
    main(sys.argv[1])
