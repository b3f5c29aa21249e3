"""Prompts, samples and groups, and the keys of their metadata."""
