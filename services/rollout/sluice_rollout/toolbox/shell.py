"""A shell that runs the model's commands, confined as the reward `code` confines programs.

Unlike those, commands may start other programs. Later commands of an episode see what earlier ones
have left: files, the working directory, exported variables and functions. An archive carries that
state, so a session holds no process and no directory between two calls, and a command that hangs
costs only itself.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import math
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.rewards.sandbox import ProgramRun
from sluice_rollout.toolbox.base import ToolUnavailableError, definition_of, shortened
from sluice_rollout.toolbox.sandboxes import Sandboxes, half_of_the_cores

_COMMAND_BYTES = 1 << 16
_MOST_FILES = 4096
# Size of a session's files, unpacked, that a sandbox has room for.
_MOST_BYTES = 64 << 20
_NEEDED = ("bash", "tar", "gzip", "base64", "cp")
_PATH = "/usr/local/bin:/usr/bin:/bin"
# Writes the command's output. The state goes to descriptor 3, which the command does not have.
_OUTER = """\
cp -R "$1/files/." . 2> /dev/null
"$BASH" --noprofile --norc "$1/inner" "$1" "$PWD" 3>&-
echo $? >&3
tar -czf - . 2> /dev/null | base64 -w 0 >&3
"""
_INNER = """\
_given=$1 _root=$2
[ -f .shell/variables ] && . ./.shell/variables
export HOME="$_root"
[ -f .shell/folder ] && cd "$(cat .shell/folder)" 2> /dev/null
_keep() {
  _status=$?
  mkdir -p "$_root/.shell"
  _folder=$PWD/
  echo "${_folder#"$_root"/}" > "$_root/.shell/folder"
  { export -p | grep -vE '^declare -x (PWD|OLDPWD|HOME|SHLVL|_)='
    declare -f | grep -v '^declare'; } > "$_root/.shell/variables"
  exit $_status
}
trap _keep EXIT
eval "$(cat "$_given/command")" < /dev/null
"""


@dataclass(slots=True)
class Shell:
    """The tool `shell`."""

    name: str = "shell"
    # Limits of a command: time, and bytes of memory.
    seconds: float = 20.0
    memory: int = 1 << 30
    # Most characters of an answer.
    longest: int = 4096
    # Most commands of an episode.
    most_commands: int = 64
    # Most bytes of a session's files, packed.
    most_kept: int = 1 << 20
    # Commands that run at a time in this worker.
    sandboxes: int = field(default_factory=half_of_the_cores)
    definition: dict[str, Any] = field(init=False)
    _sandboxes: Sandboxes = field(init=False)

    def __post_init__(self) -> None:
        text = (
            "Run a command in bash; the answer is what it writes, and its exit status if that "
            "is not 0. Files and the working directory are kept."
        )
        self.definition = definition_of(self.name, text, command="The command.")
        self._sandboxes = Sandboxes(self.sandboxes)

    def session(self) -> Callable[..., str]:
        """Return a session, whose commands share their files."""
        return Session(self)

    def run(self, command: str, state: bytes) -> ProgramRun:
        """Run a command on the files of a state. Raises ToolUnavailableError."""
        if missing := [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]:
            raise ToolUnavailableError(f"Shell needs {', '.join(missing)} in {_PATH}")
        with tempfile.TemporaryDirectory(prefix="sluice-shell-") as name:
            folder = Path(name)
            folder.chmod(0o755)  # the sandbox may run as another user
            (folder / "files").mkdir()
            unpack(state, folder / "files")
            for file, content in (("outer", _OUTER), ("inner", _INNER), ("command", command)):
                (folder / file).write_text(content)
            ran = self._sandboxes.run(
                command=[shutil.which("bash", path=_PATH), str(folder / "outer"), name],
                environment={"PATH": _PATH, "LANG": "C.UTF-8"},
                readable=[name, *_readable()],
                folder=".",
                input="",
                seconds=self.seconds,
                memory=self.memory,
                cpu_seconds=math.ceil(self.seconds) + 1,
            )
        if ran.status == "refused":
            raise ToolUnavailableError(f"no command can be confined on this machine: {ran.error}")
        return ran

    def close(self) -> None:
        """End the sandboxes that are free."""
        self._sandboxes.close()


@dataclass(slots=True)
class Session:
    """The commands of an episode."""

    shell: Shell
    # Archive of the files that the last command has left.
    state: bytes = b""
    calls: int = 0
    # Calls of one turn of the model run one after another.
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, command: str) -> str:
        """Return the output of a command, and how it ended. Raises ToolUnavailableError."""
        with self._turn:
            return shortened(self._run(command), self.shell.longest)

    def _run(self, command: str) -> str:
        tool = self.shell
        self.calls += 1
        if self.calls > tool.most_commands:
            return f"error: no more commands: an episode has {tool.most_commands}"
        if not isinstance(command, str) or len(command) > _COMMAND_BYTES or "\0" in command:
            return f"error: a command is a text of at most {_COMMAND_BYTES} characters"
        ran = tool.run(command, self.state)
        reasons = {
            "timeout": f"no end after {tool.seconds:g} s",
            "output": "it wrote too much",
            "limit": ran.error,
        }
        if reason := reasons.get(ran.status):
            written = "" if ran.status == "limit" else ran.error
            return f"{written}\nerror: {reason}. What this command did is not kept.".lstrip()
        return ran.error + self._kept(ran)

    def _kept(self, ran: ProgramRun) -> str:
        """Keep the files that the command has left; return what the model is told about that."""
        status, _, packed = ran.output.partition("\n")
        note = "" if status == "0" else f"[exit status {status or 'unknown'}]"
        if len(packed) * 3 // 4 > (most := self.shell.most_kept):
            return f"{note}\nerror: its files are more than {most} bytes packed, and not kept"
        with contextlib.suppress(binascii.Error):  # the command ended the shell around it
            self.state = base64.b64decode(packed, validate=True) or self.state
        return note


def unpack(state: bytes, folder: Path) -> None:
    """Unpack a state into a folder: plain files and folders, within the limits of a sandbox.

    A state that is not an archive is empty.
    """
    if not state:
        return
    size = count = 0
    with (
        contextlib.suppress(tarfile.TarError, EOFError, OSError),
        tarfile.open(fileobj=io.BytesIO(state), mode="r:gz") as archive,
    ):
        for member in archive:
            size, count = size + member.size, count + 1
            if size > _MOST_BYTES or count > _MOST_FILES:
                return
            if member.isfile() or member.isdir():
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                archive.extract(member, folder, filter="data")


def _readable() -> list[str]:
    """Return programs and files that a command may read, in addition to system libraries."""
    paths = ("/bin", "/usr", "/etc/alternatives", "/etc/passwd", "/etc/group")
    return [path for path in paths if os.path.exists(path)]
