"""Steps of a release (.github/workflows/release.yml), to run on any machine.

python tools/release.py check v0.1.0     compare the tag with every place that states the version
python tools/release.py build DIRECTORY  build wheel and source distribution of each package
python tools/release.py notes v0.1.0     print the section of CHANGELOG.md
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def packages() -> list[Path]:
    """Folders that hold a distribution: the root, and those with a `pyproject.toml` below it."""
    return [ROOT, *sorted(path.parent for path in ROOT.glob("*/pyproject.toml"))]


def versions() -> dict[str, str]:
    """Return the version that each file states, by its name."""
    texts = {
        "charts/sluice/Chart.yaml": r"^version: (\S+)$",
        "charts/sluice/Chart.yaml (appVersion)": r"^appVersion: (\S+)$",
        "Makefile": r"^TAG +\?= (\S+)$",
        "docker/Dockerfile": r"^ARG VERSION=(\S+)$",
        "CHANGELOG.md": r"^## \[(\d\S*)\]",
    }
    stated = {}
    for package in packages():
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        stated[str((package / "pyproject.toml").relative_to(ROOT))] = project["version"]
    for name, pattern in texts.items():
        match = re.search(pattern, (ROOT / name.split(" ")[0]).read_text(), re.MULTILINE)
        stated[name] = match[1] if match else "(no version)"
    return stated


def check(tag: str) -> None:
    """Exit with the places that state another version than `tag`."""
    wrong = {name: version for name, version in versions().items() if f"v{version}" != tag}
    if wrong:
        places = ", ".join(f"{name} {version}" for name, version in wrong.items())
        sys.exit(f"tag {tag}, but {places}: set the version there, or move the tag")


def notes(tag: str) -> str:
    """Return the text of a version's section in CHANGELOG.md."""
    sections = re.split(r"^## \[([^\]]+)\].*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    version = tag.removeprefix("v")
    if version not in texts:
        sys.exit(f"CHANGELOG.md has no section [{version}]: rename [Unreleased]")
    return texts[version].strip()


def build(directory: str) -> None:
    """Build a wheel and a source distribution of each package into `directory`."""
    for package in packages():
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", directory, str(package)], check=True
        )


def main() -> None:
    match sys.argv[1:]:
        case ["check", tag]:
            check(tag)
        case ["build", directory]:
            build(directory)
        case ["notes", tag]:
            print(notes(tag))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
