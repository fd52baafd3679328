"""How good a student is, in depth: against the whole teacher, by samples, by benchmark tasks, and as pictures."""
