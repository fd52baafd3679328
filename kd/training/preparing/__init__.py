"""The parts of a training run before its first step."""
