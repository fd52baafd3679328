"""Matrix products whose sums are not rounded to the precision of their factors."""
