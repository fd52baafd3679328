"""The client of a running service: requests, retries, events, downloads, and models of answers."""
