"""The verifier of Harbor tasks: runs tests/test.sh over what an agent has changed.

As in Harbor the tests are copied to /tests and run in the working directory, and the reward is what
they leave in /logs/verifier: `reward.json`, named numbers, else `reward.txt`, one number. It needs
Python 3.11.4 or later and what the tests need, and no package.

In an image of the task (`--in-image`) the places are Harbor's. Next to a worker they are in the
episode's directory, and the tests find them in the variables TESTS_DIR and LOGS_DIR.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import (  # type: ignore[import-not-found]
    apply_changes,
    read_row,
    resolved,
    working_directory,
)

SHOWN = 20_000  # characters of the tests' output that the sample keeps
MOST_REWARD_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-image", action="store_true", help="run in the image of the task")
    parser.add_argument("--tests", type=Path, help="directory of the tests; default: /tests")
    parser.add_argument("--logs", type=Path, help="directory of the logs; default: /logs")
    parser.add_argument("--key", default="reward", help="the reward among several of reward.json")
    parser.add_argument("--seconds", type=float, help="time limit; default: verifier.timeout_sec")
    options = parser.parse_args()
    episode, artifacts = (Path(os.environ[name]) for name in ("SLUICE_EPISODE", "SLUICE_ARTIFACTS"))
    root = Path("/") if options.in_image else episode
    tests, logs = options.tests or root / "tests", options.logs or root / "logs"
    row = read_row()
    found, directory = row["metadata"], working_directory(row, options.in_image)
    applied = apply_changes(artifacts, directory)
    if not applied:
        leave(episode, {"score": 0.0}, {"changes_applied": False})
        return
    write_tests(found["test_files"], tests)
    prepare(logs)
    variables = resolved(found.get("env", {}) | found.get("verifier_env", {}))
    variables |= {"TESTS_DIR": str(tests), "LOGS_DIR": str(logs)}
    seconds = options.seconds or found["verifier_timeout_sec"]
    output = logs / "verifier/test-stdout.txt"
    ended = run(tests / "test.sh", directory, variables, seconds, output)
    log = output.read_text(errors="replace")[-SHOWN:]
    about = {"changes_applied": True, "tests_ended": ended or "too late", "test_log": log}
    if ended is None:
        leave(episode, {"score": 0.0}, about)
        return
    try:
        rewards = read_rewards(logs / "verifier")
        score = chosen(rewards, options.key)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise SystemExit(f"{log}\n{found['instance_id']}: the tests ({ended}) {error}") from error
    leave(episode, rewards | {"score": score}, about)


def write_tests(files: Mapping[str, Mapping[str, Any]], tests: Path) -> None:
    for name, content in files.items():
        file = tests / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if "base64" in content:
            file.write_bytes(base64.b64decode(content["base64"]))
        else:
            file.write_bytes(content["text"].encode())
        if content.get("executable") or name == "test.sh":
            file.chmod(0o755)


def prepare(logs: Path) -> None:
    """Make Harbor's directories, without rewards that an image may have."""
    for name in ("agent", "verifier", "artifacts"):
        (logs / name).mkdir(parents=True, exist_ok=True)
    for name in ("reward.json", "reward.txt"):
        (logs / "verifier" / name).unlink(missing_ok=True)


def run(
    script: Path, directory: Path, variables: Mapping[str, str], seconds: float, output: Path
) -> str | None:
    """Run the tests and return how they ended; None: they took too long.

    All processes that they have started are ended.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["/bin/sh", "-c", '"$0"', str(script)],  # a script without #! is one of the shell
            cwd=directory,
            env={**os.environ, "PATH": path, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return f"exit status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_rewards(directory: Path) -> dict[str, float]:
    """Return what the tests have left. Raises ValueError or OSError."""
    named, single = directory / "reward.json", directory / "reward.txt"
    file = named if named.exists() else single
    if not file.exists():
        raise ValueError(f"left neither {named} nor {single}")
    if file.stat().st_size > MOST_REWARD_BYTES:
        raise ValueError(f"left {file} of more than {MOST_REWARD_BYTES} bytes")
    rewards = json.loads(file.read_text()) if file == named else {"reward": float(file.read_text())}
    if not isinstance(rewards, dict) or not rewards:
        raise ValueError(f"left {file}, which is no object of named numbers")
    for name, value in rewards.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"left {file} with {name}: expected a number, found {value!r:.100}")
    return {name: float(value) for name, value in rewards.items()}


def chosen(rewards: Mapping[str, float], key: str) -> float:
    """Return the reward that is trained on: `key`, or the only one."""
    if key not in rewards and len(rewards) > 1:
        raise ValueError(
            f"left rewards {', '.join(rewards)} and none is called {key}: set verify.py --key"
        )
    return rewards[key] if key in rewards else next(iter(rewards.values()))


def leave(episode: Path, reward: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
    (episode / "result.json").write_text(json.dumps({"reward": reward, "metadata": metadata}))


if __name__ == "__main__":
    main()
