"""The programs of an example whose agent uses a shell, with a model whose answers are scripted."""

from __future__ import annotations

from pathlib import Path

_AGENT = """
import runpy, types
answers = iter({answers!r})
def complete(**_):
    text = next(answers)
    ask("x")  # the model answers, so that the sample has tokens
    message = types.SimpleNamespace(content=text)
    return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)])
class Client:
    chat = types.SimpleNamespace(completions=types.SimpleNamespace(create=complete))
sys.modules["openai"] = types.SimpleNamespace(OpenAI=Client, BadRequestError=ValueError)
"""
_RUN = """
import runpy
sys.path.insert(0, {directory!r})
sys.argv = [{name!r}]
runpy.run_path({file!r}, run_name="__main__")
"""


def agent_program(example: Path, commands: str) -> str:
    """Return a program that runs `agent.py`, whose model runs some commands once, then ends."""
    answers = [f"```bash\n{commands}\n```", "It is done."]
    return _AGENT.format(answers=answers) + _run(example / "agent.py")


def verifier_program(example: Path) -> str:
    """Return a program that runs `verify.py`."""
    return _run(example / "verify.py")


def _run(file: Path) -> str:
    return _RUN.format(directory=str(file.parent), name=file.name, file=str(file))
