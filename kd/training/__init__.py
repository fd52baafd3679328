"""The training loop with its evaluations and checkpoints. Begin with ``loop.py``."""
