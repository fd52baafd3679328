"""The parts of the command line: what it says to a server, what it shows, what it starts."""
