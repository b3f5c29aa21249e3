"""Batches, from rewards to sequences with advantages."""
