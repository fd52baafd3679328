"""Small data that is valid, for tests and benches."""
