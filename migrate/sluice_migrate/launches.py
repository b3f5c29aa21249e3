"""Finds the command of a script that starts the training."""

from __future__ import annotations

from collections.abc import Callable

from sluice_migrate.bash.script import Argument, Script, ScriptCommand
from sluice_migrate.draft import Draft, ImportFailedError
from sluice_migrate.translation import shown_names

# Variables of scripts for Huawei's NPUs.
_NPU_PREFIXES = ("ASCEND_", "HCCL_", "VLLM_ASCEND")
_SHELLS = ("bash", "sh", "zsh")


def last_launch(
    script: Script, is_entry: Callable[[Argument], bool], expected: str
) -> tuple[ScriptCommand, int]:
    """Return the last training that the script starts, and the position of its entry point.

    Raises ImportFailedError if the script starts no training, with `expected` as its message.
    """
    launches = [
        (command, at)
        for command in script.commands
        for at, word in enumerate(command.words)
        if is_entry(word)
    ]
    if not launches:
        raise ImportFailedError(expected + _reason(script))
    # Scripts often prepare, convert and evaluate first: the last certain launch is the training.
    return next((launch for launch in reversed(launches) if launch[0].sure), launches[-1])


def _reason(script: Script) -> str:
    """Explain what a script does that starts no training."""
    others = [
        word.text
        for command in script.commands
        for word in command.words
        if command.words[0].text in _SHELLS and word.text.endswith(".sh")
    ]
    if others:
        return f"; it starts {shown_names(tuple(others))}: import that script"
    ends = [
        f"line {remark.line}, {remark.subject}: {remark.text}"
        if remark.line
        else f"{remark.subject} {remark.text}"
        for remark in script.remarks
    ]
    return f"; {ends[-1]}" if ends else ""


def report(draft: Draft, script: Script, command: ScriptCommand, at: int) -> None:
    """Add notes about differences between what was read and what bash would run."""
    for remark in script.remarks:
        draft.note("check", remark.subject, remark.text, remark.line)
    for name, line in script.unset.items():
        draft.note(
            "check", f"${name}", "not set, so it is left out, as bash does; set it with --var", line
        )
    for name in script.variables.values:
        if name.startswith(_NPU_PREFIXES):
            why = "the script is written for Huawei NPUs; sluice runs on NVIDIA GPUs"
            draft.note("check", name, why, script.variables.values[name].line)
            break
    if not command.sure:
        why = "starts under a condition that only the machine can decide"
        draft.note("check", command.words[at].text, why, command.line)
    entries = {
        c.words[i].line for c in script.commands for i, word in enumerate(c.words)
        if word.text == command.words[at].text
    }  # fmt: skip
    if len(entries) > 1:
        why = f"the script starts {len(entries)} trainings; this is the last one"
        draft.note("check", command.words[at].text, why, command.line)
