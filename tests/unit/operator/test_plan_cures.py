"""A refusal of the API server comes with what to do. The messages are servers' own, of 1.29 and
later."""

from __future__ import annotations

import pytest

from sluice_operator.plan.report.remedies import OF_REFUSALS, with_cure

FORBIDDEN = 'pods "demo-trainer-0-1-0" is forbidden: '


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        (
            "exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: "
            "requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8",
            "wait until others give some back, have ResourceQuota gpus raised, or ask for less",
        ),
        (
            "failed quota: compute: must specify limits.cpu for: proxy; limits.memory for: proxy",
            "ResourceQuota compute wants limits.cpu for: proxy; limits.memory for: proxy of every "
            "container: set resources of the role, and of containers in its template",
        ),
        (
            'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false '
            '(container "engine" must set '
            "securityContext.allowPrivilegeEscalation=false)",
            "the namespace takes pods of level restricted alone: change what is named in the "
            "role's template, or have "
            "the namespace's label pod-security.kubernetes.io/enforce lowered",
        ),
        (
            "maximum memory usage per Container is 8Gi, but limit is 64Gi",
            "a LimitRange of the namespace bounds memory: set resources of the role within it",
        ),
        (
            "ValidatingAdmissionPolicy 'images' with binding 'images' denied request: registry is "
            "not allowed",
            "a policy of the cluster, images, does not allow it: ask who runs it",
        ),
        (
            'User "system:serviceaccount:sluice:operator" cannot create resource "pods" in API '
            'group "" in the namespace "team"',
            "the operator's service account sluice:operator may not create pods: upgrade the chart "
            "with this namespace in watchNamespaces",
        ),
        (
            "no PriorityClass with name high was found",
            "have PriorityClass high created, or name another in the template",
        ),
        (
            "unable to create new content in namespace team because it is being terminated",
            "the namespace is being deleted",
        ),
    ],
    ids=[
        "quota",
        "unset",
        "pod security",
        "limit range",
        "policy",
        "rights",
        "priority",
        "namespace",
    ],
)
def test_a_refusal_says_what_to_do(message: str, cure: str) -> None:
    assert with_cure(FORBIDDEN + message, OF_REFUSALS) == f"{FORBIDDEN}{message}; {cure}"


def test_a_webhook_is_named() -> None:
    text = 'admission webhook "validate.kyverno.svc-fail" denied the request: no root'
    assert with_cure(text, OF_REFUSALS).endswith(
        "; a policy of the cluster, validate.kyverno.svc-fail, does not allow it: ask who runs it"
    )


def test_a_webhook_that_is_down_is_named() -> None:
    text = (
        'Internal error occurred: failed calling webhook "mpod.kb.io": failed to call webhook: '
        'Post "https://kueue-webhook-service.kueue-system.svc:443/mutate--v1-pod?timeout=10s": no '
        'endpoints available for service "kueue-webhook-service"'
    )
    assert with_cure(text, OF_REFUSALS) == (
        f"{text}; webhook mpod.kb.io of the cluster does not answer: ask who runs it; it is tried "
        "again within 30 s"
    )


def test_what_is_not_known_stays_as_it_is() -> None:
    assert with_cure("something new.", OF_REFUSALS) == "something new"
