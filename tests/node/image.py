"""The image of the node test: this machine's Python with what the roles need, one image for all of
them.

    python -m tests.node.image ARCHIVE     # writes a docker-archive, prints the image's name

It needs neither a registry nor a builder, and downloads nothing. Two layers, written straight from
this machine's files: the environment (interpreter, the distributions that pyproject.toml asks for,
the system's libraries under them), which changes with a pin and is kept in a cache; and our
packages, which change with every edit. Files keep their times, because Python trusts a compiled
file by the time of its source: else every pod would compile torch anew.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.node import system, tars
from tests.node.system import SITE, add_environment
from tests.node.tars import Files, add_file, add_text, digest, walk, write_archive

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice-node"
REPOSITORY = "sluice-test"
EXTRAS = ("operator", "buffer", "rollout", "trainer", "local")
# Installed with --no-deps (see the Makefile): what they need of their requirements is in the
# extras.
WITHOUT_REQUIREMENTS = ("sglang", "megatron-core")
PACKAGES = (
    "sluice",
    "cli/sluice_cli",
    "migrate/sluice_migrate",
    "client/sluice_client",
    "operator/sluice_operator",
    "services/buffer/sluice_buffer",
    "services/rendezvous/sluice_rendezvous",
    "services/rollout/sluice_rollout",
    "services/trainer/sluice_trainer",
)
# Tests, headers, and compilers for GPUs: a gigabyte that is not needed on a CPU.
LEFT_OUT = re.compile(
    r"(^|/)(torch/(test/|include/|bin/(?!torch_shm_manager))|triton/backends/nvidia/(bin|lib|include)/"
    r"|pyarrow/(include|tests)/|sympy/.*/tests/)"
)
SLUICE_SCRIPT = (
    "#!/usr/local/bin/python\nimport sys\n\nfrom sluice_cli.entry import main\n\nsys.exit(main())\n"
)


def main(archive: Path) -> None:
    print(write(archive))


def name(*more: str) -> str:
    """repository:tag of the image that would be written now. more: additional distributions."""
    pins = [f"{distribution}=={metadata.version(distribution)}" for distribution in more]
    return f"{'-'.join([REPOSITORY, *more])}:{digest([_environment_key(), *pins, *_source_keys()])}"


def write(archive: Path, more: Sequence[str] = ()) -> str:
    """Write the image as a docker-archive; its name. more: distributions that are in it, with what
    they need."""
    CACHE.mkdir(parents=True, exist_ok=True)
    base, sources = _environment_layer(), archive.with_suffix(".sources")
    with tarfile.open(sources, "w") as tar:
        _add_sources(tar)
        for target, path in _files(_missing(more)).items():
            add_file(tar, path, target)
    image = name(*more)
    write_archive(archive, image, [base, sources], ["/bin/sh"], user="65532:65532")
    sources.unlink()
    return image


# -- the environment
# --------------------------------------------------------------------------------------------------


def _environment_layer() -> Path:
    """The layer, made once for each set of pins; older ones are removed."""
    path = CACHE / f"environment-{digest([_environment_key()])}.tar"
    if not path.exists():
        for old in CACHE.glob("environment-*"):
            old.unlink()
        partial = path.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            add_environment(tar, _files(distributions()))
        partial.rename(path)
    return path


def _environment_key() -> str:
    pins = [
        f"{distribution.metadata['Name']}=={distribution.version}"
        for distribution in distributions()
    ]
    code = [
        Path(module).read_text() for module in (__file__, str(system.__file__), str(tars.__file__))
    ]
    return "\n".join([sys.version, *code, *pins])


def distributions() -> list[metadata.Distribution]:
    """Distributions of pyproject.toml's extras, and all that those require, as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        *(line for extra in EXTRAS for line in optional[extra]),
    ]
    return _with_requirements([*requirements, *WITHOUT_REQUIREMENTS])


def _missing(more: Sequence[str]) -> list[metadata.Distribution]:
    """These, and what they need, without what is in the environment."""
    there = {distribution.metadata["Name"] for distribution in distributions()}
    return [
        distribution
        for distribution in _with_requirements(more)
        if distribution.metadata["Name"] not in there
    ]


def _with_requirements(lines: Iterable[str]) -> list[metadata.Distribution]:
    open_ = [Requirement(line) for line in lines]
    seen: set[tuple[str, frozenset[str]]] = set()
    installed: dict[str, metadata.Distribution] = {}
    while open_:
        requirement = open_.pop()
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if (key, frozenset(requirement.extras)) in seen or not _applies(requirement, ()):
            continue
        seen.add((key, frozenset(requirement.extras)))
        installed[key] = metadata.distribution(requirement.name)
        if key not in WITHOUT_REQUIREMENTS:
            needs = map(Requirement, installed[key].requires or [])
            open_ += [_unmarked(need) for need in needs if _applies(need, requirement.extras)]
    return [installed[key] for key in sorted(installed)]


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))


def _unmarked(requirement: Requirement) -> Requirement:
    requirement.marker = None
    return requirement


def _files(installed: Iterable[metadata.Distribution]) -> Files:
    site = Path(sysconfig.get_path("purelib"))
    files: Files = {}
    for distribution in installed:
        for entry in distribution.files or []:
            path = Path(str(distribution.locate_file(entry)))
            target = os.path.relpath(path, site)
            if not target.startswith("..") and path.is_file() and not LEFT_OUT.search(target):
                files[f"{SITE}/{target}"] = path
    return files


# -- our packages
# --------------------------------------------------------------------------------------------------


def _sources() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        directory = ROOT / package
        for path in walk([directory]):
            if "__pycache__" not in path.parts:
                yield f"{SITE}/{directory.name}/{path.relative_to(directory)}", path


def _source_keys() -> list[str]:
    return [
        f"{target} {hashlib.sha256(path.read_bytes()).hexdigest()}" for target, path in _sources()
    ]


def _add_sources(tar: tarfile.TarFile) -> None:
    for target, path in _sources():
        add_file(tar, path, target)
    add_text(tar, "usr/local/bin/sluice", SLUICE_SCRIPT, 0o755)
    on_cpu = f"/{SITE}/sluice/engines/sglang/cpu/path\nimport torchvision_on_cpu\n"
    add_text(tar, f"{SITE}/sluice_sglang_cpu.pth", on_cpu)
    _add_entry_points(tar)


def _add_entry_points(tar: tarfile.TarFile) -> None:
    """Add the metadata by which sluice finds the functions of other projects."""
    project = tomllib.loads((ROOT / "migrate" / "pyproject.toml").read_text())["project"]
    entries = "\n".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in table.items())
        for group, table in project["entry-points"].items()
    )
    info = f"{SITE}/sluice_rl_migrate-{project['version']}.dist-info"
    add_text(
        tar,
        f"{info}/METADATA",
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n",
    )
    add_text(tar, f"{info}/entry_points.txt", entries)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
