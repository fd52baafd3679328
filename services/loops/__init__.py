"""Loops that run beside the API: reconciler, webhooks, searches."""
