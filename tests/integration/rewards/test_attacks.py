"""Attacks of programs on the sandbox, on machines with more and with fewer of its layers."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integration.rewards import attacks
from tests.integration.rewards.machines import MACHINES, ROOT, environment

on_every_machine = pytest.mark.parametrize("machine", MACHINES)


@cache
def outcome(machine: str) -> dict[str, Any]:
    command = MACHINES[machine].command(str(Path(attacks.__file__)))
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=240
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@on_every_machine
def test_the_machine_has_these_layers_and_says_why_not_the_others(machine: str) -> None:
    layers = MACHINES[machine].layers
    assert outcome(machine)["isolation"] == layers
    assert set(outcome(machine)["missing"]) == {"uid", "namespaces", "landlock"} - set(
        layers.split("+")
    )


@on_every_machine
@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_no_way_of_an_attack_succeeds(machine: str, attack: str) -> None:
    assert outcome(machine)["attacks"][attack] == ["ok", "[]\n", ""]


@on_every_machine
def test_others_files_processes_and_objects_are_untouched(machine: str) -> None:
    answer = outcome(machine)
    assert (answer["untouched"], answer["alive"], answer["segment"]) == (True, True, True)


@on_every_machine
def test_threads_are_limited(machine: str) -> None:
    """The kernel keeps the limit exactly if the program has another user; else the watch does."""
    status, _, error = outcome(machine)["bombs"]["threads"]
    own_user = "uid" in MACHINES[machine].layers
    expected = (
        ("error", "can't start new thread") if own_user else ("limit", "more than 256 threads")
    )
    assert (status, expected[1] in error) == (expected[0], True), error


@on_every_machine
@pytest.mark.parametrize(
    ("bomb", "excess"),
    [
        ("files", ["more than 4096 files"]),
        ("bytes", ["more than 64 MiB in files"]),
        (
            "directories in directories",
            ["more than 4096 files", "a directory that cannot be looked into (File name "],
        ),
    ],
)
def test_files_are_limited(machine: str, bomb: str, excess: list[str]) -> None:
    """The size of the program's file system limits it, if it has one; else the watch does."""
    status, _, error = outcome(machine)["bombs"][bomb]
    in_memory = "namespaces" in MACHINES[machine].layers
    expected = ("error", ["No space left on device"]) if in_memory else ("limit", excess)
    assert (status, any(text in error for text in expected[1])) == (expected[0], True), error


@on_every_machine
def test_an_unreadable_directory_ends_its_program(machine: str) -> None:
    status, _, error = outcome(machine)["bombs"]["a directory that nobody can look into"]
    looked_into = {"uid", "namespaces"} & set(MACHINES[machine].layers.split("+"))
    assert status == ("error" if looked_into else "limit"), error


@on_every_machine
@pytest.mark.parametrize(
    ("reach", "stops"),
    [
        ("reads a file of its user's", {"landlock"}),
        ("writes a file of its user's", {"uid", "namespaces", "landlock"}),
        ("writes to the temporary directory", {"namespaces", "landlock"}),
    ],
)
def test_what_stays_open_without_a_layer_is_what_the_documentation_says(
    machine: str, reach: str, stops: set[str]
) -> None:
    stopped = stops & set(MACHINES[machine].layers.split("+"))
    assert outcome(machine)["reach"][reach] == ("error" if stopped else "ok")


@on_every_machine
def test_what_honest_programs_do_still_works(machine: str) -> None:
    assert outcome(machine)["legitimate"] == ["ok", "so 16 (False, 80, True) True\n", ""]


@on_every_machine
def test_calls_of_32_bit_programs_end_the_program(machine: str) -> None:
    if (answer := outcome(machine)["int 0x80"]) is None:
        pytest.skip("other machines have no such door")
    assert answer == ["error", "", ""]
