"""Whether caches are whole, and a list of all: what is known without reading their records."""
