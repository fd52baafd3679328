"""The state of a training that checkpoints hold: its objects, its tensors, and their restoring."""
