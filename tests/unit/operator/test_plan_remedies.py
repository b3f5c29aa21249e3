"""A refusal of the API server comes with what to do.

The messages are those of API servers since 1.29.
"""

from __future__ import annotations

import pytest

from sluice_operator.plan.report.remedies import REFUSALS, with_remedy

FORBIDDEN = 'pods "demo-trainer-0-1-0" is forbidden: '


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        (
            "exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: "
            "requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8",
            "wait for free quota, have ResourceQuota gpus raised, or request less",
        ),
        (
            "failed quota: compute: must specify limits.cpu for: proxy; limits.memory for: proxy",
            "ResourceQuota compute requires limits.cpu for: proxy; limits.memory for: proxy of "
            "every container: set the role's resources, and those of containers in its template",
        ),
        (
            'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false '
            '(container "engine" must set '
            "securityContext.allowPrivilegeEscalation=false)",
            "the namespace only accepts pods of level restricted: change these fields in the "
            "role's template, or have "
            "the namespace's label pod-security.kubernetes.io/enforce lowered",
        ),
        (
            "maximum memory usage per Container is 8Gi, but limit is 64Gi",
            "a LimitRange of the namespace bounds memory: set the role's resources within it",
        ),
        (
            "ValidatingAdmissionPolicy 'images' with binding 'images' denied request: registry is "
            "not allowed",
            "the cluster's policy images forbids it: ask its administrator",
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
    assert with_remedy(FORBIDDEN + message, REFUSALS) == f"{FORBIDDEN}{message}; {cure}"


def test_a_webhook_is_named() -> None:
    text = 'admission webhook "validate.kyverno.svc-fail" denied the request: no root'
    assert with_remedy(text, REFUSALS).endswith(
        "; the cluster's policy validate.kyverno.svc-fail forbids it: ask its administrator"
    )


def test_a_webhook_that_is_down_is_named() -> None:
    text = (
        'Internal error occurred: failed calling webhook "mpod.kb.io": failed to call webhook: '
        'Post "https://kueue-webhook-service.kueue-system.svc:443/mutate--v1-pod?timeout=10s": no '
        'endpoints available for service "kueue-webhook-service"'
    )
    assert with_remedy(text, REFUSALS) == (
        f"{text}; the cluster's webhook mpod.kb.io does not answer: ask its administrator; the "
        "operator tries again within 30 s"
    )


def test_what_is_not_known_stays_as_it_is() -> None:
    assert with_remedy("something new.", REFUSALS) == "something new"
