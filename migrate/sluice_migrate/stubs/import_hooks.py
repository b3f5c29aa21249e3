"""Imports of slime's and verl's modules that find ours."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = {
    "slime.rollout.sglang_rollout": "sluice_migrate.stubs.slime.rollout",
    "slime.utils.http_utils": "sluice_migrate.stubs.slime.http_utils",
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
"""Theirs, and ours in its place."""
_PROJECTS = {name.partition(".")[0] for name in MODULES}
_PARENTS = {
    name.rsplit(".", depth)[0] for name in MODULES for depth in range(1, name.count(".") + 1)
}


class _Copy(Loader):
    """Fills a module with the names of ours; without one it stays empty, as a package."""

    def __init__(self, ours: str | None) -> None:
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self.ours:
            names = vars(importlib.import_module(self.ours))
            vars(module).update({k: v for k, v in names.items() if not k.startswith("__")})


class StandIns(MetaPathFinder):
    """Finds our modules, before any other finder looks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MODULES:
            return ModuleSpec(name, _Copy(MODULES[name]), is_package=name in _PARENTS)
        return None


class Packages(MetaPathFinder):
    """Finds the packages around our modules, once no other finder has; and says what there is."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        project = name.partition(".")[0]
        if project not in _PROJECTS:
            return None
        if name in _PARENTS:
            return ModuleSpec(name, _Copy(None), is_package=True)
        ours = ", ".join(sorted(module for module in MODULES if module.startswith(project)))
        raise ModuleNotFoundError(
            f"{name} is not here: of {project} sluice has {ours}. Put what else the function needs "
            f"of it beside the function, or install {project} in the image",
            name=name,
        )


def install() -> None:
    """Let imports of slime and verl find our modules, from now on and in this process."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandIns())
        sys.meta_path.append(Packages())
