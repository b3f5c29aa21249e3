"""The plugin's processes that import SGLang before its server spawns them."""

from __future__ import annotations

import _json
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from sluice.engines.sglang.plugin.__main__ import PATH
from tests.unit.engines.conftest import Plugin

MODULE = '''"""Stands for the module of SGLang that a spawned process imports."""
import os
import time
from pathlib import Path

IMPORTED = time.monotonic()
Path(__file__).with_name(f"imported-{os.getpid()}").touch()
LOOKED_AT = os.environ.get("LOOKED_AT", "")


def work(numbers, answers, event, lock):
    """Answer what this process is, by way of all that multiprocessing hands over."""
    event.wait(30)
    with lock:
        answers.put(sum(numbers.recv() for _ in range(3)))
        answers.put({
            "imported": IMPORTED,
            "looked_at": LOOKED_AT,
            "of_now": {name: os.environ.get(name) for name in ("LOOKED_AT", "NEW", "GONE")},
            "pid": os.getpid(),
            "open": len(os.listdir("/proc/self/fd")),
            "preloaded": os.environ.get("LD_PRELOAD", ""),
            "maps": Path("/proc/self/maps").read_text(),
            "processors": sorted(os.sched_getaffinity(0)),
        })
    raise SystemExit(7)
'''
SERVER = '''"""Stands for SGLang's server: begins to prepare processes, and spawns one later."""
import json
import multiprocessing
import os
import sys
import time
from contextlib import nullcontext
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

if __name__ == "__main__":
    from sluice_sglang.startup import preforked_processes as prepared

    case = json.loads(sys.argv[1])
    prepared.begin([case["saves_memory"]] * case["prepared"])
    children = [child.pid for child in psutil.Process().children()]
    if case["wait"]:
        print(json.dumps(children), flush=True)
        time.sleep(60)
    managers = Path(__file__).parent / "sglang/srt/managers"
    deadline = time.monotonic() + 60
    while len([*managers.glob("imported-*")]) < case["prepared"]:
        assert time.monotonic() < deadline, "processes have not been prepared"
        time.sleep(0.05)
    for child in children[: case["killed"]]:
        os.kill(child, 9)
    os.environ.update(case["changes"])
    os.environ.pop("GONE", None)
    import sglang.srt.managers.scheduler as scheduler

    spawn = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # by this Python
    if case["executable"]:
        spawn.set_executable(case["executable"])
    told = []
    for _ in range(case["spawned"]):
        mine, theirs = spawn.Pipe()
        answers, event, lock = spawn.Queue(), spawn.Event(), spawn.Lock()
        process = spawn.Process(target=scheduler.work, args=(theirs, answers, event, lock))
        began = time.monotonic()
        with prepared.memory_saver() if case["saves_memory"] else nullcontext():
            process.start()
        event.set()
        for number in (1, 2, 3):
            mine.send(number)
        answer = {"sum": answers.get(timeout=30), **answers.get(timeout=30)}
        process.join(30)
        told.append(answer | {
            "began": began,
            "exit": process.exitcode,
            "own": process.pid == answer["pid"],
            "prepared": process.pid in children,
        })
    print(json.dumps(told))
'''
SAVER = '''"""Stands for the memory saver: a library is loaded before all others."""
import os
from contextlib import contextmanager

@contextmanager
def configure_subprocess():
    os.environ["LD_PRELOAD"] = "{library}"
    yield
    del os.environ["LD_PRELOAD"]
'''

MEMORY_MAY_BE_BOUND = not subprocess.run(
    [
        sys.executable,
        "-c",
        "from sluice_sglang.startup import numa; raise SystemExit(not numa.allocate_at(0, 2))",
    ],
    env=os.environ | {"PYTHONPATH": str(PATH)},
    check=False,
).returncode


class Answer(dict[str, object]):
    """The answer of one spawned process."""

    def is_whole(self) -> bool:
        return self["sum"] == 6 and self["exit"] == 7 and bool(self["own"])

    def was_imported_before(self) -> bool:
        return float(str(self["imported"])) < float(str(self["began"]))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    package = tmp_path / "sglang" / "srt" / "managers"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "scheduler.py").write_text(MODULE)
    (package / "detokenizer_manager.py").touch()
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path


def server(directory: Path, **case: object) -> subprocess.Popen[str]:
    usual = {
        "prepared": 1,
        "spawned": 1,
        "killed": 0,
        "changes": {},
        "executable": "",
        "saves_memory": False,
        "wait": False,
    }
    return subprocess.Popen(
        [sys.executable, str(directory / "server.py"), json.dumps(usual | case)],
        env=os.environ | {"PYTHONPATH": f"{directory}:{PATH}", "GONE": "before"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(directory: Path, **case: object) -> tuple[list[Answer], str]:
    """The answers of the spawned processes, and the words of the server."""
    output, words = server(directory, **case).communicate(timeout=90)
    assert output, words
    return [Answer(answer) for answer in json.loads(output)], words


def test_a_prepared_process_takes_the_place_of_one_that_is_spawned(directory: Path) -> None:
    [answer], words = answers(directory, changes={"NEW": "value"})
    assert answer.is_whole()
    assert answer["prepared"]
    assert answer.was_imported_before()
    assert answer["of_now"] == {"LOOKED_AT": None, "NEW": "value", "GONE": None}
    assert "anew" not in words


def test_it_keeps_no_more_descriptors_than_a_spawned_process(directory: Path) -> None:
    [prepared, spawned], _ = answers(directory, spawned=2)
    assert prepared["prepared"]
    assert not spawned["prepared"]
    assert prepared["open"] == spawned["open"]


def test_a_command_that_comes_during_the_import_waits(directory: Path) -> None:
    with (directory / "sglang/srt/managers/detokenizer_manager.py").open("w") as module:
        module.write("import time\ntime.sleep(2)\n")
    [answer], words = answers(directory)
    assert answer.is_whole()
    assert answer["prepared"], words
    assert answer.was_imported_before()


@pytest.mark.parametrize("name", ["LOOKED_AT", "LD_BIND_NOW"])
def test_it_starts_anew_if_a_variable_that_was_read_has_changed(directory: Path, name: str) -> None:
    [answer], words = answers(directory, changes={name: "1"})
    assert answer.is_whole()
    assert answer["prepared"]
    assert not answer.was_imported_before()
    assert answer["looked_at"] == ("1" if name == "LOOKED_AT" else "")
    assert f"{name} was read before the server changed it" in words


@pytest.mark.skipif(not MEMORY_MAY_BE_BOUND, reason="set_mempolicy is not permitted here")
@pytest.mark.parametrize("memory", ["--membind=0", "--preferred=0"])
def test_it_is_bound_as_numactl_would_bind_it(directory: Path, memory: str) -> None:
    """In SGLang's words, which puts numactl before Python if there are several NUMA nodes."""
    processor = min(os.sched_getaffinity(0))
    [answer], words = answers(
        directory, executable=bound(directory, f"--physcpubind={processor} {memory}")
    )
    assert answer.is_whole()
    assert answer.was_imported_before(), words
    assert answer["processors"] == [processor]


def bound(directory: Path, options: str) -> str:
    from sglang.srt.utils import numa_utils

    path, _ = numa_utils._create_numactl_executable(options)
    return str(Path(path).rename(directory / "bound"))


def test_it_starts_anew_for_another_command(directory: Path) -> None:
    script = directory / "bound"
    script.write_text(f'#!/bin/sh\nexec env BOUND=1 {sys.executable} "$@"\n')
    script.chmod(0o755)
    [answer], words = answers(directory, executable=str(script))
    assert answer.is_whole()
    assert answer["prepared"]
    assert not answer.was_imported_before()
    assert f"the command is {script}" in words


def test_a_process_that_releases_memory_is_prepared_with_its_library(directory: Path) -> None:
    library = directory / "saver.so"
    shutil.copy(_json.__file__, library)
    (directory / "torch_memory_saver.py").write_text(SAVER.format(library=library))
    [answer], words = answers(directory, saves_memory=True)
    assert answer.is_whole()
    assert answer.was_imported_before(), words
    assert answer["preloaded"] == str(library)
    assert str(library) in str(answer["maps"])


def test_no_process_is_prepared_without_the_memory_saver(directory: Path) -> None:
    (directory / "torch_memory_saver.py").write_text("raise ImportError('no saver')\n")
    process = server(directory, saves_memory=True, wait=True)
    assert process.stdout
    children = json.loads(process.stdout.readline())
    process.kill()
    _, words = process.communicate(timeout=30)
    assert children == []
    assert "cannot prepare processes of the engine: no saver" in words


def test_it_starts_anew_if_an_import_failed(directory: Path) -> None:
    (directory / "sglang/srt/managers/detokenizer_manager.py").unlink()
    [answer], words = answers(directory)
    assert answer.is_whole()
    assert answer["prepared"]
    assert not answer.was_imported_before()
    assert "could not import what it will need: No module named" in words


def test_after_a_killed_process_the_next_takes_its_place_and_then_processes_are_spawned(
    directory: Path,
) -> None:
    responses, words = answers(directory, prepared=2, killed=1, spawned=2)
    assert [answer.is_whole() for answer in responses] == [True, True]
    assert [answer["prepared"] for answer in responses] == [True, False]
    assert "a prepared process is gone" in words


def test_no_prepared_process_outlives_its_server(directory: Path) -> None:
    process = server(directory, prepared=3, wait=True)
    assert process.stdout
    children = [psutil.Process(pid) for pid in json.loads(process.stdout.readline())]
    assert len(children) == 3
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


@pytest.fixture
def module(plugin: Plugin) -> ModuleType:
    return plugin("startup.preforked_processes")


@pytest.mark.parametrize(
    "options",
    ["--interleave=all", "--membind=all", "--cpunodebind=0 --localalloc", ""],
    ids=["unknown", "not a number", "without a value", "none"],
)
def test_other_options_of_numactl_are_left_to_it(module: ModuleType, options: str) -> None:
    before = os.sched_getaffinity(0)
    assert not module.numa.bind(options.split())
    assert os.sched_getaffinity(0) == before


def test_the_processors_of_a_node_are_those_that_the_kernel_lists(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("2-4,8,10-11\n")
    monkeypatch.setattr(module.numa, "_NODES", tmp_path)
    assert module.numa.processors_of(1) == {2, 3, 4, 8, 10, 11}


def test_only_a_script_that_starts_this_python_has_options_of_numactl(
    module: ModuleType, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\nexec numactl --cpunodebind=1 --membind=1 /bin/python "$@"')
    assert module.numa.options(str(script), "/bin/python") == ["--cpunodebind=1", "--membind=1"]
    assert module.numa.options(str(script), "/usr/bin/python") == []
    script.write_text('#!/bin/sh\nexport A=1\nexec numactl --membind=1 /bin/python "$@"')
    assert module.numa.options(str(script), "/bin/python") == []
    assert module.numa.options(str(tmp_path / "absent"), "/bin/python") == []


@pytest.mark.parametrize(
    ("arguments", "ranks", "others"),
    [
        ("", 1, 1),
        ("--tp-size 8", 8, 1),
        ("--tp-size=8 --pp-size 2", 16, 1),
        ("--tp-size 16 --nnodes 2 --node-rank 0", 8, 1),
        ("--tp-size 16 --nnodes 2 --node-rank 1", 8, 0),
        ("--tp-size two --nnodes 0 --tp-size", 1, 1),
        ("--tp-size 1000000", 64, 1),
    ],
)
def test_a_process_is_prepared_for_each_local_rank_and_the_detokenizer(
    module: ModuleType, arguments: str, ranks: int, others: int
) -> None:
    words = ["launch_server.py", "--model-path", "model", *arguments.split()]
    assert module.parts(words) == [False] * (ranks + others)
    assert module.parts([*words, "--enable-memory-saver"]) == [True] * ranks + [False] * others


def test_ranks_that_another_process_starts_are_not_prepared(module: ModuleType) -> None:
    assert module.parts(["--tp-size", "2", "--dp-size", "4", "--enable-memory-saver"]) == [
        False,
        False,
    ]


def test_a_process_that_gets_no_command_ends(
    module: ModuleType, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(directory))
    pid, line = module.start(saves_memory=False)
    line.close()
    for _ in range(600):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.1)
    pytest.fail("it still runs")
