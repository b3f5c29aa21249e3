"""The chart's ValidatingAdmissionPolicy lets the operator write what its jobs need, and no more.

If the API server has such policies (Kubernetes 1.30) the real one is asked. If not, one that
knows CEL in CRDs: there the policy's expressions become rules of a CRD, and its objects are the
requests.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sluice.api import RLEnginePool, RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.plan import Images, render_all
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS
from sluice_operator.plan.manifests.engine_pool import pool_objects
from sluice_operator.plan.manifests.sandbox import sandbox
from tests.cluster.control_plane import ControlPlane
from tests.cluster.releases import make_namespace
from tests.cluster.sandboxes import agent_sandbox
from tests.helm import Object, find_object, objects
from tests.pod_security import APPARMOR, BASELINE
from tests.tools import tool

POLICY = "ValidatingAdmissionPolicy"
MADE = ("validatingadmissionpolicy", "validatingadmissionpolicybinding", "clusterrolebinding")
PLURALS = {"NetworkPolicy": "networkpolicies", "Sandbox": "sandboxes"}
OWNER = {
    "apiVersion": "sluice.dev/v1alpha1",
    "kind": "RLJob",
    "name": "demo",
    "uid": "1234",
    "controller": True,
}
NAMESPACE = "sluice-policy"
X: Object = {"name": "x", "image": "x"}
UNCONFINED = {"type": "Unconfined"}
# (operation, object, old object) -> what the policy says; empty: it admits.
Ask = Callable[[str, Object | None, Object | None], Awaitable[str]]


def policy(*settings: str) -> Object:
    return find_object(objects("defaults", *settings), POLICY)


def job(**spec: Any) -> RLJob:
    groups: dict[str, Any] = {
        "model": {"path": "/m"},
        "data": {"prompts": [{"path": "/d"}]},
        "reward": {"type": "exact_match"},
        "rollout": {"replicas": 2},
        "trainer": {"steps": 1},
    }
    metadata = {"name": "demo", "namespace": NAMESPACE, "uid": "1234"}
    return RLJob.model_validate({"metadata": metadata, "spec": {**groups, **spec}})


def job_objects(**spec: Any) -> list[Object]:
    return render_all(job(**spec))


def pool() -> RLEnginePool:
    metadata = {"name": "shared", "namespace": NAMESPACE, "uid": "1234"}
    return RLEnginePool.model_validate({"metadata": metadata, "spec": {"model": {"path": "/m"}}})


def engines(template: Object) -> Object:
    """Return the StatefulSet of a pool with this pod as its template."""
    (manifest,) = [
        made
        for made in pool_objects(pool(), Images(), NO_DEFAULTS)
        if made["kind"] == "StatefulSet"
    ]
    own = manifest["spec"]["template"]
    metadata = own["metadata"] | {
        "annotations": (template.get("metadata") or {}).get("annotations") or {}
    }
    spec = (template.get("spec") or own["spec"]) | {"restartPolicy": "Always"}
    return manifest | {
        "spec": manifest["spec"] | {"template": {"metadata": metadata, "spec": spec}}
    }


def pod(**spec: Any) -> Object:
    manifest = copy.deepcopy(
        next(job_object for job_object in job_objects() if job_object["kind"] == "Pod")
    )
    manifest["spec"] |= spec
    return manifest


def container(**context: Any) -> Object:
    return pod(containers=[{**X, "securityContext": context}])


def annotated(key: str, value: str) -> Object:
    manifest = pod()
    return manifest | {"metadata": manifest["metadata"] | {"annotations": {key: value}}}


def with_host_path(path: str) -> Object:
    """Add a volume, and keep those that containers mount: the API server checks that first."""
    manifest = pod()
    manifest["spec"]["volumes"].append({"name": "x", "hostPath": {"path": path}})
    return manifest


def without_owner(manifest: Object) -> Object:
    return manifest | {
        "metadata": {key: manifest["metadata"][key] for key in ("name", "namespace", "labels")}
    }


def service(**spec: Any) -> Object:
    metadata = {"name": "s", "namespace": NAMESPACE, "labels": {}, "ownerReferences": [OWNER]}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"ports": [{"port": 1}], **spec},
    }


def secret(kind: str) -> Object:
    annotations = {"kubernetes.io/service-account.name": "default"}
    metadata = {
        "name": "s",
        "namespace": NAMESPACE,
        "labels": {},
        "ownerReferences": [OWNER],
        "annotations": annotations,
    }
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": kind}


# -- the two ways to ask
# ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups() -> dict[tuple[str, ...], str]:
    """API groups in which a server has the policy as a CRD, by settings of the chart."""
    return {}


@pytest.fixture
async def ask(
    plane: ControlPlane,
    ruled: str,
    groups: dict[tuple[str, ...], str],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[..., Awaitable[Ask]]]:
    """Gives a way to ask a policy with some settings of the chart."""
    async with await Api.connect() as api:
        try:
            await api.get("/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies")
        except errors.ApiError:
            pass
        else:
            names: list[str] = []
            async with agent_sandbox(api, "v1beta1"):
                yield lambda *settings: _real(api, names, *settings)
            for name in names:
                _kubectl("delete", "--ignore-not-found", *(f"{kind}/{name}" for kind in MADE))
            return
    monkeypatch.setenv("KUBECONFIG", ruled)
    async with await Api.connect() as api:
        yield lambda *settings: _as_rules(api, groups, *settings)


async def _real(api: Api, names: list[str], *settings: str) -> Ask:
    """Dry runs of kubectl as the operator, under a policy of the chart.

    Objects to change exist already. names: collects the names of what is made in the cluster.
    """
    await make_namespace(api, NAMESPACE)
    account, name = (
        f"system:serviceaccount:{NAMESPACE}:operator-{uuid.uuid4().hex[:6]}",
        f"p-{uuid.uuid4().hex[:6]}",
    )
    names.append(name)
    documents = [
        stored for stored in objects("defaults", *settings) if stored["kind"].startswith(POLICY)
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    text = text.replace("system:serviceaccount:sluice-system:sluice", account).replace(
        "sluice-operator", name
    )
    _kubectl("apply", "--filename=-", text=text)
    _kubectl(
        "create", "clusterrolebinding", name, "--clusterrole=cluster-admin", f"--user={account}"
    )

    async def ask(operation: str, new: Object | None, old: Object | None = None) -> str:
        if old is not None:
            _kubectl("apply", "--filename=-", text=json.dumps(old))
        verb = {"CREATE": "create", "UPDATE": "replace", "DELETE": "delete"}[operation]
        words = (verb, "--filename=-", "--dry-run=server", f"--as={account}")
        done = _kubectl(*words, text=json.dumps(new or old), check=False)
        if old is not None:
            _kubectl(
                "delete", "--filename=-", "--wait=false", "--grace-period=0", text=json.dumps(old)
            )
        return done.stderr if POLICY in done.stderr else ""

    async with asyncio.timeout(60):  # a policy holds after a moment
        while not await ask(
            "CREATE", pod(hostNetwork=True) | {"metadata": {"name": "x", "namespace": NAMESPACE}}
        ):
            await asyncio.sleep(0.5)
    return ask


def _kubectl(*words: str, text: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [tool("kubectl"), *words], input=text, text=True, capture_output=True, timeout=60
    )
    assert not check or done.returncode == 0, done.stderr
    return done


TEXT = {"type": "string", "maxLength": 200}
FLAG = {"type": "boolean"}


def fields(**properties: Any) -> Object:
    """An object with the fields that the policy reads, and others that its creation needs."""
    return {
        "type": "object",
        "properties": properties,
        "x-kubernetes-preserve-unknown-fields": True,
    }


def many(items: Object) -> Object:
    return {"type": "array", "items": items, "maxItems": 8}


PROFILES = {
    "seccompProfile": fields(type=TEXT),
    "appArmorProfile": fields(type=TEXT),
    "seLinuxOptions": fields(type=TEXT, user=TEXT, role=TEXT),
    "windowsOptions": fields(hostProcess=FLAG),
}
CONTEXT = fields(
    privileged=FLAG,
    procMount=TEXT,
    capabilities=fields(add=many(TEXT), drop=many(TEXT)),
    **PROFILES,
)
PORTS = many(fields(hostPort={"type": "integer"}))
CONTAINERS = many(fields(name=TEXT, securityContext=CONTEXT, ports=PORTS))
VOLUMES = many(fields(name=TEXT, hostPath=fields(path=TEXT)))
SPEC = fields(
    hostNetwork=FLAG,
    hostPID=FLAG,
    hostIPC=FLAG,
    securityContext=fields(sysctls=many(fields(name=TEXT)), **PROFILES),
    containers=CONTAINERS,
    initContainers=CONTAINERS,
    volumes=VOLUMES,
    type=TEXT,
    externalIPs=many(TEXT),
)
LABELS = {"type": "object", "additionalProperties": TEXT, "maxProperties": 16}
METADATA = fields(
    name=TEXT,
    labels=LABELS,
    annotations=LABELS,
    ownerReferences=many(fields(apiVersion=TEXT, kind=TEXT)),
)
OBJECT = fields(
    metadata=METADATA,
    type=TEXT,
    spec=fields(
        **SPEC["properties"],
        podTemplate=fields(metadata=METADATA, spec=SPEC),
        template=fields(metadata=METADATA, spec=SPEC),
    ),
)
KIND = "Request"
REQUEST = fields(
    operation=TEXT,
    namespace=TEXT,
    name=TEXT,
    resource=fields(resource=TEXT),
    userInfo=fields(username=TEXT),
)


async def _as_rules(api: Api, groups: dict[tuple[str, ...], str], *settings: str) -> Ask:
    """Return the policy as a CRD.

    An object of the CRD is a request, and the API server's error is the answer of the policy.
    """
    if settings not in groups:
        groups[settings] = await _make_crd(api, policy(*settings)["spec"])
    group = groups[settings]

    async def ask(operation: str, new: Object | None, old: Object | None = None) -> str:
        about = new or old or {}
        resource = PLURALS.get(about["kind"], f"{about['kind'].lower()}s")
        request = {
            "operation": operation,
            "namespace": about["metadata"]["namespace"],
            "name": about["metadata"]["name"],
            "resource": {"resource": resource},
            "userInfo": {"username": "system:serviceaccount:sluice-system:sluice"},
        }
        body = {
            "apiVersion": f"{group}/v1",
            "kind": KIND,
            "metadata": {"name": f"a{uuid.uuid4().hex}"},
        }
        variables = {"request": request, "object": new, "oldObject": old}
        try:
            await api.create(
                f"/apis/{group}/v1/requests",
                body | {key: value for key, value in variables.items() if value is not None},
            )
        except errors.InvalidError as error:
            return str(error)
        return ""

    return ask


async def _make_crd(api: Api, spec: Object) -> str:
    """Make the CRD of a policy, and return its API group."""
    group = f"r{uuid.uuid4().hex[:8]}.example.com"
    conditions = " && ".join(
        f"({_rule(match_condition['expression'], spec)})"
        for match_condition in spec["matchConditions"]
    )
    rules = [
        {
            "rule": f"!({conditions}) || ({_rule(validation['expression'], spec)})",
            "message": validation["message"],
        }
        for validation in spec["validations"]
    ]
    schema = fields(request=REQUEST, object=OBJECT, oldObject=OBJECT) | {
        "x-kubernetes-validations": rules
    }
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": KIND, "plural": "requests", "singular": "request", "listKind": "RequestList"}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"requests.{group}"},
        "spec": {"group": group, "scope": "Cluster", "names": names, "versions": [version]},
    }
    await api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    async with asyncio.timeout(30):
        while True:
            try:
                await api.get(f"/apis/{group}/v1/requests")
                return group
            except errors.NotFoundError:
                await asyncio.sleep(0.1)


def _rule(expression: str, spec: Object) -> str:
    """An expression of the policy as one over the CRD's object: variables written out."""
    for variable in reversed(spec["variables"]):
        words = f"({variable['expression']})".replace("\\", r"\\")
        expression = re.sub(rf"\bvariables\.{variable['name']}\b", words, expression)
    return re.sub(r"(?<![\w.'])(request|object|oldObject)(?=\.)", r"self.\1", expression)


# -- what it lets pass, and what not
# ----------------------------------------------------------------------------------


async def test_the_operators_own_work_passes(ask: Callable[..., Awaitable[Ask]]) -> None:
    says = await ask()
    specs: list[dict[str, Any]] = [
        {},
        {"podTemplateOverrides": [{"roles": ["trainer"], "template": RDMA}]},
    ]
    for child in [job_object for spec in specs for job_object in job_objects(**spec)]:
        if child["kind"] in (
            "Pod",
            "ConfigMap",
            "Secret",
            "Service",
            "PersistentVolumeClaim",
            "NetworkPolicy",
        ):
            assert await says("CREATE", child, None) == "", child["metadata"]["name"]
    for child in pool_objects(pool(), Images(), NO_DEFAULTS):
        assert await says("CREATE", child, None) == "", child["metadata"]["name"]
    assert await says("UPDATE", engines({}), engines({})) == ""
    (config,) = [job_object for job_object in job_objects() if job_object["kind"] == "ConfigMap"]
    assert await says("UPDATE", config, config) == ""
    assert await says("DELETE", None, pod()) == ""


RDMA = {
    "spec": {
        "serviceAccountName": "mine",
        "containers": [
            {"name": "trainer", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
        ],
    }
}
ALLOW = "admissionPolicy.allow.privileged=true"
REACHING = {
    "hostNetwork": (pod(hostNetwork=True), "admissionPolicy.allow.hostNetwork=true"),
    "hostPID": (pod(hostPID=True), "admissionPolicy.allow.hostNamespaces=true"),
    "hostIPC": (pod(hostIPC=True), "admissionPolicy.allow.hostNamespaces=true"),
    "hostPath": (
        with_host_path("/mnt/nvme/a"),
        "admissionPolicy.allow.hostPaths={/mnt/nvme}",
    ),
    "hostPort": (
        pod(containers=[{**X, "ports": [{"containerPort": 80, "hostPort": 80}]}]),
        "admissionPolicy.allow.hostNetwork=true",
    ),
    "hostPort of an init container": (
        pod(initContainers=[{**X, "ports": [{"containerPort": 80, "hostPort": 80}]}]),
        "admissionPolicy.allow.hostNetwork=true",
    ),
    "privileged": (container(privileged=True), ALLOW),
    "capability": (container(capabilities={"add": ["SYS_ADMIN"]}), ALLOW),
    "procMount": (container(procMount="Unmasked"), ALLOW),
    "seccomp": (container(seccompProfile=UNCONFINED), ALLOW),
    "seccomp of the pod": (pod(securityContext={"seccompProfile": UNCONFINED}), ALLOW),
    "AppArmor": (container(appArmorProfile=UNCONFINED), ALLOW),
    "AppArmor of the pod": (pod(securityContext={"appArmorProfile": UNCONFINED}), ALLOW),
    "AppArmor by an annotation": (annotated(f"{APPARMOR}trainer", "unconfined"), ALLOW),
    "SELinux type": (container(seLinuxOptions={"type": "spc_t"}), ALLOW),
    "SELinux user of the pod": (pod(securityContext={"seLinuxOptions": {"user": "u"}}), ALLOW),
    "host process": (container(windowsOptions={"hostProcess": True}), ALLOW),
    "sysctl": (
        pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
        ALLOW,
    ),
}


@pytest.mark.parametrize("name", REACHING)
async def test_a_pod_that_reaches_for_its_node_needs_a_value(
    name: str, ask: Callable[..., Awaitable[Ask]]
) -> None:
    """Or a Sandbox or a StatefulSet that would make it."""
    manifest, setting = REACHING[name]
    refuses, admits = await ask(), await ask("--set", setting)
    for item in (manifest, sandbox(job(), manifest, "v1beta1"), engines(manifest)):
        assert setting.partition("=")[0] in await refuses("CREATE", item, None)
        assert await admits("CREATE", item, None) == ""


def test_each_check_of_the_baseline_standard_is_tried() -> None:
    """But hosts of probes, which Kubernetes' own admission refuses from 1.34 on."""
    caught = {
        check.__name__
        for manifest, _ in REACHING.values()
        for check in BASELINE
        if [*check(manifest)]
    }
    assert caught == {check.__name__ for check in BASELINE} - {"_probe_hosts"}


async def test_a_path_beside_an_allowed_one_is_another(ask: Callable[..., Awaitable[Ask]]) -> None:
    says = await ask("--set", "admissionPolicy.allow.hostPaths={/mnt/nvme}")
    assert "hostPaths" in await says("CREATE", with_host_path("/mnt/nvme2"), None)


FOREIGN: dict[str, tuple[str, Object | None, Object | None]] = {
    "a pod of nobody": ("CREATE", without_owner(pod()), None),
    "a secret of nobody": ("CREATE", without_owner(secret("Opaque")), None),
    "a token of a service account": ("CREATE", secret("kubernetes.io/service-account-token"), None),
    "a service to elsewhere": (
        "CREATE",
        service(type="ExternalName", externalName="example.com"),
        None,
    ),
    "a service that takes an address": ("CREATE", service(externalIPs=["192.0.2.1"]), None),
    "somebody's service": ("UPDATE", service(), without_owner(service())),
    "somebody's pod": (
        "DELETE",
        None,
        {**pod(), "metadata": {"name": "x", "namespace": NAMESPACE, "labels": {}}},
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_what_is_not_of_a_job_is_refused(
    name: str, ask: Callable[..., Awaitable[Ask]]
) -> None:
    assert await (await ask())(*FOREIGN[name]) != ""
