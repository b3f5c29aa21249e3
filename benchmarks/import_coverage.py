"""Launch scripts of a checkout of slime or verl, as `sluice import` and the real bash read them.

    python benchmarks/import_coverage.py slime ~/slime
    python benchmarks/import_coverage.py verl ~/verl --details

Every script that starts a training is read twice: by the real bash in our sandbox (`--exact`), and
by our reader. The words behind the entry point are compared, then both are imported.
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
from sluice_migrate.verl.importer import import_command
from sluice_migrate.verl.importer import launch as verl_launch

HOME = {"HOME": "${HOME}"}
"""For both: `$HOME` stays what it is."""
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
    """One script. words: how ours are beside bash's. result: what the import came to."""

    path: str
    words: str
    result: str
    differing: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def scripts(root: Path) -> Iterator[Path]:
    yield from sorted(path for path in root.rglob("*.sh") if path.is_file())


def outcome(bash: sandboxed.ConfinedBash, project: str, root: Path, path: Path) -> Outcome | None:
    """None for a script that starts no training."""
    text, name = path.read_text(errors="replace"), str(path.relative_to(root))
    if not _MENTIONS[project].search(text):
        return None
    try:
        ours = read(text, path, HOME)
    except ScriptError as error:
        return Outcome(name, "not read", f"not read: {error}")
    theirs = bash.run(text, path, HOME)
    launched, real = (_words(project, script) for script in (ours, theirs))
    if launched is None and real is None:
        return None
    result = Outcome(name, "", _result(project, ours, name))
    if launched is not None and real is not None:
        result.fields = _wrong_fields(project, ours, theirs, name)
    result.words = _compare(launched, real, result)
    result.unknown = _unknown(project, ours, name)
    return result


def _words(project: str, script: Script) -> list[Argument] | None:
    try:
        command, at = _LAUNCH[project](script, "")
    except ImportFailedError:
        return None
    return list(command.words[at:])


def _compare(ours: list[Argument] | None, real: list[Argument] | None, result: Outcome) -> str:
    if real is None:
        return NOTHING
    if ours is None:
        return "we start nothing"
    texts = [word.text for word in ours]
    if texts == [word.text for word in real]:
        return "equal"
    wanted = collections.Counter(word.text for word in real)
    silent = [
        word for word in ours if not wanted[word.text] and not word.missing and not word.conditional
    ]
    known = collections.Counter(texts)
    result.differing = [word.text for word in silent] + [
        f"bash: {word.text}" for word in real if not known[word.text]
    ]
    lacking = sum((wanted - known).values()) > sum(bool(w.missing or w.conditional) for w in ours)
    return "different, silently" if silent or lacking else "different, and said"


def _wrong_fields(project: str, ours: Script, theirs: Script, name: str) -> list[str]:
    """Fields in which the job of our reader is not that of bash, and that no note names which the
    job of bash has not got, too.
    """
    try:
        draft, real = _draft(project, ours, name), _draft(project, theirs, name)
    except Exception as error:
        return [] if isinstance(error, ImportFailedError) else [f"{type(error).__name__}"]
    drop_refused_fields(draft), drop_refused_fields(real)
    mine, wanted = dict(_flat(draft.spec, "")), dict(_flat(real.spec, ""))
    paths = [path for path in mine | wanted if mine.get(path) != wanted.get(path)]
    named = [f"{note.subject} {note.text}" for note in draft.notes if note not in real.notes]
    return [
        f"{path}: {mine.get(path)!r}, bash {wanted.get(path)!r}"
        for path in paths
        if not any(_names(note, path, draft, real) for note in named)
    ]


def _names(note: str, path: str, draft: Draft, real: Draft) -> bool:
    origins = {draft.origins.get(path), real.origins.get(path), path, path.partition("[")[0]}
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
    wrong = drop_refused_fields(draft)
    return "a valid job" if not wrong else "a job that lacks something"


def _unknown(project: str, script: Script, name: str) -> list[str]:
    try:
        draft = _draft(project, script, name)
    except Exception:
        return []
    return [
        note.subject.split()[0].partition("=")[0]
        for note in draft.notes
        if "sluice knows no" in note.text
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
    for one in outcomes:
        if one.words != "equal" or one.result != "a valid job":
            print(f"\n{one.path}: {one.words}; {one.result}")
            for word in [*one.fields, *one.differing[:_SHOWN]]:
                print(f"    {word[:_WIDTH]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", choices=sorted(_LAUNCH))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--details", action="store_true", help="what differs, script by script")
    options = parser.parse_args()
    root = options.checkout.resolve()
    with sandboxed.confined_bash() as bash:
        tried = [outcome(bash, options.project, root, path) for path in scripts(root)]
    outcomes = [one for one in tried if one]
    today = datetime.date.today().isoformat()
    print(f"{options.project} {commit_of(root)}, {today}: {len(outcomes)} launch scripts")
    started = [one for one in outcomes if one.words != NOTHING]
    counted("words behind the entry point, beside bash's", [one.words for one in outcomes])
    counted(
        f"fields of the {len(started)} that bash starts",
        ["one is wrong, and no note names it" if o.fields else "none is wrong" for o in started],
    )
    counted("import", [one.result for one in outcomes])
    counted("names that sluice does not know", [name for o in outcomes for name in o.unknown])
    if options.details:
        detailed(outcomes)


if __name__ == "__main__":
    main()
