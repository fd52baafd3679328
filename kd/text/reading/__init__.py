"""Read files of text: its text, or its rows."""
