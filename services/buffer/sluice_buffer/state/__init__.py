"""What the buffer knows, in memory and on disk."""
