"""Redirects imports of slime's and verl's modules to the stubs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Modules of the projects, and their stubs.
STUBS = {
    "slime.rollout.sglang_rollout": "sluice_migrate.stubs.slime.rollout",
    "slime.utils.http_utils": "sluice_migrate.stubs.http",
    "slime.utils.misc": "sluice_migrate.stubs.slime.misc",
    "slime.utils.types": "sluice_migrate.stubs.slime.types",
    "verl.experimental.agent_loop": "sluice_migrate.stubs.verl.agent_loop",
    "verl.experimental.agent_loop.agent_loop": "sluice_migrate.stubs.verl.agent_loop",
    "verl.experimental.agent_loop.tool_parser": "sluice_migrate.stubs.verl.tool_parser",
    "verl.tools.schemas": "sluice_migrate.stubs.verl.schemas",
    "verl.utils.profiler": "sluice_migrate.stubs.verl.profiler",
    "verl.utils.rollout_trace": "sluice_migrate.stubs.verl.rollout_trace",
    "verl.workers.rollout.replica": "sluice_migrate.stubs.verl.replica",
}
_PROJECTS = {name.partition(".")[0] for name in STUBS}
# Packages that contain stubs; an import needs each of them.
_PARENTS = {name.rsplit(".", depth)[0] for name in STUBS for depth in range(1, name.count(".") + 1)}


class _Copy(Loader):
    """Fills a module with the names of a stub; a package without a stub stays empty."""

    def __init__(self, stub: str | None) -> None:
        self.stub = stub

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Copy the names of the stub."""
        if self.stub:
            names = vars(importlib.import_module(self.stub))
            vars(module).update({k: v for k, v in names.items() if not k.startswith("__")})


class StubFinder(MetaPathFinder):
    """Finds the stubs; it is the first finder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a stub."""
        if name in STUBS:
            return ModuleSpec(name, _Copy(STUBS[name]), is_package=name in _PARENTS)
        return None


class PackageFinder(MetaPathFinder):
    """Finds the packages around the stubs if they are not installed; it is the last finder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a package; raises ModuleNotFoundError for other modules of the projects."""
        project = name.partition(".")[0]
        if project not in _PROJECTS:
            return None
        if name in _PARENTS:
            return ModuleSpec(name, _Copy(None), is_package=True)
        stubs = ", ".join(sorted(module for module in STUBS if module.startswith(project)))
        raise ModuleNotFoundError(
            f"{name} is not installed, and sluice has no stub of it (of {project} it has {stubs}). "
            f"Install {project} in the image, or copy what the function needs next to its file",
            name=name,
        )


def install() -> None:
    """Let imports of slime and verl find the stubs in this process."""
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StubFinder())
        sys.meta_path.append(PackageFinder())
