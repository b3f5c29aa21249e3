"""The launch scripts: an engine exits with 0 only if it was told to end."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.engines.vllm.plugin import __main__ as vllm

FAILS = "import sys; print('a scheduler has died', flush=True); sys.exit({code})"
TOLD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("serving", flush=True)
time.sleep(60)
"""
IMPORTS = """
import multiprocessing
def tries():
    try:
        import megatron.core
    except ImportError as error:
        print(error, flush=True)
if __name__ == "__main__":
    tries()
    other = multiprocessing.get_context("spawn").Process(target=tries)
    other.start()
    other.join()
"""
TOLD_ON_A_LOOP = """
import asyncio, signal
async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print("serving", flush=True)
    await told.wait()
asyncio.run(main())
"""


def started(
    directory: Path, server: str, files: tuple[int, int] | None = None
) -> subprocess.Popen[str]:
    """The launch script over a test's server in SGLang's place. files: how many it may open,
    and how many it may take.
    """
    package = directory / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(server)
    command = [sys.executable, str(PATH / "launch_server.py")]
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, files) if files else None
    return subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, text=True, preexec_fn=limit
    )


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 1), (3, 3)], ids=["as if all were well", "with a code of its own"]
)
def test_a_server_that_ends_by_itself_has_failed(tmp_path: Path, code: int, expected: int) -> None:
    """The first process of a container, SGLang cannot kill itself, and ends with 0 if its
    scheduler has died."""
    process = started(tmp_path, FAILS.format(code=code))
    assert process.wait(60) == expected


@pytest.mark.parametrize("server", [TOLD, TOLD_ON_A_LOOP], ids=["a handler", "an event loop's"])
def test_a_server_that_was_told_to_end_has_not_failed(tmp_path: Path, server: str) -> None:
    process = started(tmp_path, server)
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_server_may_open_as_many_files_as_its_hard_limit_lets_it(tmp_path: Path) -> None:
    """SGLang asks for 65,535, and goes on with fewer if it may not have so many."""
    server = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    output, _ = started(tmp_path, server, files=(500, 900)).communicate(timeout=60)
    assert output == "900 900\n"


def test_a_vllm_server_may_open_as_many_files_too(tmp_path: Path) -> None:
    package = tmp_path / "vllm/entrypoints/launchers/api_server"
    package.mkdir(parents=True)
    for folder in (package, *package.relative_to(tmp_path).parents):
        (tmp_path / folder / "__init__.py").touch()
    (package / "entry.py").write_text(
        "import resource\ndef main(): print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run(
        [sys.executable, str(vllm.PATH / "launch_server.py")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (500, 900)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "900 900\n", done.stderr


def test_no_process_of_a_server_imports_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's dumper would, for seconds, if it is installed."""
    installed = tmp_path / "site/megatron"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    (installed / "core.py").write_text("print('imported', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(installed.parent))
    said, _ = started(tmp_path, IMPORTS).communicate(timeout=60)
    assert said.splitlines() == ["an engine does without Megatron"] * 2


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--attention-backend", "triton"], False),
        (["--attention-backend=fa3"], True),
        (["--attention-backend", "triton", "--decode-attention-backend", "flashinfer"], True),
    ],
    ids=["ours", "another", "another for decoding"],
)
def test_a_deterministic_engine_refuses_another_attention_backend(
    words: list[str], refused: bool
) -> None:
    script = runpy.run_path(str(PATH / "launch_server.py"))
    if not refused:
        script["check_attention_backend"](words)
        return
    with pytest.raises(SystemExit, match="expected triton"):
        script["check_attention_backend"](words)
