"""The answers of the API: their types, problem documents, files, event streams and metrics."""
