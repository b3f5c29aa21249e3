"""Links, anchors, files and commands that pages and examples name exist; every manifest in them is
valid."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from ruamel.yaml.comments import CommentedMap

from sluice.api import load_job, load_pool, parse_pool
from sluice.api.pool import KIND as POOL
from sluice.api.schema.explain import explained
from sluice.api.schema.load import parse_documents, parse_job
from sluice_cli.main import app
from tests.pages import PAGES, name_of, shell_lines
from tests.tools import ROOT

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
# Ends of a shell command.
SHELL = {"|", "||", "&&", ">", ";", "&"}
SKELETON = """\
apiVersion: sluice.dev/v1alpha1
kind: RLJob
metadata: {name: skeleton}
spec:
  model: {path: model}
  data: {prompts: [{path: rows.jsonl}]}
  reward: {type: math}
  trainer: {steps: 10}
"""


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each fenced block of a page in one of the languages."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if match[1] in languages:
            yield page.read_text()[: match.start()].count("\n") + 2, match[2]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (fragment and fragment not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    rooms = "benchmarks|charts|cli|crds|docker|docs|examples|operator|protos|services|sluice|tests"
    named = re.findall(rf"`((?:{rooms})/[\w./-]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def completed(document: CommentedMap) -> CommentedMap:
    """A part of a spec as a whole job: what is missing is the skeleton's."""
    whole: CommentedMap = parse_documents(SKELETON, "skeleton")[0]
    for group, fields in document.items():
        current = whole["spec"].get(group)
        alone = group in ("reward", "data") or not isinstance(current, dict)
        whole["spec"][group] = fields if alone else current | fields
    if "epochs" in whole["spec"]["trainer"]:
        whole["spec"]["trainer"].pop("steps")
    if whole["spec"].get("algorithm", {}).get("loss", {}).get("type") == "sft":
        whole["spec"].pop("reward")
    whole["spec"]["data"].setdefault("prompts", [{"path": "rows.jsonl"}])
    return whole


MANIFESTS = [(page, line, text) for page in PAGES for line, text in blocks(page, "yaml")]


@pytest.mark.parametrize(
    ("page", "line", "text"),
    MANIFESTS,
    ids=[f"{name_of(page)}:{line}" for page, line, _ in MANIFESTS],
)
def test_every_manifest_of_a_page_is_valid(page: Path, line: int, text: str) -> None:
    document = parse_documents(text, f"{name_of(page)}:{line}")[0]
    if document.get("kind") == POOL:
        parse_pool(document, f"{name_of(page)}:{line}")
        return
    parse_job(document if "kind" in document else completed(document), f"{name_of(page)}:{line}")


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_every_example_is_valid(path: Path) -> None:
    if f"kind: {POOL}" in path.read_text():
        load_pool(path)
    else:
        load_job(path)


def block_commands() -> Iterator[tuple[str, str]]:
    """(where, command line) of every call of sluice in a block of a page."""
    for page in PAGES:
        for _, text in blocks(page, "", "sh", "bash", "console"):
            yield from (
                (name_of(page), line) for line in shell_lines(text) if line.startswith("sluice ")
            )


def commands() -> Iterator[tuple[str, str]]:
    """(where, command line) of every call of sluice in a page or in the head of an example."""
    yield from block_commands()
    for page in PAGES:
        spans = re.findall(r"`(sluice [^`]+)`", prose(page).replace("\n", " "))
        yield from ((name_of(page), span.replace("\\|", "|")) for span in spans)
    for path in EXAMPLES:
        heads = re.findall(r"^#\s+((?:\.venv/bin/)?sluice .*)$", path.read_text(), re.MULTILINE)
        yield from ((name_of(path), head.removeprefix(".venv/bin/")) for head in heads)


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts} | {"--help"}


COMMANDS = sorted(set(commands()))


@pytest.mark.parametrize(
    ("where", "line"), COMMANDS, ids=[f"{where}: {line}" for where, line in COMMANDS]
)
def test_every_command_exists_with_its_options(where: str, line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line.replace("[", " ").replace("]", " ").partition(" | ")[0])[1:]
    while hasattr(command, "commands") and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        assert words[0] in command.list_commands(None), f"{where}: sluice has no {words[0]}"
        command = command.get_command(None, words.pop(0))
    unknown = [
        w
        for w in words
        if w.startswith("-") and len(w) > 1 and w.split("=")[0] not in options(command)
    ]
    assert unknown == []


WHOLE = sorted(
    {
        (where, line)
        for where, line in block_commands()
        if not re.search(r"\.\.\.|\[OPTIONS\]", line)
    }
)


@pytest.mark.parametrize(
    ("where", "line"), WHOLE, ids=[f"{where}: {line}" for where, line in WHOLE]
)
def test_every_command_of_a_block_parses(where: str, line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = list(itertools.takewhile(lambda word: word not in SHELL, shlex.split(line)[1:]))
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    with command.make_context(command.name, words) as context:
        for setting in context.params.get("overrides") or ():
            field = re.sub(r"\[\d+\]", "[]", setting.partition("=")[0])
            if not field.startswith("metadata."):
                explained(field)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_script_and_module_that_a_block_runs_is_there(page: Path) -> None:
    lines = [line for _, text in blocks(page, "", "sh", "bash") for line in shell_lines(text)]
    calls = [match for line in lines if (match := re.search(r"\bpython (-m )?([\w./]+)", line))]
    lacking = [
        name
        for _, module, name in (match.group(0, 1, 2) for match in calls)
        if not (_is_module(name) if module else (ROOT / name).exists())
    ]
    assert lacking == []


def _is_module(name: str) -> bool:
    """True if `python -m` has it. No module is imported: SGLang alone would take ten seconds."""
    top, *rest = name.split(".")
    package = find_spec(top)
    if package is None or not rest:
        return package is not None
    inside = [Path(place, *rest) for place in package.submodule_search_locations or ()]
    return any(path.is_dir() or path.with_suffix(".py").exists() for path in inside)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_of_a_page_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {f"test-{room}" for room in rooms_of_tests()}
    named = re.findall(r"`make ([\w-]+)", page.read_text())
    named += [
        word
        for _, text in blocks(page, "")
        for word in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)
    ]
    assert [name for name in named if name not in targets] == []


def rooms_of_tests() -> dict[str, list[str]]:
    """Return the folders of each room for which the Makefile has a target `test-ROOM`."""
    text = (ROOT / "Makefile").read_text()
    (names,) = re.findall(r"^ROOMS := (.*)$", text, re.MULTILINE)
    folders = dict(re.findall(r"^tests_(\w+) *:= (.*)$", text, re.MULTILINE))
    assert sorted(folders) == names.split()
    return {room: re.findall(r"tests/(?:unit|integration)/\w+", folders[room]) for room in folders}


def test_every_folder_of_tests_belongs_to_one_room() -> None:
    in_rooms = [folder for folders in rooms_of_tests().values() for folder in folders]
    with_tests = {
        str(path.parent.relative_to(ROOT))
        for level in ("unit", "integration")
        for path in (ROOT / "tests" / level).glob("*/test_*.py")
    }
    assert sorted(name for name in in_rooms if "/test_" not in name) == sorted(with_tests)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_of_a_page_compiles(page: Path) -> None:
    for line, text in blocks(page, "python"):
        compile("\n" * (line - 1) + text, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_pages_are_read() -> None:
    """There are manifests, commands and examples for the other tests to go through."""
    assert len(MANIFESTS) > 10
    assert len(COMMANDS) > 20
    assert len(EXAMPLES) > 8
