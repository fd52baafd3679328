"""Train a student from a cache in plain torch: python plain_torch.py CACHE STUDENT OUT."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import kd

STEPS, BATCH, RATE, ALPHA = 100, 8, 3e-4, 0.1


def main(folder: str, student: str, out: str, steps: int = STEPS) -> list[float]:
    opened = kd.open_cache(folder)
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    loss_fn = kd.DistillationLoss(opened, alpha=ALPHA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader = DataLoader(opened.stream(BATCH, steps=steps), batch_size=None, num_workers=2)
    losses = []
    for batch in loader:
        # Positions that restart at each document keep packed documents apart.
        hidden_states = model.base_model(
            batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).last_hidden_state
        loss = loss_fn(hidden_states, model.get_output_embeddings().weight, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.save_pretrained(out)
    return losses


if __name__ == "__main__":
    print(main(*sys.argv[1:4]))
