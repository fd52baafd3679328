"""Logs and health for every process of the service."""
