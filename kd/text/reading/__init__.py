"""What a file of text holds: its text, or its rows."""
