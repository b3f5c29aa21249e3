"""Harbor tasks as rows: what is read of a folder, and messages for folders that are wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.data import harbor
from sluice.data.files import files_of, read_source
from sluice.runtime.pod_env import ConfigurationError

CONFIGURATION = """\
version = "1.0"
[task]
name = "me/hello"
[metadata]
difficulty = "easy"
[environment]
docker_image = "ghcr.io/me/hello:1"
workdir = "/app"
env = {MODE = "fast"}
[agent]
timeout_sec = 900
[verifier]
timeout_sec = 60.5
env = {KEY = "${KEY}"}
"""


@pytest.fixture
def add(tmp_path: Path) -> Callable[..., Path]:
    """Write a task into the directory `tasks`."""

    def write(name: str, configuration: str = "", script: str = "true\n") -> Path:
        folder = tmp_path / "tasks" / name
        (folder / "tests").mkdir(parents=True)
        (folder / "task.toml").write_text(configuration)
        (folder / "instruction.md").write_text(f"Do {name}.\n")
        (folder / "tests/test.sh").write_text(script)
        return folder

    return write


def rows(path: Path | str) -> list[dict[str, object]]:
    return [located.row for located in read_source(str(path))]


def test_a_row_has_what_agent_and_verifier_need(add: Callable[..., Path]) -> None:
    folder = add("hello", CONFIGURATION)
    (folder / "solution").mkdir()
    (folder / "solution/solve.sh").write_text("the solution is not read")
    (folder / "tests/data").mkdir()
    (folder / "tests/data/image.bin").write_bytes(b"\x89\xff\x00")
    (folder / "tests/run.sh").write_text("é\r\n")
    (folder / "tests/run.sh").chmod(0o755)
    (folder / "tests/link.sh").symlink_to("run.sh")
    [row] = rows(folder)
    assert row == {
        "prompt": "Do hello.\n",
        "metadata": {
            "instance_id": "hello",
            "task_name": "me/hello",
            "image": "ghcr.io/me/hello:1",
            "workdir": "/app",
            "env": {"MODE": "fast"},
            "agent_timeout_sec": 900.0,
            "verifier_timeout_sec": 60.5,
            "verifier_env": {"KEY": "${KEY}"},
            "test_files": {
                "test.sh": {"text": "true\n"},
                "data/image.bin": {"base64": "if8A"},
                "link.sh": {"text": "é\r\n", "executable": True},
                "run.sh": {"text": "é\r\n", "executable": True},
            },
        },
    }


def test_an_empty_configuration_is_enough(add: Callable[..., Path]) -> None:
    [row] = rows(add("hello").parent)
    metadata = {"instance_id": "hello", "verifier_timeout_sec": 600.0}
    assert row["metadata"] == metadata | {"test_files": {"test.sh": {"text": "true\n"}}}


def test_tasks_of_a_directory_come_by_name_and_may_be_sliced(
    add: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("b", "a", "c"):
        add(name)
    (tmp_path / "tasks/.git").mkdir()
    (tmp_path / "tasks/README.md").write_text("no task")
    assert files_of(tmp_path / "tasks") == [tmp_path / "tasks"]
    assert [row["prompt"] for row in rows(tmp_path / "tasks")] == ["Do a.\n", "Do b.\n", "Do c.\n"]
    assert [row["prompt"] for row in rows(f"{tmp_path}/tasks@[-2:]")] == ["Do b.\n", "Do c.\n"]
    [first, *_] = read_source(str(tmp_path / "tasks"))
    assert first.where == f"{tmp_path}/tasks/a/task.toml:1"


def test_lines_that_mark_data_are_not_part_of_the_instruction(add: Callable[..., Path]) -> None:
    folder = add("hello")
    marks = "<!-- harbor-canary GUID 1 -->\n# canary 2\n\n"
    (folder / "instruction.md").write_text(f"{marks}# Title\n# canary 3\n")
    assert rows(folder)[0]["prompt"] == "# Title\n# canary 3\n"


def other(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "task.toml").write_text(text)


def moved(name: str) -> Callable[[Path], object]:
    """Replace a file by a link to one outside of the task."""

    def move(folder: Path) -> None:
        (folder / name).rename(folder.parent / "README.md")
        (folder / name).symlink_to(folder.parent / "README.md")

    return move


def fill(name: str, size: int) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return write


def many_files(folder: Path) -> None:
    for number in range(1000):
        (folder / f"tests/{number}").touch()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        pytest.param(
            other("[agent]\ntimeout_sec = = 1\n"), "task.toml:2:15: not valid TOML: Inva", id="TOML"
        ),
        pytest.param(other("a = " + "[" * 9999), "not valid TOML: nested too deep", id="deep"),
        pytest.param(other("a = " + "1" * 9999), "task.toml: not valid TOML: Exc", id="digits"),
        pytest.param(
            lambda f: (f / "task.toml").write_bytes(b"a = '\xff'"),
            "task.toml: not UTF-8 text",
            id="TOML in another encoding",
        ),
        pytest.param(
            other("agent = 1"), "task.toml: agent: expected a table, [agent], found 1", id="table"
        ),
        pytest.param(
            other("[agent]\ntimeout_sec = 'x'"),
            "task.toml: agent.timeout_sec: expected a number of seconds above 0, found 'x'",
            id="timeout of letters",
        ),
        pytest.param(
            other("[verifier]\ntimeout_sec = nan"), "verifier.timeout_sec: expected", id="NaN"
        ),
        pytest.param(
            other("[environment]\ndocker_image = 1"),
            "environment.docker_image: expected a text, found 1",
            id="image",
        ),
        pytest.param(
            other("[verifier]\nenv = {A = 1}"), "verifier.env: expected a table of texts", id="env"
        ),
        pytest.param(other("[[steps]]\nname = 'a'"), "[[steps]]: an episode has one", id="steps"),
        pytest.param(
            other("[[environment.mcp_servers]]\nname = 'a'"), "get no MCP servers", id="MCP"
        ),
        pytest.param(other("environment.os = 'windows'"), "by a shell of Linux", id="Windows"),
        pytest.param(
            fill("environment/docker-compose.yaml", 1), "has one container", id="docker-compose"
        ),
        pytest.param(
            other("[verifier.environment]\ndocker_image = 'a'"),
            "tests run in the image of the task",
            id="image of the verifier",
        ),
        pytest.param(
            lambda f: (f / "instruction.md").unlink(),
            "instruction.md: no such file; a Harbor task needs it",
            id="no instruction",
        ),
        pytest.param(
            lambda f: (f / "instruction.md").write_text("# canary\n \n"),
            "instruction.md: the instruction is empty",
            id="empty instruction",
        ),
        pytest.param(
            lambda f: (f / "instruction.md").write_bytes(b"\xff"),
            "instruction.md: not UTF-8 text: invalid start byte at byte 0",
            id="binary instruction",
        ),
        pytest.param(
            lambda f: (f / "tests/test.sh").unlink(),
            "tests/test.sh: no such file; a Harbor task needs it",
            id="no tests",
        ),
        pytest.param(
            fill("tests/large.bin", 100_000_000),
            "tests/large.bin: 100000000 bytes; expected at most 1048571 after the other files of",
            id="100 MB",
        ),
        pytest.param(many_files, "tests: more than 1000 files", id="many files"),
        pytest.param(
            moved("instruction.md"),
            "instruction.md: a link that leaves the folder of the task",
            id="link to an instruction",
        ),
        pytest.param(
            moved("tests/test.sh"), "tests/test.sh: a link that leaves the folder", id="link"
        ),
        pytest.param(
            lambda f: (f / "tests/data").symlink_to("/etc"),
            "tests/data: a link to a directory; put a copy there instead",
            id="link to a directory",
        ),
        pytest.param(
            lambda f: (f / "tests/self").symlink_to("self"), "tests/self: ", id="link to itself"
        ),
        pytest.param(
            lambda f: (f.parent / "other").mkdir(),
            "tasks/other: no task.toml in this folder, which is beside Harbor tasks; add it, or",
            id="a folder that is no task",
        ),
        pytest.param(
            lambda f: (f.parent / "rows.jsonl").touch(),
            "tasks: both prompt files (rows.jsonl) and Harbor tasks in this directory",
            id="prompt files beside tasks",
        ),
    ],
)
def test_the_message_names_what_is_wrong(
    harm: Callable[[Path], object], message: str, add: Callable[..., Path], tmp_path: Path
) -> None:
    add("fine")
    harm(add("wrong"))
    with pytest.raises(ConfigurationError) as raised:
        rows(tmp_path / "tasks")
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}/tasks")
    assert not re.match(r"(.+): \1", str(raised.value)), "the place is named once"


def test_a_pipe_among_the_tests_is_not_read(add: Callable[..., Path]) -> None:
    folder = add("hello")
    os.mkfifo(folder / "tests/pipe")
    with pytest.raises(ConfigurationError, match="tests/pipe: expected a plain file"):
        harbor.read_task(folder)
