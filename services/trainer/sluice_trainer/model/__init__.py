"""Models as files and shapes, without a backend."""
