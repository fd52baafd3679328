"""Distil with the teacher in memory, in a plain loop: python plain_loop.py SETTINGS."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup


def make_optimizer(model, settings):
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings["rate"], betas=settings["betas"], eps=settings["eps"], fused=True
    )


def main(path):
    settings = json.loads(Path(path).read_text())
    rows = torch.from_numpy(np.load(settings["rows"]).astype(np.int64))
    order = torch.from_numpy(np.load(settings["order"]))
    torch.manual_seed(settings["seed"])
    teacher = AutoModelForCausalLM.from_pretrained(settings["teacher"], dtype=torch.float32).eval()
    student = AutoModelForCausalLM.from_pretrained(settings["student"], dtype=torch.float32)
    optimizer = make_optimizer(student, settings)
    schedule = get_cosine_schedule_with_warmup(optimizer, settings["warmup"], settings["steps"])
    student.train()
    for batch in order.split(settings["batch"]):
        ids = rows[batch]
        with torch.no_grad():
            logits = teacher(ids, use_cache=False).logits[:, :-1]
            teacher_logprobs = F.log_softmax(logits, dim=-1)
        logits = student(ids, use_cache=False).logits[:, :-1]
        logprobs = F.log_softmax(logits, dim=-1)
        total = F.kl_div(logprobs, teacher_logprobs, reduction="sum", log_target=True)
        (total / logprobs[..., 0].numel()).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), settings["max_grad_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    student.save_pretrained(settings["out"])
    AutoTokenizer.from_pretrained(settings["student"]).save_pretrained(settings["out"])


if __name__ == "__main__":
    main(sys.argv[1])
