"""Teachers that no single device holds: their weights lie on several devices, or on the disk."""
