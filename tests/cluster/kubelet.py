"""The kubelet of a node, as the API server sees it.

Pods get a node, run, and end some time after their deletion.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sluice_operator.cluster import errors
from tests.cluster.world import Object, World, now

# (role, replica).
Gang = tuple[str, str]


class Kubelet:
    """A kubelet that also records what happened.

    `lives` has all pods that ever existed, as uids by name; `overlaps` has attempts of a gang that
    existed at the same time. Both are printed at the end for tests that fail.
    """

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.lives: dict[str, set[str]] = defaultdict(set)
        self.overlaps: set[str] = set()
        self._ends: dict[str, float] = {}
        self._seen: dict[str, str] = {}

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Kubelet]:
        task = asyncio.create_task(self._work())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _work(self) -> None:
        while True:
            pods = await self.world.pods()
            self._note(pods)
            with contextlib.suppress(errors.NotFoundError):  # no job yet
                self._tell(pods, await self.world.status())
            for name, pod in pods.items():
                with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
                    await self._serve(name, pod)
            await asyncio.sleep(0.05)

    async def _serve(self, name: str, pod: Object) -> None:
        if pod["metadata"].get("deletionTimestamp"):
            now = asyncio.get_running_loop().time()
            if now >= self._ends.setdefault(
                pod["metadata"]["uid"], now + self.chance.uniform(0, 0.8)
            ):
                await self.world.gone(name)
        elif not pod["spec"].get("nodeName"):
            await self.world.bind(name)
        elif pod["status"].get("phase") == "Pending":
            await self.world.run(name)

    def _note(self, pods: dict[str, Object]) -> None:
        attempts: dict[Gang, set[str]] = defaultdict(set)
        for name, pod in pods.items():
            self.lives[name].add(pod["metadata"]["uid"])
            labels = pod["metadata"]["labels"]
            attempts[labels["sluice.dev/role"], labels["sluice.dev/replica"]].add(
                labels["sluice.dev/attempt"]
            )
        self.overlaps |= {
            f"{gang}: {sorted(numbers)}" for gang, numbers in attempts.items() if len(numbers) > 1
        }

    def _tell(self, pods: dict[str, Object], status: Object) -> None:
        """Print what has changed."""
        gangs = {
            f"gang {role['name']}-{gang['replica']}": f"attempt {gang['attempt']}, restarts "
            f"{gang['restarts']}, retry {gang.get('retryTime')}"
            for role in status.get("roles", [])
            for gang in role["gangs"]
        }
        states = gangs | {
            f"pod {name}": "ending"
            if pod["metadata"].get("deletionTimestamp")
            else pod["status"].get("phase", "")
            for name, pod in pods.items()
        }
        for what in sorted(states.keys() | self._seen.keys()):
            if states.get(what) != self._seen.get(what):
                print(now(), what, states.get(what, "gone"))
        self._seen = states
