"""The parts of bench/quality.py: caches, students, shares of the gap, and the page."""
