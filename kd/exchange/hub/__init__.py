"""Students and caches to a Hugging Face hub, and from it."""
