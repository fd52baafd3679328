"""Weights of a teacher's linear layers, rounded to int8 or int4 as they are read."""
