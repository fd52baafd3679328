"""Several processes, one on each device, that train one student together."""
