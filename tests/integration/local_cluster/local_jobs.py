"""Jobs whose pods are tiny programs, run by the real planner on real processes."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.api import RLJob
from sluice_operator.cluster.local import processes

SLEEP = "import time; time.sleep(600)"


def program(code: str) -> list[str]:
    return ["python", "-S", "-c", textwrap.dedent(code)]


def container(name: str, code: str) -> dict[str, Any]:
    return {"name": name, "command": program(code), "args": []}


def template(*containers: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"containers": list(containers)}}


def make_job(
    trainer: str = SLEEP,
    *,
    buffer: str = SLEEP,
    engine: str = SLEEP,
    worker: str = SLEEP,
    rendezvous: str = SLEEP,
    name: str = "demo",
    **spec: Any,
) -> RLJob:
    """Return a trainer pod, a rollout pod, a buffer and a rendezvous that run the given program.

    The rollout pod has two containers, engine and worker.
    """
    rollout = {
        "gpusPerReplica": 0,
        "template": template(container("engine", engine), container("worker", worker)),
    }
    document: dict[str, Any] = {
        "model": {"path": "/nowhere/model", "init": "random"},
        "data": {"prompts": [{"path": "/nowhere/prompts.jsonl"}]},
        "reward": {"type": "exact_match"},
        "rollout": rollout | spec.pop("rollout", {}),
        "trainer": {
            "gpusPerNode": 0,
            "steps": 2,
            "template": template(container("trainer", trainer)),
        }
        | spec.pop("trainer_spec", {}),
        "buffer": {"template": template(container("buffer", buffer))},
        "podTemplateOverrides": [
            {"roles": ["rendezvous"], "template": template(container("rendezvous", rendezvous))}
        ],
        "failurePolicy": {"maxRestarts": 2, "rolloutBackoffSeconds": 1},
    }
    return RLJob.model_validate({"metadata": {"name": name}, "spec": document | spec})


def log(run_dir: Path, container: str) -> str:
    """The output of a container, which is named as `<pod>.<container>`."""
    return (run_dir / f"logs/{container}.log").read_text().strip()


def write(path: str, text: str) -> str:
    """Python source that writes `text` (an expression) to a file next to the trainer's metrics."""
    return f"open(os.environ['SLUICE_RUN_DIR'] + '/{path}', 'a').write({text} + '\\n')"


def wait_for_logs(run_dir: Path, text: str, *containers: str) -> str:
    """Return Python source that waits until each of these containers has written `text`.

    It fails after a minute.
    """
    logs = [str(run_dir / f"logs/{container}.log") for container in containers]
    return textwrap.dedent(
        f"""
        import os, time
        def written(log): return os.path.exists(log) and {text!r} in open(log).read()
        deadline = time.monotonic() + 60
        while not all(written(log) for log in {logs!r}):
            assert time.monotonic() < deadline, "no such text in the logs"
            time.sleep(0.05)
        """
    )


def alive(run_dir: Path) -> list[int]:
    """Processes of the run, by the marker that they carry."""
    return processes.marked(processes.marker(run_dir.resolve()))


async def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


async def spawn_host(run_dir: Path, job: RLJob) -> asyncio.subprocess.Process:
    script = Path(__file__).with_name("local_host.py")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        str(run_dir),
        job.model_dump_json(by_alias=True),
        stdout=asyncio.subprocess.PIPE,
    )
