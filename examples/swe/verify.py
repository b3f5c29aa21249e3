"""The verifier: applies an episode's patch to a fresh copy of its repository and runs the tests.

The row names the command of the tests (`test_cmd`) and has the files that the agent has not seen
(`test_files`). They replace those of the patch, so a patch of the tests has no effect. The output
of the tests goes to the reward `swe`, which compares it with the row's lists.

It needs Python, git and what the tests need, and no package. In an image of the row the repository
is `--repository /testbed`; next to a worker it is in the folder `repositories`, by its instance_id.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

MOST_BYTES = 1_000_000  # of the tests' output that the reward reads


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repository", type=Path, help="the repository of the image")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of the tests")
    parser.add_argument("--logs", type=Path, help="directory that keeps outputs, by their hash")
    options = parser.parse_args()
    episode, artifacts = (Path(os.environ[name]) for name in ("SLUICE_EPISODE", "SLUICE_ARTIFACTS"))
    row = json.loads((episode / "row.json").read_text())["metadata"]
    repository = options.repository or Path(__file__).parent / "repositories" / row["instance_id"]
    work = episode / "work"
    shutil.copytree(repository, work, symlinks=True)
    applied = apply(artifacts / "patch.diff", work)
    replace_tests(repository, work, row["test_files"])
    log = run(row["test_cmd"], work, options.seconds) if applied else "the patch does not apply\n"
    digest = hashlib.sha256(log.encode()).hexdigest()
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
        (options.logs / f"{digest}.log").write_text(log)
    found = {"patch_applied": applied, "test_log": shortened(log), "test_log_sha256": digest}
    (episode / "result.json").write_text(json.dumps({"metadata": found}))


def apply(patch: Path, work: Path) -> bool:
    """Apply a patch. An empty one, or none, applies."""
    if not patch.exists() or not patch.read_bytes().strip():
        return True
    # `git apply` ignores paths outside of the repository that it is in.
    subprocess.run(["git", "init", "--quiet", work], check=True)
    return not subprocess.run(["git", "apply", "--whitespace=nowarn", patch], cwd=work).returncode


def replace_tests(repository: Path, work: Path, files: dict[str, str]) -> None:
    """Put the directories of the tests back as they were, with the row's files over them."""
    for directory in {Path(name).parts[0] for name in files}:
        shutil.rmtree(work / directory, ignore_errors=True)
        if (repository / directory).is_dir():
            shutil.copytree(repository / directory, work / directory)
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)


def run(command: str, work: Path, seconds: float) -> str:
    """Run the tests, and return their output. All processes that they start are ended."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    output = work.parent / "test.log"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=work,
            env={**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = f"exit status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = f"the tests took more than {seconds:g} s"
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"{output.read_text(errors='replace')}\n{end}\n"


def shortened(log: str) -> str:
    """Return the beginning and the end of a long output."""
    half = MOST_BYTES // 2
    return log if len(log) <= MOST_BYTES else f"{log[:half]}\n...\n{log[-half:]}"


if __name__ == "__main__":
    main()
