"""The command line ``kd``: its commands, its HTTP client and its output on the terminal."""
