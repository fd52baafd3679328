"""Check whether caches are whole, and list them: what is known without reading their records."""
