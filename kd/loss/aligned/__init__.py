"""Targets of a student whose tokenizer is not that of its teacher."""
