"""The image of a server of OpenEnv, as its user would build one: openenv-core with what it needs,
and nothing of ours. Its command is the server's, and its user root, whom an image has unless it
says otherwise.

The server's code is not in it: a config map brings it to DIRECTORY.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from tests.node import system, tars
from tests.node.system import SITE, add_environment
from tests.node.tars import Files, digest, walk, write_archive

REPOSITORY = "sluice-test-openenv"
DIRECTORY, FILE = "/environment", "openenv_server.py"
SERVER = f"{DIRECTORY}/{FILE}"


def name(python: Path) -> str:
    """repository:tag of the image that would be written now. python: that of the environment."""
    code = [
        Path(module).read_text() for module in (__file__, str(system.__file__), str(tars.__file__))
    ]
    return f"{REPOSITORY}:{digest([*code, *_packages(python)])}"


def write(archive: Path, python: Path) -> str:
    """Write the image as a docker-archive; its name."""
    layer, image = archive.with_suffix(".environment"), name(python)
    with tarfile.open(layer, "w") as tar:
        add_environment(tar, _packages(python))
    write_archive(archive, image, [layer], ["python", "-P", SERVER], user="")
    layer.unlink()
    return image


def _packages(python: Path) -> Files:
    site = python.parents[1] / "lib" / system.VERSION / "site-packages"
    return {f"{SITE}/{path.relative_to(site)}": path for path in walk([site])}
