"""Jobs with several teachers: which of them reads which source of the text."""
