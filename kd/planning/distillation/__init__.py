"""The plan of a whole distillation by a number of tokens, before there is a text."""
