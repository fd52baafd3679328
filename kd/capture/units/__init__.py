"""Samples of the teacher in units: how they are drawn, and the tables of their dither."""
