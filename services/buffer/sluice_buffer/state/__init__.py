"""The buffer's knowledge, in memory and on disk."""
