"""Checkpoints: the directory, and writing into it."""
