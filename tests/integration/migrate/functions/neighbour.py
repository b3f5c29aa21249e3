"""A file beside the function's, which it imports by its name."""


def passages(question: str) -> str:
    """Two words, chosen by the question."""
    return f"w{len(question) % 7:04d} w0002"
