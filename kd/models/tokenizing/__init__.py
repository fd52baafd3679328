"""What two tokenizers must have in common: their tokens, and the rules that make them of text."""
