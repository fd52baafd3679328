"""Memory of a training step: its estimate, ways to need less, and the micro-batch that fits."""
