"""Optimisers, learning-rate schedules and averages of the weights."""
