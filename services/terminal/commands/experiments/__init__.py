"""Commands that train or measure students to learn about settings."""
