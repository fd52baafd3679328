"""Commands that say what a job needs, and what is wrong with it, before it runs."""
