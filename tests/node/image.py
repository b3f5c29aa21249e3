"""The image of the node test: this machine's Python with what the roles need, one image for all of
them.

    python tests/node/image.py ARCHIVE     # writes a docker-archive, prints the image's name

It needs neither a registry nor a builder, and downloads nothing. Two layers, written straight from
this machine's files: the environment (interpreter, the distributions that pyproject.toml asks for,
the system's libraries under them), which changes with a pin and is kept in a cache; and our
packages, which change with every edit. Files keep their times, because Python trusts a compiled
file by the time of its source: else every pod would compile torch anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice-node"
REPOSITORY = "sluice-test"
EXTRAS = ("operator", "buffer", "rollout", "trainer", "local")
WITHOUT_REQUIREMENTS = ("sglang", "megatron-core")
"""Installed with --no-deps (see the Makefile): what they need of their requirements is in the
extras."""
PACKAGES = (
    "sluice",
    "cli/sluice_cli",
    "operator/sluice_operator",
    "services/buffer/sluice_buffer",
    "services/rendezvous/sluice_rendezvous",
    "services/rollout/sluice_rollout",
    "services/trainer/sluice_trainer",
)
COMMANDS = (
    "sh",
    "lscpu",
    "cat",
    "cp",
    "date",
    "env",
    "head",
    "id",
    "kill",
    "ls",
    "mkdir",
    "mv",
    "nproc",
    "rm",
    "sleep",
    "tail",
    "uname",
)
LEFT_OUT = re.compile(
    r"(^|/)(torch/(test/|include/|bin/(?!torch_shm_manager))|triton/backends/nvidia/(bin|lib|include)/"
    r"|pyarrow/(include|tests)/|sympy/.*/tests/)"
)
"""Tests, headers, and compilers for GPUs: a gigabyte that nothing on a CPU opens."""
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
BASE, SITE = "opt/python", f"usr/local/lib/{VERSION}/site-packages"
SLUICE_SCRIPT = (
    "#!/usr/local/bin/python\nimport sys\n\nfrom sluice_cli.entry import main\n\nsys.exit(main())\n"
)
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n"
    "nonroot:x:65532:65532:nonroot:/home/nonroot:/bin/sh\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
LINKS = {
    "bin": "usr/bin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "usr/local/bin/python3": "python",
}
Files = dict[str, Path]
"""Path in the image -> file of this machine."""


def main(archive: Path) -> None:
    print(write(archive))


def name() -> str:
    """repository:tag of the image that would be written now."""
    return f"{REPOSITORY}:{_digest([_environment_key(), *_source_keys()])}"


def write(archive: Path) -> str:
    """Write the image as a docker-archive; its name."""
    CACHE.mkdir(parents=True, exist_ok=True)
    base, sources = _environment_layer(), archive.with_suffix(".sources")
    with tarfile.open(sources, "w") as tar:
        _add_sources(tar)
    image = name()
    _write_archive(archive, image, [base, sources])
    sources.unlink()
    return image


# -- the environment
# --------------------------------------------------------------------------------------------------


def _environment_layer() -> Path:
    """The layer, made once for each set of pins; older ones are removed."""
    path = CACHE / f"environment-{_digest([_environment_key()])}.tar"
    if not path.exists():
        for old in CACHE.glob("environment-*"):
            old.unlink()
        partial = path.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            _add_environment(tar)
        partial.rename(path)
    return path


def _environment_key() -> str:
    pins = [f"{each.metadata['Name']}=={each.version}" for each in distributions()]
    return "\n".join([sys.version, Path(__file__).read_text(), *pins])


def distributions() -> list[metadata.Distribution]:
    """Distributions of pyproject.toml's extras, and all that those require, as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in optional[extra])]
    open_ = [Requirement(line) for line in [*wanted, *WITHOUT_REQUIREMENTS]]
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


def _add_environment(tar: tarfile.TarFile) -> None:
    files = dict(sorted((_interpreter() | _site_packages() | _tools()).items()))
    files |= _libraries(files)
    for target, source in files.items():
        _add_file(tar, source, target)
    for target, text in (ACCOUNTS | {"usr/local/pyvenv.cfg": f"home = /{BASE}/bin\n"}).items():
        _add_text(tar, target, text)
    for target, link in (LINKS | {"usr/local/bin/python": f"/{BASE}/bin/python"}).items():
        _add_special(tar, target, tarfile.SYMTYPE, 0o777, link)
    for target, mode, owner in (
        ("tmp", 0o1777, 0),
        ("home/nonroot", 0o755, 65532),
        ("proc", 0o755, 0),
    ):
        _add_special(tar, target, tarfile.DIRTYPE, mode, owner=owner)


def _interpreter() -> Files:
    """The base interpreter and its library, without its tests and without what is installed into
    it."""
    library = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "idlelib", "ensurepip", "__pycache__"}
    top = [
        entry
        for entry in library.iterdir()
        if entry.name not in skip and not entry.name.startswith("config-")
    ]
    top.append(library / "__pycache__")
    files = {f"{BASE}/lib/{VERSION}/{path.relative_to(library)}": path for path in _walk(top)}
    return files | {f"{BASE}/bin/python": Path(sys.executable).resolve()}


def _site_packages() -> Files:
    site = Path(sysconfig.get_path("purelib"))
    files: Files = {}
    for distribution in distributions():
        for entry in distribution.files or []:
            path = Path(str(distribution.locate_file(entry)))
            target = os.path.relpath(path, site)
            if not target.startswith("..") and path.is_file() and not LEFT_OUT.search(target):
                files[f"{SITE}/{target}"] = path
    return files


def _tools() -> Files:
    """Programs that SGLang calls (lscpu); a shell and what one wants in it, for `kubectl exec`."""
    return {
        f"usr/bin/{tool}": Path(path).resolve() for tool in COMMANDS if (path := shutil.which(tool))
    }


def _libraries(files: Files) -> Files:
    """The system's libraries under these files, and the loader, which looks where the C library
    is.
    """
    binaries = [path for target, path in files.items() if _is_binary(path, target)]
    lines = [line for part in _chunks(binaries, 200) for line in _ldd(part)]
    taken = {path.resolve() for path in files.values()}
    linked = {
        Path(match[1]) for line in lines if (match := re.search(r"(?:=> )?(/\S+) \(0x", line))
    }
    c_library = next(path for path in linked if path.name == "libc.so.6").resolve().parent
    libraries = {
        f"{c_library.relative_to('/')}/{path.name}": path.resolve()
        for path in [*linked, *c_library.glob("libgcc_s.so.1"), *c_library.glob("libnss_*.so.2")]
        if path.resolve() not in taken and not path.name.startswith("ld-linux")
    }
    loader = next(path for path in linked if path.name.startswith("ld-linux"))
    return libraries | {f"usr{loader.parent}/{loader.name}": loader.resolve()}


def _is_binary(path: Path, target: str) -> bool:
    if ".so" not in path.name and "/bin/" not in f"/{target}":
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _ldd(paths: list[Path]) -> list[str]:
    return subprocess.run(["ldd", *paths], text=True, capture_output=True).stdout.splitlines()


# -- our packages
# --------------------------------------------------------------------------------------------------


def _sources() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        directory = ROOT / package
        for path in _walk([directory]):
            if "__pycache__" not in path.parts:
                yield f"{SITE}/{directory.name}/{path.relative_to(directory)}", path


def _source_keys() -> list[str]:
    return [
        f"{target} {hashlib.sha256(path.read_bytes()).hexdigest()}" for target, path in _sources()
    ]


def _add_sources(tar: tarfile.TarFile) -> None:
    for target, path in _sources():
        _add_file(tar, path, target)
    _add_text(tar, "usr/local/bin/sluice", SLUICE_SCRIPT, 0o755)
    on_cpu = f"/{SITE}/sluice/engines/sglang/cpu/path\nimport torchvision_on_cpu\n"
    _add_text(tar, f"{SITE}/sluice_sglang_cpu.pth", on_cpu)


# -- tar files
# --------------------------------------------------------------------------------------------------


def _walk(entries: Iterable[Path]) -> Iterator[Path]:
    for entry in sorted(entries):
        if entry.is_dir():
            yield from _walk(entry.iterdir())
        elif entry.is_file():
            yield entry


def _add_file(tar: tarfile.TarFile, source: Path, target: str) -> None:
    """Owned by root and readable by all, whatever this machine thinks of the file."""
    with source.open("rb") as file:
        status = os.fstat(file.fileno())
        info = tarfile.TarInfo(target)
        info.size, info.mtime = status.st_size, int(status.st_mtime)
        info.mode = 0o755 if status.st_mode & 0o111 else 0o644
        tar.addfile(info, file)


def _add_text(tar: tarfile.TarFile, target: str, text: str, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(target)
    info.size, info.mode = len(text.encode()), mode
    tar.addfile(info, io.BytesIO(text.encode()))


def _add_special(
    tar: tarfile.TarFile, target: str, kind: bytes, mode: int, link: str = "", owner: int = 0
) -> None:
    info = tarfile.TarInfo(target)
    info.type, info.mode, info.linkname, info.uid, info.gid = kind, mode, link, owner, owner
    tar.addfile(info)


def _write_archive(archive: Path, image: str, layers: list[Path]) -> None:
    """Write the layers as `docker save` does."""
    digests = [_file_digest(layer) for layer in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "Cmd": ["/bin/sh"],
            "WorkingDir": "/tmp",
            "User": "65532:65532",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{"created_by": "environment"}, {"created_by": "sources"}],
    }
    text = json.dumps(config)
    config_name = f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    names = [f"{digest}/layer.tar" for digest in digests]
    manifest = [{"Config": config_name, "RepoTags": [image], "Layers": names}]
    with tarfile.open(archive, "w") as tar:
        _add_text(tar, config_name, text)
        _add_text(tar, "manifest.json", json.dumps(manifest))
        for layer, layer_name in zip(layers, names, strict=True):
            _add_file(tar, layer, layer_name)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _chunks(paths: list[Path], size: int) -> Iterator[list[Path]]:
    for start in range(0, len(paths), size):
        yield paths[start : start + size]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
