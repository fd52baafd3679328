"""Attention over packed rows whose memory grows with the row and not with its square.

The attention of transformers builds a mask (B, 1, L, L) for packed rows. Here every query has the
number of the first key that it may read instead, and documents are computed one by one.
"""
