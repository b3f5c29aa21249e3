"""The Python that has vLLM, if that is a separate environment, as on a laptop."""

import importlib.util
import os
import sys
from pathlib import Path

VARIABLE = "SLUICE_VLLM_PYTHON"


def other_python() -> Path | None:
    """Return its path; None if this Python has vLLM.

    Raises LookupError, with a sentence, if no Python has it.
    """
    if importlib.util.find_spec("vllm") is not None:
        return None
    default = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    python = Path(os.environ.get(VARIABLE) or default)
    if not python.exists():
        raise LookupError(
            f"rollout.engine: vllm needs vLLM at {python}: run `make vllm`, or set {VARIABLE}"
        )
    if python == Path(sys.executable):
        raise LookupError(f"{VARIABLE}: {python} has no vLLM")
    return python
