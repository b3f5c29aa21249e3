"""Checkpoints in torch's distributed format, and their conversion."""
