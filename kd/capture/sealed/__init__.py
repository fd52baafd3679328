"""What is done with a cache after its capture: its fidelity is measured anew."""
