"""Checkpoints: the directory that holds them, and writing one into it."""
