"""Inputs of a program: environment variables, and its row as a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.images.image import Image, is_image_part, with_data_urls
from sluice.samples.episode_protocol import ARTIFACTS
from sluice.samples.sample import Messages, Prompt
from sluice_rollout.environments.orphan_reaper import MARK
from sluice_rollout.gateway.endpoint import Gateway

TEMPORARY = "tmp"
# The variable by which `sluice run` finds and ends the processes of a pod.
POD = "SLUICE_POD_ID"
# Variables of the worker that its programs have as well.
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", POD)
# Bytes of a variable. Linux does not start a program with a variable of 128 KiB.
_LONGEST = 100_000


def inherited_variables(worker: Mapping[str, str], further: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job's programs that run on the worker's machine.

    `further` is `rollout.environment.env`.
    """
    return {name: worker[name] for name in INHERITED if name in worker} | dict(further)


def image_variables(worker: Mapping[str, str], further: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job's programs that run in an image.

    `further` is `rollout.environment.env`.
    """
    return {name: worker[name] for name in (POD,) if name in worker} | dict(further)


def engine_variables() -> dict[str, str]:
    """Return the variables for a container engine, which may name its socket and settings.

    These are the worker's own, without those that sluice has set.
    """
    return {k: v for k, v in os.environ.items() if k == POD or not k.startswith("SLUICE_")}


def episode_variables(
    prompt: Prompt, gateway: Gateway, directory: str, model: str
) -> dict[str, str]:
    """Return the variables of one episode's program.

    Parameters
    ----------
    prompt
        The row as the program may see it.
    gateway
        The endpoint for the model.
    directory
        The episode's directory.
    model
        Name of the model.

    """
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
    """Return the variables that name a program's directories."""
    return {
        "TMPDIR": f"{directory}/{TEMPORARY}",
        "SLUICE_ARTIFACTS": f"{directory}/{ARTIFACTS}",
        MARK: directory,
    }


def prompt_variables(prompt: Prompt) -> dict[str, str]:
    """Return the variables with prompt and label, except texts that no variable can hold."""
    texts = {"SLUICE_PROMPT": _question(prompt.prompt), "SLUICE_LABEL": _text(prompt.label)}
    return {name: text for name, text in texts.items() if _fits(text)}


def row(
    prompt: Prompt, sample: int, seats: Sequence[str] = (), images: Sequence[Image] = ()
) -> dict[str, Any]:
    """Return an episode's row as a JSON object.

    `prompt` is always a text; `messages` is there if the row has messages. They hold the prompt's
    `images` as data URLs, as OpenAI's clients send them.
    """
    chat = prompt.prompt
    messages = {} if isinstance(chat, str) else {"messages": with_data_urls(chat, images)}
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
    """Return the prompt as a text. Of messages, this is the user's last one."""
    if isinstance(prompt, str):
        return prompt
    texts = [_words(message.get("content")) for message in prompt if message.get("role") == "user"]
    return texts[-1] if texts else ""


def _words(content: Any) -> str:
    """Return a content as a text, without its images."""
    if isinstance(content, list) and any(map(is_image_part, content)):
        return "".join(_text(part.get("text")) for part in content)
    return _text(content)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _fits(text: str) -> bool:
    try:
        return len(text.encode()) <= _LONGEST and "\0" not in text
    except UnicodeEncodeError:  # an unpaired surrogate
        return False
