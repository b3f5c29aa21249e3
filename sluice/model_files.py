"""Checks of a model's directory for formats that cannot be trained."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = ("*.safetensors", "*.bin")


def gguf_problem(path: Path) -> str | None:
    """Say what to do with a model that exists only as GGUF, the format of llama.cpp.

    None if the path is not such a file or directory.
    """
    files = sorted(path.glob("*.gguf"), key=lambda file: file.stat().st_size)
    if path.suffix == ".gguf" and path.is_file():
        files = [path]
    if not files or any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        return None
    return (
        f"{path} holds the model as GGUF, which cannot be trained; make a Hugging Face checkpoint "
        f"of it (sluice convert gguf-to-hf {files[-1]} DIRECTORY), and name that directory"
    )
