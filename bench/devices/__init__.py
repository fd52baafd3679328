"""What several devices gain: measured on processes of a CPU, and expected of GPUs."""
