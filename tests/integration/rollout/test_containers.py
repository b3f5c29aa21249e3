"""Programs of episodes in containers of podman and of docker, whichever this machine has, at a real
engine (`sluice run --containers`). As another user than root podman is rootless.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.sglang.client import Client
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice_rollout.environments import containers, directories, orphan_reaper
from sluice_rollout.environments.program import Program, program_of
from tests.integration.rollout.pods import job
from tests.integration.rollout.test_gateway import AGENT, PARAMS, check, runner_at_gateway
from tests.integration.rollout.test_gateway import talkative as talkative
from tests.tools import missing, tool

pytestmark = pytest.mark.long
IMAGE, OTHER = "localhost/sluice-test-agent:1", "localhost/sluice-test-verifier:1"
ASK = """
body='{"model": "any", "max_tokens": 12, "messages": [{"role": "user", "content": "w0002"}]}'
wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --post-data "$body" \
  "$OPENAI_BASE_URL/chat/completions" > /dev/null
"""
# For machines that may not raise their limits.
CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
"""


@pytest.fixture(scope="module", params=["podman", "docker"])
def runtime(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Import two images with a shell into a container engine. Each has a different file."""
    engine, busybox = container_engine(request.param), shutil.which("busybox")
    root = tmp_path_factory.mktemp("image")
    (root / "conf").write_text(CONF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(root / "conf"))
        patch.setenv(containers.ENGINE, request.param)
        for image in (IMAGE, OTHER):
            (root / "root/bin").mkdir(parents=True, exist_ok=True)
            shutil.copy(busybox or missing("needs busybox"), root / "root/bin/busybox")
            for name in ("sh", "wget", "cat", "sleep", "id"):
                (root / "root/bin" / name).unlink(missing_ok=True)
                (root / "root/bin" / name).symlink_to("busybox")
            (root / "root/image").write_text(image)
            packed = subprocess.run(
                ["tar", "-C", root / "root", "-c", "."], check=True, capture_output=True
            ).stdout
            subprocess.run([engine, "import", "-", image], input=packed, check=True)
        yield request.param
        subprocess.run([engine, "rmi", "--force", IMAGE, OTHER], check=True)


def container_engine(name: str) -> str:
    """Return the path of podman or docker. Skips the tests if it does not work here."""
    engine = str(tool(name))
    info = subprocess.run([engine, "info"], text=True, capture_output=True)
    if info.returncode:  # a docker without its daemon
        missing(f"needs {name} to answer: {info.stderr.strip().splitlines()[-1]}")
    return engine


def make_program(directory: Path, model: Path, script: str, **environment: Any) -> Program:
    settings = {name: value for name, value in AGENT.items() if name != "rollout__function"}
    ours = {"command": ["sh", "-euc", script], "image": IMAGE} | environment
    spec = job(directory, model, **settings, rollout__environment=ours).spec
    assert spec.rollout.environment
    return program_of(spec.rollout.environment, spec)


def running(runtime: str) -> list[str]:
    listed = subprocess.run(
        [runtime, "ps", "--all", "--quiet", "--filter", f"label={orphan_reaper.LABEL}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return listed.stdout.split()


async def test_a_program_plays_in_its_image(
    runtime: str, engine: Client, model: Path, talkative: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The program has the gateway, its row and the variables of `env`, but not the worker's."""
    script = """
metadata="\\"image\\": \\"$(cat /image)\\", \\"mode\\": \\"$MODE\\", \\"user\\": \\"$(id -u)\\""
secret="\\"secret\\": \\"${SECRET_OF_THE_WORKER:-}\\""
test -f "$SLUICE_EPISODE/row.json"; echo x > "$TMPDIR/file"
echo "{\\"reward\\": 0.75, \\"metadata\\": {$metadata, $secret}}" > "$SLUICE_EPISODE/result.json"
"""
    # Of these podman itself would find neither runc nor its images.
    env = {"MODE": "training", "PATH": "/bin", "HOME": "/", "CONTAINERS_CONF": "/none"}
    program = make_program(tmp_path, talkative, ASK + script, env=env)
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    try:
        await program.check()
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            sample = await runner(Prompt(0, "?"), [5], Sample(0), PARAMS)
        assert os.listdir(program._directory) == []
    finally:
        program.close()
    assert (sample.error, sample.reward) == ("", 0.75)
    reported = {name: sample.metadata[name] for name in ("image", "mode", "user", "secret")}
    assert reported == {"image": IMAGE, "mode": "training", "user": str(os.geteuid()), "secret": ""}
    assert sample.trainable_tokens == 12
    check(sample, {0: model})
    assert running(runtime) == []


async def test_a_verifier_judges_in_its_own_image(
    runtime: str, engine: Client, talkative: Path, tmp_path: Path
) -> None:
    judge = """
test "$(cat "$SLUICE_ARTIFACTS/answer")" = "$SLUICE_LABEL"
echo "{\\"reward\\": 1, \\"metadata\\": {\\"judge\\": \\"$(cat /image)\\"}}" \
  > "$SLUICE_EPISODE/result.json"
"""
    program = make_program(
        tmp_path,
        talkative,
        ASK + 'echo -n "seven$SLUICE_LABEL" > "$SLUICE_ARTIFACTS/answer"',
        verifier={"command": ["sh", "-euc", judge], "image": OTHER},
    )
    try:
        await program.check()
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            sample = await runner(Prompt(0, "?", "seven"), [5], Sample(0), PARAMS)
    finally:
        program.close()
    assert (sample.error, sample.reward, sample.metadata["judge"]) == ("", 1.0, OTHER)
    assert running(runtime) == []


async def test_a_program_that_hangs_fails_its_sample_and_leaves_no_container(
    runtime: str, engine: Client, talkative: Path, tmp_path: Path
) -> None:
    program = make_program(tmp_path, talkative, ASK + "sleep 600 & sleep 600")
    try:
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            runner.seconds = 10.0
            sample = await runner(Prompt(0, "?"), [5], Sample(0), PARAMS)
        assert os.listdir(program._directory) == []
    finally:
        program.close()
    assert sample.status is SampleStatus.FAILED
    assert "functionSeconds" in sample.error
    assert running(runtime) == []


async def test_a_program_that_the_image_lacks_is_named(
    runtime: str, engine: Client, talkative: Path, tmp_path: Path
) -> None:
    program = make_program(tmp_path, talkative, "", command=["/app/agent"])
    try:
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            sample = await runner(Prompt(0, "?"), [5], Sample(0), PARAMS)
    finally:
        program.close()
    assert "/app/agent" in sample.error
    assert "no such file" in sample.error.lower()
    assert "no such file" in sample.error.lower().splitlines()[0], "the reason that is told"
    assert "--help" not in sample.error


async def test_a_missing_image_is_an_error_before_the_first_episode(
    runtime: str, talkative: Path, tmp_path: Path
) -> None:
    program = make_program(tmp_path, talkative, ASK, image="localhost/there-is-none:7")
    try:
        with pytest.raises(ConfigurationError, match=f"{runtime} does not have the image"):
            await program.check()
    finally:
        program.close()


WORKER = """
import asyncio, os, sys, tempfile
from sluice_rollout.environments import directories
from sluice_rollout.environments.containers import Containers

async def main():
    engine = os.environ["SLUICE_CONTAINERS"]
    with directories.open_root(1, engine) as directory:
        episode = tempfile.mkdtemp(dir=directory)
        print(directory, flush=True)
        await Containers(engine, sys.argv[1]).run(
            ["sh", "-c", "sleep 600"], episode, {"SLUICE_EPISODE": episode, "TMPDIR": episode}
        )

asyncio.run(main())
"""


async def test_a_worker_that_is_killed_leaves_no_container(runtime: str, tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, IMAGE], stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout
        directory = worker.stdout.readline().strip()
        async with asyncio.timeout(60):
            while not running(runtime):
                await asyncio.sleep(0.2)
        worker.send_signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            while running(runtime) or orphan_reaper.marked_processes(directory):
                await asyncio.sleep(0.2)
    finally:
        worker.kill()
        worker.wait()
    with directories.open_root(1):
        assert not Path(directory).exists(), "the next worker has removed it"
