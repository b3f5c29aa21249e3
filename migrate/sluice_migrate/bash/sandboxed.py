"""Finds the commands that a script starts by running it with bash in a sandbox (`--exact`).

Its programs are replaced by ones that record their arguments; tools that work on text (`sed`,
`date`) are real. The sandbox is that of the reward `code`: it has no network, and only a temporary
folder is writable. If a machine cannot provide it, the script is not run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sluice.rewards.sandbox import ProgramRun, Sandbox
from sluice.rewards.types import RewardError
from sluice_migrate.bash.reading import project_of
from sluice_migrate.bash.script import Argument, Remark, Script, ScriptCommand
from sluice_migrate.draft import ImportFailedError

SECONDS = 20.0
_MEMORY = 1 << 30
# Programs that start a training; their arguments are recorded.
_RECORDED = (
    "python", "python3", "torchrun", "ray", "accelerate", "deepspeed", "uv", "srun", "mpirun",
)  # fmt: skip
# Tools that only work on text.
_REAL_TOOLS = (
    "awk", "basename", "cat", "cut", "date", "dirname", "env", "expr", "grep", "head", "paste",
    "readlink", "realpath", "rev", "sed", "seq", "sort", "tail", "tr", "uniq", "wc", "xargs",
)  # fmt: skip
# Programs that start the command after them.
_WRAPPERS = ("nohup", "setsid", "sudo")
# Programs that change files or wait; they do nothing.
_IGNORED = ("chmod", "cp", "ln", "mkdir", "mv", "pkill", "rm", "rmdir", "sleep", "touch")
# Files of a project that its scripts may source.
_COPIED = (".sh", ".bash", ".env")
# Limits of the copy: a home folder may be the project.
_MOST_FILES, _MOST_BYTES = 4000, 1 << 20
_STOPPED = {
    "timeout": f"did not end within {SECONDS:g} s: commands that it started until then are read",
    "limit": "needed too many processes or files: commands that it started until then are read",
    "output": "wrote too much output: commands that it started until then are read",
}
_UNKNOWN = re.compile(r"\$\([^()]*\)|\$\{HOME\}")
_COMPLAINT = re.compile(r"^(?P<file>.*?): line (?P<line>\d+): (?P<what>.+)$")
# Commands are recorded on descriptor 3: the number of words, then the words.
_RECORD = """printf '%s\\0' "$#" "$@" >&3"""
# The output of a program is not known: the program prints its own command, `$(name ...)`, which
# is recognized as an unknown value.
_STAND_IN = """#!{bash}
case "$1" in
  -c|-|"") case "$*" in *torch_npu*|*torch_musa*) exit 1 ;; esac; echo "\\$({name} $1)" ;;
  *) set -- "{name}" "$@"; {record} ;;
esac
"""
_PREAMBLE = """
command_not_found_handle() {{
  case "$1" in npu-smi|rocm-smi) return 127 ;; esac
  {record}
  echo "\\$($1)"
}}
ulimit() {{ :; }}
cd() {{ builtin cd "$@" 2>/dev/null || builtin true; }}
source() {{
  if [ -e "$1" ]; then builtin source "$@"; return; fi
  echo "$0: line ${{BASH_LINENO[0]}}: $1: no such file" >&2
}}
"""


def run_script(text: str, path: Path | None, environment: Mapping[str, str]) -> Script:
    """Run a script, and return the commands that it starts.

    path: its file; the shell files of its project are there too. Raises ImportFailedError if bash
    cannot be confined.
    """
    with confined_bash() as bash:
        return bash.run(text, path, environment)


@contextlib.contextmanager
def confined_bash() -> Iterator[ConfinedBash]:
    """Provide a confined bash for several scripts. Raises ImportFailedError."""
    program = shutil.which("bash")
    if program is None:
        raise ImportFailedError("--exact needs bash, and there is none in PATH")
    sandbox = _sandbox()
    try:
        with tempfile.TemporaryDirectory(prefix="sluice-import-") as folder:
            os.chmod(folder, 0o755)  # noqa: S103  (the sandbox's user may be another one)
            yield ConfinedBash(sandbox, program, Path(folder))
    finally:
        sandbox.close()


def _sandbox() -> Sandbox:
    try:
        return Sandbox()
    except RewardError as error:
        raise ImportFailedError(f"--exact runs scripts in a sandbox only, and {error}") from error


class ConfinedBash:
    """Bash in a sandbox. `folder` has the recording programs and copies of projects."""

    def __init__(self, sandbox: Sandbox, program: str, folder: Path) -> None:
        self._sandbox, self._program, self._folder = sandbox, program, folder
        self._tools = _programs(folder / "programs", program)
        (folder / "preamble").write_text(_PREAMBLE.format(record=_RECORD))
        self._copies: dict[Path, Path] = {}

    def run(self, text: str, path: Path | None, environment: Mapping[str, str]) -> Script:
        """Run a script. Raises ImportFailedError if the sandbox cannot be had."""
        root = (project_of(path) or path.resolve().parent) if path else Path()
        project = self._copy_of(root if path else None)
        script = project / (path.resolve().relative_to(root) if path else "command.sh")
        script.write_text(text)
        ran = self._sandbox.run(
            command=[self._program, str(script)],
            environment={
                "HOME": "${HOME}",
                "LANG": "C.UTF-8",
                **environment,
                "PATH": str(self._folder / "programs"),
                "BASH_ENV": str(self._folder / "preamble"),
            },
            readable=[str(self._folder), os.path.realpath(self._program), *self._tools],
            folder=str(project),
            seconds=SECONDS,
            memory=_MEMORY,
            cpu_seconds=int(SECONDS),
        )
        if ran.status == "refused":
            why = "--exact runs scripts in a sandbox only, and this machine cannot confine bash"
            raise ImportFailedError(f"{why} ({ran.error}); import without it")
        return _script(ran, {str(project): str(root) if path else "."})

    def _copy_of(self, root: Path | None) -> Path:
        """Return a folder with the shell files of a project; an empty one for a command line."""
        key = root or Path()
        if key not in self._copies:
            self._copies[key] = self._folder / f"project-{len(self._copies)}"
            self._copies[key].mkdir()
            if root:
                _copy(root, self._copies[key])
        return self._copies[key]


def _copy(root: Path, project: Path) -> None:
    """Copy the shell files of a project, which the script may source or start."""
    count = 0
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        target = project / Path(parent).relative_to(root)
        target.mkdir(parents=True, exist_ok=True)
        count += len(files)
        if count > _MOST_FILES:
            folders.clear()
        for name in files:
            source = Path(parent) / name
            if name.endswith(_COPIED) and source.is_file() and source.stat().st_size < _MOST_BYTES:
                shutil.copyfile(source, target / name)


def _programs(folder: Path, bash: str) -> list[str]:
    """Fill a folder for PATH with recording programs. Returns the real programs it links to."""
    folder.mkdir()
    for name in _RECORDED:
        _executable(folder / name, _STAND_IN.format(bash=bash, name=name, record=_RECORD))
    for name in _IGNORED:
        _executable(folder / name, f"#!{bash}\n")
    for name in _WRAPPERS:
        _executable(folder / name, f'#!{bash}\nexec "$@"\n')
    _executable(folder / "tee", f"#!{bash}\nexec cat\n")
    tools = {
        name: os.path.realpath(program) for name in _REAL_TOOLS if (program := shutil.which(name))
    }
    for name, target in {**tools, "bash": bash, "sh": bash}.items():
        (folder / name).symlink_to(target)
    return sorted(set(tools.values()))


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _script(ran: ProgramRun, places: Mapping[str, str]) -> Script:
    script = Script()
    words = ran.output.split("\0")[:-1]
    while words:
        count = int(words.pop(0))
        record, words = words[:count], words[count:]
        script.commands.append(ScriptCommand(tuple(_argument(word, places) for word in record)))
    for line in ran.error.splitlines():
        if match := _COMPLAINT.match(line):
            remark = Remark(int(match["line"]), Path(match["file"]).name, match["what"])
            script.remarks += [] if remark in script.remarks else [remark]
    if ran.status == "error":
        script.remarks += _last_message(ran.error)
    if ran.status in _STOPPED:
        script.remarks.append(Remark(0, "the script", _STOPPED[ran.status]))
    return script


def _last_message(output: str) -> list[Remark]:
    """Explain an error of the script that bash itself did not report."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and line[0] != "+"]
    if not lines:
        return [Remark(0, "the script", "ended with an error")]
    if _COMPLAINT.match(lines[-1]):
        return []
    return [Remark(0, "the script", f"ended with an error; its last message: {lines[-1]}")]


def _argument(word: str, places: Mapping[str, str]) -> Argument:
    for copy, original in places.items():
        word = word.replace(copy, original)
    unknown = tuple(text.strip("${}") if "{" in text else text
                    for text in _UNKNOWN.findall(word))  # fmt: skip
    return Argument(word, 0, unknown)
