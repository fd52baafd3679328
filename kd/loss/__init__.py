"""The loss: what the student should predict, and how far its predictions are from that."""
