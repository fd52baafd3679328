"""What prints the numbers and draws the pictures of docs/concepts."""
