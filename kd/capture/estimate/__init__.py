"""How many tokens and bytes a capture will have, told before it runs. Imports no torch."""
