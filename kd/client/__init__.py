"""Clients of a running service: requests, retries, events, downloads, and the models of answers."""
