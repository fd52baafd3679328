"""Reading the sealed folders of arrays: metadata, chunks, and what stays in memory."""
