"""The sizes of the small caches that training loops of one's own read."""

TRAIN, HELD_OUT, LENGTH, VOCABULARY = 22, 3, 16, 300
PROFILES = ("threshold", "tempered", "topk", "dense", "hidden")
#: A cache of profile threshold that version 0.2.0 captured.
EARLIER = "earlier"
