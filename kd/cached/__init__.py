"""A sealed cache in a training loop of one's own: data sets, the loss, and two trainers."""
