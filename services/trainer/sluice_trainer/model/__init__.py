"""Models as files and shapes, independent of the backend."""
