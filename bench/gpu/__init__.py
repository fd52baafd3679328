"""What can be known of a GPU without one: launches, waits, and the kernels as they are compiled."""
