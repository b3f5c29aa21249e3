"""Inputs of a program: variables, and its row as a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.samples.episode_protocol import ARTIFACTS
from sluice.samples.sample import Messages, Prompt
from sluice_rollout.environments.orphan_reaper import MARK
from sluice_rollout.gateway.endpoint import Gateway

TEMPORARY = "tmp"
POD = "SLUICE_POD_ID"
"""The variable by which `sluice run` finds, and ends, what a pod has left behind."""
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", POD)
"""Variables of the worker that its programs have too."""
_LONGEST = 100_000
"""Bytes of a variable; Linux starts no program with one of 128 KiB."""


def inherited_variables(worker: Mapping[str, str], further: Mapping[str, str]) -> dict[str, str]:
    """Variables of every program of a job. further: rollout.environment.env."""
    return {name: worker[name] for name in INHERITED if name in worker} | dict(further)


def image_variables(worker: Mapping[str, str], further: Mapping[str, str]) -> dict[str, str]:
    """Variables of every program of a job that runs in an image. further: as above."""
    return {name: worker[name] for name in (POD,) if name in worker} | dict(further)


def engine_variables() -> dict[str, str]:
    """Variables of this process that are not a job's, for what runs programs: where a container
    engine has its socket and its settings.
    """
    return {k: v for k, v in os.environ.items() if k == POD or not k.startswith("SLUICE_")}


def episode_variables(
    prompt: Prompt, gateway: Gateway, directory: str, model: str
) -> dict[str, str]:
    """Variables of one episode's program: where to ask, and what. prompt: as it may see it."""
    variables = {
        "OPENAI_BASE_URL": gateway.base_url,
        "OPENAI_API_BASE": gateway.base_url,
        "OPENAI_API_KEY": gateway.api_key,
        "ANTHROPIC_BASE_URL": gateway.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": gateway.api_key,
        "SLUICE_MODEL": model,
    }
    return variables | prompt_variables(prompt) | directory_variables(directory)


def directory_variables(directory: str) -> dict[str, str]:
    """Variables of the directory that a program has."""
    return {
        "TMPDIR": f"{directory}/{TEMPORARY}",
        "SLUICE_ARTIFACTS": f"{directory}/{ARTIFACTS}",
        MARK: directory,
    }


def prompt_variables(prompt: Prompt) -> dict[str, str]:
    """Variables that say what is asked. A text that no variable can hold is left out: the row has
    it.
    """
    texts = {"SLUICE_PROMPT": _question(prompt.prompt), "SLUICE_LABEL": _text(prompt.label)}
    return {name: text for name, text in texts.items() if _fits(text)}


def row(prompt: Prompt, sample: int, seats: Sequence[str] = ()) -> dict[str, Any]:
    """An episode's row, as JSON holds it. prompt: a text; messages: where the row has those."""
    messages = {} if isinstance(prompt.prompt, str) else {"messages": prompt.prompt}
    return {
        "prompt": _question(prompt.prompt),
        **messages,
        "label": prompt.label,
        "metadata": prompt.metadata,
        "tools": prompt.tools or [],
        "dataset": prompt.dataset,
        "row": prompt.row,
        "purpose": prompt.purpose.value,
        "seats": list(seats),
        "group": prompt.group_id,
        "sample": sample,
    }


def _question(prompt: str | Messages) -> str:
    """The prompt as a text; of messages the user's last one."""
    if isinstance(prompt, str):
        return prompt
    asked = [_text(message.get("content")) for message in prompt if message.get("role") == "user"]
    return asked[-1] if asked else ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _fits(text: str) -> bool:
    try:
        return len(text.encode()) <= _LONGEST and "\0" not in text
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
