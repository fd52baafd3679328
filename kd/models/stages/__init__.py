"""A student of which each process holds some consecutive layers: ``train.strategy`` pipeline."""
