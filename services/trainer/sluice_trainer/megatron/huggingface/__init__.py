"""Hugging Face checkpoints: config, names and shapes of tensors, files."""
