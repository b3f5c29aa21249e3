"""The command of a script that starts a training, and what has to be said about how it was read."""

from __future__ import annotations

from collections.abc import Callable

from sluice_migrate.bash.script import Argument, Script, ScriptCommand
from sluice_migrate.draft import Draft, ImportFailedError
from sluice_migrate.translation import shown_names

_OF_NPUS = ("ASCEND_", "HCCL_", "VLLM_ASCEND")
_SHELLS = ("bash", "sh", "zsh")


def last_launch(
    script: Script, is_entry: Callable[[Argument], bool], wanted: str
) -> tuple[ScriptCommand, int]:
    """(the command, the position of its entry point), of the last one that the script reaches.

    Raises ImportFailedError where it starts none. wanted: what was looked for, with the source.
    """
    launches = [
        (command, at)
        for command in script.commands
        for at, word in enumerate(command.words)
        if is_entry(word)
    ]
    if not launches:
        raise ImportFailedError(wanted + _why(script))
    return next((launch for launch in reversed(launches) if launch[0].sure), launches[-1])


def _why(script: Script) -> str:
    """Words for a script that starts nothing, but other scripts or programs."""
    others = [
        word.text
        for command in script.commands
        for word in command.words
        if command.words[0].text in _SHELLS and word.text.endswith(".sh")
    ]
    if others:
        return f"; it starts {shown_names(tuple(others))}: import that"
    ends = [
        f"line {remark.line}, {remark.subject}: {remark.text}"
        if remark.line
        else f"{remark.subject} {remark.text}"
        for remark in script.remarks
    ]
    return f"; {ends[-1]}" if ends else ""


def report(draft: Draft, script: Script, command: ScriptCommand, at: int) -> None:
    """Notes about what was not read as bash would have run it."""
    for remark in script.remarks:
        draft.note("check", remark.subject, remark.text, remark.line)
    for name, line in script.unset.items():
        draft.note("check", f"${name}", "nothing sets it: left out, as bash does (--var)", line)
    for name in script.variables.values:
        if name.startswith(_OF_NPUS):
            why = "the script is written for Huawei's NPUs; sluice runs on NVIDIA's GPUs"
            draft.note("check", name, why, script.variables.values[name].line)
            break
    if not command.sure:
        why = "only under a condition that the machine would decide"
        draft.note("check", command.words[at].text, why, command.line)
    entries = {
        c.words[i].line for c in script.commands for i, word in enumerate(c.words)
        if word.text == command.words[at].text
    }  # fmt: skip
    if len(entries) > 1:
        why = f"the script starts {len(entries)} trainings; this is the last"
        draft.note("check", command.words[at].text, why, command.line)
