"""What a user waits for in the browser."""
