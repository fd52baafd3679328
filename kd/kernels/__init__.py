"""GPU kernels in Triton, and whether they can run here."""
