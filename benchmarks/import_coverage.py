"""Compares how `sluice import` and bash read the launch scripts of a checkout of slime or verl.

    python benchmarks/import_coverage.py slime ~/slime
    python benchmarks/import_coverage.py verl ~/verl --details

Every script that starts a training is read twice: by bash in the sandbox (`--exact`), and by the
reader of `sluice import`. The words after the entry point are compared, then both are imported.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sluice_migrate.bash import sandboxed
from sluice_migrate.bash.lexer import ScriptError
from sluice_migrate.bash.reading import read
from sluice_migrate.bash.script import Argument, Script
from sluice_migrate.draft import Draft, ImportFailedError
from sluice_migrate.manifest import drop_refused_fields
from sluice_migrate.slime.importer import import_slime
from sluice_migrate.slime.importer import launch as slime_launch
from sluice_migrate.translation import UNKNOWN_SETTING
from sluice_migrate.verl.importer import import_command
from sluice_migrate.verl.importer import launch as verl_launch

# `$HOME` stays as it is for both.
HOME = {"HOME": "${HOME}"}
NOTHING = "bash starts nothing (without arguments or variables)"
_SHOWN, _WIDTH = 8, 300
_LAUNCH = {"slime": slime_launch, "verl": verl_launch}
_MENTIONS = {
    "slime": re.compile(r"train(_async)?\.py"),
    "verl": re.compile(r"main_ppo|main_dapo|fully_async_main|sft_trainer"),
}
_IMPORT = {"slime": import_slime, "verl": import_command}


@dataclass(slots=True)
class Outcome:
    """A script. words: how the words compare with those of bash. result: that of the import."""

    path: str
    words: str
    result: str
    differing: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def scripts(root: Path) -> Iterator[Path]:
    yield from sorted(path for path in root.rglob("*.sh") if path.is_file())


def outcome(bash: sandboxed.ConfinedBash, project: str, root: Path, path: Path) -> Outcome | None:
    """Compare a script; None if it starts no training."""
    text, name = path.read_text(errors="replace"), str(path.relative_to(root))
    if not _MENTIONS[project].search(text):
        return None
    try:
        parsed = read(text, path, HOME)
    except ScriptError as error:
        return Outcome(name, "not read", f"not read: {error}")
    executed = bash.run(text, path, HOME)
    parsed_words, bash_words = (_words(project, script) for script in (parsed, executed))
    if parsed_words is None and bash_words is None:
        return None
    result = Outcome(name, "", _result(project, parsed, name))
    if parsed_words is not None and bash_words is not None:
        result.fields = _wrong_fields(project, parsed, executed, name)
    result.words = _compare(parsed_words, bash_words, result)
    result.unknown = _unknown(project, parsed, name)
    return result


def _words(project: str, script: Script) -> list[Argument] | None:
    try:
        command, at = _LAUNCH[project](script, "")
    except ImportFailedError:
        return None
    return list(command.words[at:])


def _compare(
    parsed: list[Argument] | None, executed: list[Argument] | None, result: Outcome
) -> str:
    if executed is None:
        return NOTHING
    if parsed is None:
        return "the reader starts nothing"
    texts = [word.text for word in parsed]
    if texts == [word.text for word in executed]:
        return "equal"
    expected = collections.Counter(word.text for word in executed)
    silent = [
        word
        for word in parsed
        if not expected[word.text] and not word.missing and not word.conditional
    ]
    counts = collections.Counter(texts)
    result.differing = [word.text for word in silent] + [
        f"bash: {word.text}" for word in executed if not counts[word.text]
    ]
    uncertain = sum(bool(word.missing or word.conditional) for word in parsed)
    lacking = sum((expected - counts).values()) > uncertain
    return "different, silently" if silent or lacking else "different, and reported"


def _wrong_fields(project: str, parsed: Script, executed: Script, name: str) -> list[str]:
    """Return fields in which the jobs of reader and bash differ, unless a note of the reader
    names them.
    """
    try:
        draft, expected = _draft(project, parsed, name), _draft(project, executed, name)
    except Exception as error:
        return [] if isinstance(error, ImportFailedError) else [f"{type(error).__name__}"]
    drop_refused_fields(draft), drop_refused_fields(expected)
    actual, bash_fields = dict(_flat(draft.spec, "")), dict(_flat(expected.spec, ""))
    paths = [path for path in actual | bash_fields if actual.get(path) != bash_fields.get(path)]
    notes = [f"{note.subject} {note.text}" for note in draft.notes if note not in expected.notes]
    return [
        f"{path}: {actual.get(path)!r}, bash {bash_fields.get(path)!r}"
        for path in paths
        if not any(_names(note, path, draft, expected) for note in notes)
    ]


def _names(note: str, path: str, draft: Draft, expected: Draft) -> bool:
    origins = {draft.origins.get(path), expected.origins.get(path), path, path.partition("[")[0]}
    return any(origin in note for origin in origins if origin)


def _flat(node: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for at, value in enumerate(node):
            yield from _flat(value, f"{path}[{at}]")
    else:
        yield path, node


def _draft(project: str, script: Script, name: str) -> Draft:
    return _IMPORT[project](script, name)


def _result(project: str, script: Script, name: str) -> str:
    try:
        draft = _draft(project, script, name)
    except ImportFailedError as error:
        return f"refused: {str(error).partition(': ')[2]}"
    except Exception as error:
        return f"error: {type(error).__name__}"
    problem = drop_refused_fields(draft)
    return "a valid job" if not problem else "a job that is not valid yet"


def _unknown(project: str, script: Script, name: str) -> list[str]:
    try:
        draft = _draft(project, script, name)
    except Exception:
        return []
    return [
        note.subject.split()[0].partition("=")[0]
        for note in draft.notes
        if note.text == UNKNOWN_SETTING
    ]


def commit_of(root: Path) -> str:
    answer = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True
    )
    return answer.stdout.strip() or "no commit"


def counted(title: str, values: list[str]) -> None:
    print(f"\n{title}")
    for value, count in collections.Counter(values).most_common():
        print(f"{count:6}  {value}")


def detailed(outcomes: list[Outcome]) -> None:
    for script in outcomes:
        if script.words != "equal" or script.result != "a valid job":
            print(f"\n{script.path}: {script.words}; {script.result}")
            for word in [*script.fields, *script.differing[:_SHOWN]]:
                print(f"    {word[:_WIDTH]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", choices=sorted(_LAUNCH))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--details", action="store_true", help="print the differences per script")
    options = parser.parse_args()
    root = options.checkout.resolve()
    with sandboxed.confined_bash() as bash:
        results = [outcome(bash, options.project, root, path) for path in scripts(root)]
    outcomes = [result for result in results if result]
    today = datetime.date.today().isoformat()
    print(f"{options.project} {commit_of(root)}, {today}: {len(outcomes)} launch scripts")
    started = [script for script in outcomes if script.words != NOTHING]
    counted("words after the entry point, compared with bash", [o.words for o in outcomes])
    counted(
        f"fields of the {len(started)} that bash starts",
        ["a wrong field without a note" if o.fields else "no wrong field" for o in started],
    )
    counted("import", [o.result for o in outcomes])
    counted("names that sluice does not know", [name for o in outcomes for name in o.unknown])
    if options.details:
        detailed(outcomes)


if __name__ == "__main__":
    main()
