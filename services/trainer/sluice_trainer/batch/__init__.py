"""Batches on their way from rewards to sequences with advantages."""
