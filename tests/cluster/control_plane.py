"""A control plane for the tests, from one of three sources.

It is that of KUBECONFIG, one that is started from the binaries of a release, or a kind cluster. The
binaries are in KUBEBUILDER_ASSETS (`setup-envtest use -p path` prints such a directory): etcd,
kube-apiserver, and kube-controller-manager for tests of what it does. If kube-apiserver is older
than CEL rules, a newer apiextensions-apiserver among the binaries serves CRDs and their objects.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml import YAML

from sluice.runtime.pod_env import free_port
from tests.tools import ROOT, missing, neighbour_tools

__all__ = ["ROOT", "ControlPlane", "control_plane"]
START_SECONDS = 60
# USER_TOKEN: of a user without rights, but those that a test gives him.
TOKEN, USER_TOKEN = "admin", "user"
# Loopback addresses: what a test lets listen on a Service's cluster IP, the operator reaches.
SERVICES = "127.96.0.0/16"
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: test
clusters:
- name: test
  cluster: {{server: "{server}", certificate-authority: "{directory}/apiserver.crt"}}
users: [{{name: admin, user: {{token: {token}}}}}]
contexts: [{{name: test, context: {{cluster: test, user: admin}}}}]
"""


@dataclass
class ControlPlane:
    """A running control plane.

    kubeconfig: for an administrator. directory: of a plane that tests may break; None for others.
    collects: True if the objects of deleted owners are deleted. etcd: its URL.
    """

    kubeconfig: str
    directory: Path | None = None
    collects: bool = True
    etcd: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    async def stop_api_server(self) -> list[str]:
        """Kill it; the command that starts it again."""
        process = self.processes["kube-apiserver"]
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        assert isinstance(process.args, list)
        return [str(argument) for argument in process.args]

    def start_api_server(self, command: list[str]) -> None:
        self.run("kube-apiserver", command)

    def compact(self) -> None:
        """etcd forgets all but the present: watches from older versions get 410."""
        revision = self._ask_etcd("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        self._ask_etcd("/v3/kv/compaction", {"revision": revision, "physical": True})

    def _ask_etcd(self, path: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
        with urllib.request.urlopen(
            f"{self.etcd}{path}", json.dumps(body).encode(), timeout=10
        ) as answer:
            reply: dict[str, dict[str, str]] = json.load(answer)
            return reply

    def run(self, name: str, command: list[str]) -> None:
        assert self.directory is not None
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self) -> None:
        for name in reversed(self.processes):
            self.processes[name].kill()
            self.processes[name].wait()


@contextmanager
def control_plane(*, controllers: bool = True) -> Iterator[ControlPlane]:
    """Start a control plane; with `controllers`, also kube-controller-manager if there is one."""
    if os.environ.get("KUBECONFIG"):
        yield ControlPlane(os.environ["KUBECONFIG"])
        return
    binaries = _binaries()
    if binaries is not None:
        with _of_binaries(binaries, controllers) as plane:
            yield plane
    elif shutil.which("kind"):
        with _of_kind() as plane:
            yield plane
    else:
        missing(
            "needs a Kubernetes API server: set KUBECONFIG, or set KUBEBUILDER_ASSETS to a "
            "directory with etcd and kube-apiserver, or install kind"
        )


def _binaries() -> Path | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(assets) if assets else neighbour_tools()


def rules_server(plane: ControlPlane) -> str:
    """The kubeconfig of an API server that keeps CEL rules, for a plane whose own one drops them.

    That of CEL_KUBECONFIG; else one that is started on the plane's etcd, asks the plane's own
    server for users and namespaces, and ends with the plane.
    """
    if os.environ.get("CEL_KUBECONFIG"):
        return os.environ["CEL_KUBECONFIG"]
    programs = sorted((_binaries() or Path(os.devnull)).glob("apiextensions-apiserver*"))
    if not programs or plane.directory is None:
        missing(
            "needs an API server with CEL rules: set KUBECONFIG or CEL_KUBECONFIG to that of one"
        )
    port, own = free_port(), plane.directory / "rules"
    own.mkdir()
    kubeconfig = own / "kubeconfig"
    kubeconfig.write_text(
        KUBECONFIG.format(server=f"https://127.0.0.1:{port}", directory=own, token=TOKEN)
    )
    plane.run("apiextensions-apiserver", _rules_server(programs[-1], plane, own, port))
    _wait_for(plane, port, "/readyz", own)
    return str(kubeconfig)


@contextmanager
def _of_kind() -> Iterator[ControlPlane]:
    name = f"sluice-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as directory:
        kubeconfig = f"{directory}/kubeconfig"
        try:
            subprocess.run(
                [
                    "kind",
                    "create",
                    "cluster",
                    "--name",
                    name,
                    "--kubeconfig",
                    kubeconfig,
                    "--wait",
                    "2m",
                ],
                check=True,
            )
            yield ControlPlane(kubeconfig)
        finally:
            subprocess.run(
                ["kind", "delete", "cluster", "--name", name, "--kubeconfig", kubeconfig],
                check=True,
            )


@contextmanager
def _of_binaries(binaries: Path, controllers: bool) -> Iterator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="sluice-control-plane-") as name:
        directory = Path(name)
        port = free_port()
        collects = controllers and (binaries / "kube-controller-manager").exists()
        plane = ControlPlane(str(directory / "kubeconfig"), directory, collects)
        text = KUBECONFIG.format(
            server=f"https://127.0.0.1:{port}", directory=directory, token=TOKEN
        )
        (directory / "kubeconfig").write_text(text)
        (directory / "tokens.csv").write_text(
            f'{TOKEN},admin,admin,"system:masters"\n{USER_TOKEN},user,user\n'
        )
        key = directory / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        try:
            plane.etcd = etcd = f"http://127.0.0.1:{free_port()}"
            plane.run("etcd", _etcd(binaries, directory, etcd))
            plane.run(
                "kube-apiserver", _api_server(binaries, directory, etcd, port, plane.collects)
            )
            _wait_for(plane, port, "/readyz")
            if plane.collects:
                plane.run("kube-controller-manager", _controller_manager(binaries, directory))
                _wait_for(plane, port, "/api/v1/namespaces/default/serviceaccounts/default")
            yield plane
        finally:
            plane.stop()


def _etcd(binaries: Path, directory: Path, url: str) -> list[str]:
    return [
        str(binaries / "etcd"),
        f"--data-dir={directory}/etcd",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        "--listen-peer-urls=http://127.0.0.1:0",
    ]


def _api_server(binaries: Path, directory: Path, etcd: str, port: int, collects: bool) -> list[str]:
    """Return the command of an API server, which makes its certificate.

    Without a controller manager, namespaces have no service account, so pods need none.
    """
    return [
        str(binaries / "kube-apiserver"),
        f"--etcd-servers={etcd}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        # It is only used in an Endpoints object, which cannot have a loopback address.
        "--advertise-address=198.51.100.1",
        f"--cert-dir={directory}",
        f"--token-auth-file={directory}/tokens.csv",
        "--authorization-mode=RBAC",
        # As every node's installer sets it: what refuses such a pod is admission.
        "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={directory}/accounts.key",
        f"--service-account-signing-key-file={directory}/accounts.key",
        f"--service-cluster-ip-range={SERVICES}",
        *([] if collects else ["--disable-admission-plugins=ServiceAccount"]),
    ]


def _rules_server(program: Path, plane: ControlPlane, directory: Path, port: int) -> list[str]:
    """Admission policies are off: they are kinds that the plane's own server does not have."""
    delegated = [
        f"--{what}kubeconfig={plane.kubeconfig}"
        for what in ("", "authentication-", "authorization-")
    ]
    return [
        str(program),
        f"--etcd-servers={plane.etcd}",
        "--etcd-prefix=/registry-rules",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={directory}",
        *delegated,
        "--authentication-skip-lookup=true",
        "--enable-priority-and-fairness=false",
        "--disable-admission-plugins=MutatingAdmissionPolicy,ValidatingAdmissionPolicy",
    ]


def _controller_manager(binaries: Path, directory: Path) -> list[str]:
    program = str(binaries / "kube-controller-manager")
    has_plain_port = (
        "--port int" in subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    )
    return [
        program,
        f"--kubeconfig={directory}/kubeconfig",
        f"--service-account-private-key-file={directory}/accounts.key",
        f"--service-cluster-ip-range={SERVICES}",
        "--leader-elect=false",
        # It would delete pods on missing nodes, such as those of these tests.
        "--controllers=*,-podgc",
        "--secure-port=0",
        *(["--port=0"] if has_plain_port else []),  # releases before 1.24
    ]


def write_kubeconfig(administrator: Path, target: Path, token: str) -> None:
    """Another's for the same API server."""
    yaml = YAML(typ="safe")
    config = yaml.load(administrator.read_text())
    current = next(item for item in config["contexts"] if item["name"] == config["current-context"])
    config["users"] = [{"name": current["context"]["user"], "user": {"token": token}}]
    config["contexts"] = [current]
    with target.open("w") as file:
        yaml.dump(config, file)


def _wait_for(plane: ControlPlane, port: int, path: str, certificates: Path | None = None) -> None:
    end = time.monotonic() + START_SECONDS
    while not _answers(f"https://127.0.0.1:{port}{path}", certificates or plane.directory):
        for name, process in plane.processes.items():
            assert process.poll() is None, f"{name} ended:\n{_log(plane, name)}"
        if time.monotonic() > end:
            raise TimeoutError(
                f"no answer to {path} within {START_SECONDS} "
                f"s:\n{_log(plane, [*plane.processes][-1])}"
            )
        time.sleep(0.1)


def _answers(url: str, certificates: Path | None) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    try:
        context = ssl.create_default_context(cafile=f"{certificates}/apiserver.crt")
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except (
        OSError
    ):  # not there yet: no certificate, no listener, not ready (an HTTPError is an OSError)
        return False


def _log(plane: ControlPlane, name: str) -> str:
    assert plane.directory is not None
    return "\n".join(
        (plane.directory / f"{name}.log").read_text(errors="replace").splitlines()[-20:]
    )
