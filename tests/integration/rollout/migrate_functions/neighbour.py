"""A module in the folder of the function, which imports it by name."""


def passages(question: str) -> str:
    """Return two words that depend on the question."""
    return f"w{len(question) % 7:04d} w0002"
