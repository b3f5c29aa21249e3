"""Part that all images of node tests have: this machine's Python, a shell, the system's libraries
under what they hold.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.node.tars import Files, add_file, add_special, add_text, walk

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
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
BASE, SITE = "opt/python", f"usr/local/lib/{VERSION}/site-packages"
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


def add_environment(tar: tarfile.TarFile, packages: Files) -> None:
    """Add a whole root file system. packages: what is to be in its Python's site-packages."""
    files = dict(sorted((_interpreter() | packages | _tools()).items()))
    files |= _libraries(files)
    for target, source in files.items():
        add_file(tar, source, target)
    for target, text in (ACCOUNTS | {"usr/local/pyvenv.cfg": f"home = /{BASE}/bin\n"}).items():
        add_text(tar, target, text)
    for target, link in (LINKS | {"usr/local/bin/python": f"/{BASE}/bin/python"}).items():
        add_special(tar, target, tarfile.SYMTYPE, 0o777, link)
    for target, mode, owner in (
        ("tmp", 0o1777, 0),
        ("home/nonroot", 0o755, 65532),
        ("proc", 0o755, 0),
    ):
        add_special(tar, target, tarfile.DIRTYPE, mode, owner=owner)


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
    files = {f"{BASE}/lib/{VERSION}/{path.relative_to(library)}": path for path in walk(top)}
    return files | {f"{BASE}/bin/python": Path(sys.executable).resolve()}


def _tools() -> Files:
    """Programs that SGLang calls (lscpu); a shell and what one wants in it, for `kubectl exec`."""
    return {
        f"usr/bin/{tool}": Path(path).resolve() for tool in COMMANDS if (path := shutil.which(tool))
    }


def _libraries(files: Files) -> Files:
    """The system's libraries under these files, and the loader, which searches the C
    library's folder.
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


def _chunks(paths: list[Path], size: int) -> Iterator[list[Path]]:
    for start in range(0, len(paths), size):
        yield paths[start : start + size]
