"""What the training loop can be asked for besides the plain step: a file each, of functions and small objects."""
