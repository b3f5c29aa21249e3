"""The server of the engine transformers, the only part of it that computes."""
