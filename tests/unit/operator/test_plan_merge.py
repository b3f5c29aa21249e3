import pytest

from sluice_operator.plan.facts.merge import merge

ENGINE = {"name": "engine", "image": "a", "env": [{"name": "A", "value": "1"}]}
WORKER = {"name": "worker", "image": "b"}


@pytest.mark.parametrize(
    ("base", "patch", "expected"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"args": ["--x"]}, {"args": ["--y"]}, {"args": ["--y"]}),
        (
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"key": "b"}]},
            {"tolerations": [{"key": "b"}]},
        ),
        (
            {"containers": [ENGINE, WORKER]},
            {"containers": [{"name": "worker", "image": "c"}]},
            {"containers": [ENGINE, {"name": "worker", "image": "c"}]},
        ),
        (
            {"containers": [WORKER]},
            {"containers": [{"name": "logs", "image": "x"}]},
            {"containers": [WORKER, {"name": "logs", "image": "x"}]},
        ),
        (
            {"containers": [ENGINE]},
            {"containers": [{"name": "engine", "env": [{"name": "B", "value": "2"}]}]},
            {
                "containers": [
                    ENGINE | {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
                ]
            },
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]},
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "value": "1"}]},
        ),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"$patch": "delete", "name": "A"}]},
            {"env": [{"name": "B", "value": "2"}]},
        ),
        (
            {"ports": [{"name": "http", "containerPort": 30000}]},
            {"ports": [{"containerPort": 8080}, {"containerPort": 8081}]},
            {
                "ports": [
                    {"name": "http", "containerPort": 30000},
                    {"containerPort": 8080},
                    {"containerPort": 8081},
                ]
            },
        ),
        (
            {"topologySpreadConstraints": [{"topologyKey": "host", "maxSkew": 1}]},
            {"topologySpreadConstraints": [{"topologyKey": "rack", "maxSkew": 2}]},
            {
                "topologySpreadConstraints": [
                    {"topologyKey": "host", "maxSkew": 1},
                    {"topologyKey": "rack", "maxSkew": 2},
                ]
            },
        ),
        (
            {"volumes": [{"name": "run", "emptyDir": {}}]},
            {"volumes": [{"name": "run", "hostPath": {"path": "/x"}}]},
            {"volumes": [{"name": "run", "hostPath": {"path": "/x"}}]},
        ),
        (
            {"volumeMounts": [{"name": "a", "mountPath": "/a"}]},
            {"volumeMounts": [{"name": "b", "mountPath": "/a"}, {"name": "c", "mountPath": "/c"}]},
            {"volumeMounts": [{"name": "b", "mountPath": "/a"}, {"name": "c", "mountPath": "/c"}]},
        ),
    ],
    ids=str,
)
def test_merge(base: object, patch: object, expected: object) -> None:
    assert merge(base, patch) == expected


def test_merge_changes_neither_side() -> None:
    base, patch = {"containers": [dict(WORKER)]}, {"containers": [{"name": "worker", "image": "c"}]}
    merge(base, patch)
    assert base == {"containers": [WORKER]}
    assert patch == {"containers": [{"name": "worker", "image": "c"}]}
