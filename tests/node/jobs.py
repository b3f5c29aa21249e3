"""An example in a new namespace: its manifest, its volume, and what a user sees of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sluice.telemetry import run_directory
from sluice_buffer.state.loading import load
from sluice_buffer.state.storage import Storage
from sluice_operator.plan.facts import names
from tests.node.node import Node, Object, process_of, until
from tests.tools import ROOT

MANIFEST = ROOT / "examples/kubernetes/quickstart.yaml"
QUICKSTART = ROOT / "examples/quickstart"
NAME = "quickstart"
# Name of the volume that waits for the claim that the operator makes.
ANY = "any"
OWNED = (
    "pods,persistentvolumeclaims,secrets,configmaps,services,networkpolicies"
    ",poddisruptionbudgets,endpoints"
)


class Quickstart:
    """The quickstart, and what other examples have in common with it.

    directory: of this machine, where the volumes are. Its pods see `volume`, and the buffer's
    pod `buffer`.

    run: the directory of the run on this machine, checkpoints: that of its checkpoints. A job that
    names no volume for them has both on a claim that the operator makes.
    """

    name, manifest, example = NAME, MANIFEST, QUICKSTART

    def __init__(self, node: Node, namespace: str, directory: Path) -> None:
        self.node, self.namespace = node, namespace
        self.volume, self.buffer, self._claimed = (
            directory / name for name in ("volume", "buffer", "claimed")
        )
        self.run, self.checkpoints = (
            self.volume / self.name / "run",
            self.volume / self.name,
        )

    # -- set-up
    # ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make what the example asks its user for, on volumes of this machine: the node has no
        provisioner."""
        for path in (self.volume, self.buffer, self._claimed):
            path.mkdir(parents=True)
            path.chmod(0o755)
        self._fill()
        self.node.kubectl("create", "namespace", self.namespace)
        self.node.apply(
            self._persistent_volume(self.name, self.volume),
            self._persistent_volume(f"{self.name}-buffer", self.buffer),
            self._persistent_volume(None, self._claimed),
            self._claim(),
        )

    def remove(self) -> None:
        """At once: a test that wants to see pods end in peace has waited for that."""
        self.kubectl("delete", "rljob", "--all", "--timeout=60s", seconds=90)
        self.kubectl(
            "delete", "pods", "--all", "--grace-period=0", "--force", "--timeout=60s", seconds=90
        )
        volumes = [f"{self.namespace}-{name}" for name in (self.name, f"{self.name}-buffer", ANY)]
        self.node.kubectl("delete", "namespace", self.namespace, "--timeout=150s", seconds=180)
        self.node.kubectl("delete", "persistentvolume", *volumes, "--timeout=60s", seconds=90)

    def _fill(self) -> None:
        """Put the example's data and reward into the volume."""
        make = self.example / "make_data.py"
        subprocess.run([sys.executable, make, self.volume], check=True, timeout=180)
        shutil.copy(self.example / "reward.py", self.volume)

    def _persistent_volume(self, claim: str | None, path: Path) -> Object:
        """For a claim of that name; None: for any claim that asks for more than the others have."""
        any_node = {"key": "kubernetes.io/hostname", "operator": "Exists"}
        named = {"claimRef": {"namespace": self.namespace, "name": claim}} if claim else {}
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{self.namespace}-{claim or ANY}"},
            "spec": {
                "capacity": {"storage": "1Gi" if claim else "1Ti"},
                "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                "storageClassName": "",
                "local": {"path": str(path)},
                "nodeAffinity": {
                    "required": {"nodeSelectorTerms": [{"matchExpressions": [any_node]}]}
                },
                **named,
            },
        }

    def _claim(self) -> Object:
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "",
            "resources": {"requests": {"storage": "1Gi"}},
        }
        metadata = {"name": self.name, "namespace": self.namespace}
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata,
            "spec": spec,
        }

    # -- a user
    # ----------------------------------------------------------------------------------------------

    def kubectl(self, *words: str, **how: Any) -> str:
        return self.node.kubectl("-n", self.namespace, *words, **how)

    def job(self) -> Object:
        """The example's manifest."""
        return dict(YAML(typ="safe").load(self.manifest.read_text()))

    def start(self, **changes: Any) -> None:
        """kubectl apply of the example.

        changes: fields of groups of the spec, as trainer={"steps": 9}, or fields; None: the spec
        says nothing of it.
        """
        job = self.job()
        for group, fields in changes.items():
            both = isinstance(fields, dict) and isinstance(job["spec"].get(group), dict)
            job["spec"][group] = job["spec"][group] | fields if both else fields
        job["spec"] = {group: fields for group, fields in job["spec"].items() if fields is not None}
        if "volume" not in job["spec"].get("checkpoint", {}):
            self.run, self.checkpoints = self._claimed, self._claimed / names.CHECKPOINTS
        self.kubectl("apply", "-f", "-", text=json.dumps(job))

    def patch(self, **spec: Any) -> None:
        self.kubectl("patch", "rljob", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self) -> None:
        self.kubectl("delete", "rljob", self.name, "--timeout=60s", seconds=90)

    def replace(self, role: str, *how: str) -> None:
        """kubectl delete of the role's pod, as said; until a pod of a later attempt is there."""
        old = self.pod(role)["metadata"]["name"]
        self.kubectl("delete", "pod", old, *how, "--timeout=240s", seconds=270)
        self.until(lambda: self.pod(role)["metadata"]["name"] != old, f"a successor of {old}", 120)

    # -- what is seen
    # ----------------------------------------------------------------------------------------------

    def status(self) -> Object:
        return self.node.get("-n", self.namespace, "rljob", self.name).get("status") or {}

    def condition(self, kind: str) -> Object:
        return next(
            (
                condition
                for condition in self.status().get("conditions", [])
                if condition["type"] == kind
            ),
            {},
        )

    def pods(self, role: str = "") -> list[Object]:
        labels = ",".join(
            filter(None, ("sluice.dev/job-name", f"sluice.dev/role={role}" if role else ""))
        )
        return list(self.node.get("-n", self.namespace, "pods", "-l", labels).get("items", []))

    def pod(self, role: str, index: int = 0) -> Object:
        """The role's pod that runs. index: which one, if an attempt has several."""

        def running() -> list[Object]:
            alive = [pod for pod in self.pods(role) if "deletionTimestamp" not in pod["metadata"]]
            of_replica = [pod for pod in alive if pod["metadata"]["name"].endswith(f"-{index}")]
            return [pod for pod in of_replica if pod["status"]["phase"] == "Running"]

        return self.until(running, f"a running pod of {role}", 240)[0]

    def kill(self, role: str, program: str, index: int = 0) -> None:
        """SIGKILL for a pod's process whose command line names the program."""
        pod = self.pod(role, index)
        os.kill(
            self.until(lambda: process_of(pod, program), f"process {program} of {role}", 120),
            signal.SIGKILL,
        )

    def objects(self) -> set[str]:
        """Names of everything in the namespace that a job may own."""
        return set(self.kubectl("get", OWNED, "-o", "name").split())

    def reasons(self) -> set[str]:
        """Reasons of the events that `kubectl describe` shows."""
        events = self.kubectl("describe", "rljob", self.name).partition("\nEvents:")[2]
        return {line.split()[1] for line in events.splitlines()[3:] if len(line.split()) > 1}

    def row(self) -> dict[str, str]:
        """The job's line of `kubectl get rljobs`, by column. No column may be empty."""
        header, row = self.kubectl("get", "rljobs").splitlines()
        return dict(zip(header.split(), row.split(), strict=True))

    def row_state(self) -> str:
        """The STATE of that line; the columns after it may be empty."""
        return self.kubectl("get", "rljobs", "--no-headers").split()[1]

    def metrics(self) -> list[Object]:
        """All records of metrics.jsonl, those of steps that were trained again included."""
        return list(run_directory.records(self.run / run_directory.METRICS))

    def step(self) -> int:
        return max((int(record["step"]) for record in self.metrics()), default=0)

    def until_step(self, step: int, seconds: float = 300) -> None:
        self.until(lambda: self.step() >= step, f"step {step}", seconds)

    def until_state(self, state: str, seconds: float) -> Object:
        return self.until(
            lambda: self.status() if self.status().get("state") == state else {},
            f"state {state}",
            seconds,
        )

    def until(self, condition: Callable[[], Any], what: str, seconds: float) -> Any:
        """Wait for a condition. Fails if the job has ended meanwhile."""

        def holds() -> Any:
            status = self.status()  # before the condition, which the end of the job may fulfil
            value = condition()
            assert value or status.get("state") not in ("Succeeded", "Failed"), (
                f"ended before {what}: {status}"
            )
            return value

        return until(holds, what, seconds)

    def until_drained(self) -> None:
        """Only pods that have ended are left."""
        until(
            lambda: all(pod["status"]["phase"] == "Succeeded" for pod in self.pods()),
            "an end of all pods",
            240,
        )

    def counters(self) -> dict[str, int]:
        """Counts of groups that the guarantee is about, from the buffer's database at the end."""
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory) / "buffer"
            shutil.copytree(self.buffer, copy)
            storage = Storage(copy, 1 << 30)
            try:
                memory = load(storage, 0.0)
            finally:
                storage.close()
        return {
            "groups_leased": memory.progress.next_group,
            "groups_trained": memory.trained,
            "groups_lost": memory.lost,
            "groups_trained_twice": memory.twice,
        }

    def story(self) -> str:
        """For a person who has to find out why a test failed."""
        parts = [
            self.kubectl("describe", "rljob", check=False),
            self.kubectl("get", "pods", "-o", "wide", check=False),
        ]
        parts.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False))
        for pod in self.pods():
            name = pod["metadata"]["name"]
            parts.append(self.kubectl("describe", "pod", name, check=False))
            parts.append(
                self.kubectl("logs", name, "--all-containers", "--prefix", "--tail=60", check=False)
            )
        return "\n".join(parts)
