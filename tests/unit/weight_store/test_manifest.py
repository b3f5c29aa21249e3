from __future__ import annotations

import pytest

from sluice.weight_store.manifest import (
    Manifest,
    Step,
    StoredFile,
    StoredObject,
    VersionEntry,
    VersionError,
    VersionId,
    id_of,
    kept,
    parse,
    plan,
    removable,
)

DIGEST = "0" * 32


def entry(
    version: int, delta: int | None = 10, whole: int | None = None, attempt: int = 1
) -> VersionEntry:
    return VersionEntry(version=version, attempt=attempt, delta_bytes=delta, whole_bytes=whole)


# Snapshots at 0 and 4.
HISTORY = (
    entry(6),
    entry(5),
    entry(4, whole=100),
    entry(3),
    entry(2),
    entry(1),
    entry(0, None, 100),
)


def shown(steps: list[Step]) -> str:
    return " ".join(f"{'whole' if step.whole else 'delta'} {step.of.version}" for step in steps)


@pytest.mark.parametrize(
    ("held", "damaged", "expected"),
    [
        pytest.param(None, "", "whole 4 delta 5 delta 6", id="a joiner takes the newest snapshot"),
        pytest.param(5, "", "delta 6", id="the next version"),
        pytest.param(3, "", "delta 4 delta 5 delta 6", id="deltas lead over a snapshot"),
        pytest.param(6, "", "", id="nothing is newer"),
        pytest.param(3, "delta 4", "whole 4 delta 5 delta 6", id="a damaged delta"),
        pytest.param(4, "delta 6", "delta 5", id="as near as possible"),
        pytest.param(5, "delta 6", "", id="what is held is the nearest"),
        pytest.param(None, "delta 5", "whole 4", id="a joiner before a damaged delta"),
        pytest.param(
            None, "whole 4", "whole 0 delta 1 delta 2 delta 3 delta 4 delta 5 delta 6",
            id="a damaged snapshot",
        ),
        pytest.param(None, "whole 4 whole 0", "", id="nothing can be reached"),
        pytest.param(99, "", "whole 4 delta 5 delta 6", id="a version of no history"),
    ],
)  # fmt: skip
def test_the_way_to_the_newest_version(held: int | None, damaged: str, expected: str) -> None:
    words = damaged.split()
    refused = {
        Step(VersionId(int(number), 1), kind == "whole")
        for kind, number in zip(words[::2], words[1::2], strict=True)
    }
    have = None if held is None else VersionId(held, 1)
    assert shown(plan(HISTORY, have, refused)) == expected


def test_the_same_number_of_another_attempt_is_another_version() -> None:
    assert shown(plan(HISTORY, VersionId(6, 2))) == "whole 4 delta 5 delta 6"


def test_a_cheaper_snapshot_wins_over_many_deltas() -> None:
    history = (entry(4, whole=25), entry(3), entry(2), entry(1), entry(0, None, 100))
    assert shown(plan(history, VersionId(0, 1))) == "whole 4"


@pytest.mark.parametrize(("snapshots", "oldest"), [(1, 4), (2, 0), (3, 0)])
def test_versions_are_kept_back_to_a_snapshot(snapshots: int, oldest: int) -> None:
    assert kept(HISTORY, snapshots)[-1].version == oldest


def test_what_is_read_and_what_a_newer_attempt_wrote_stays() -> None:
    present = [VersionId(*pair) for pair in ((0, 1), (7, 1), (8, 1), (5, 2), (6, 2), (1, 3))]
    gone = removable(present, {VersionId(6, 2)}, {VersionId(7, 1)}, attempt=2)
    assert gone == [(0, 1), (5, 2)]


def stored(name: str, size: int) -> StoredObject:
    return StoredObject(name=name, bytes=size, digest=DIGEST)


def manifest() -> Manifest:
    files = (
        StoredFile(name="a", bytes=9, digest=DIGEST, delta=stored("a.delta", 2)),
        StoredFile(name="b", bytes=9, digest=DIGEST, whole=stored("b.whole", 5)),
    )
    return Manifest(version=3, attempt=1, files=files, earlier=(entry(2),))


def test_a_manifest_is_read_as_it_was_written() -> None:
    written = manifest()
    assert parse(written.model_dump_json().encode(), VersionId(3, 1)) == written


def test_a_file_without_a_delta_goes_whole() -> None:
    assert manifest().entry == entry(3, delta=7, whole=None)
    names = [found.name for _, found, _ in manifest().objects(Step(VersionId(3, 1), whole=False))]
    assert names == ["a.delta", "b.whole"]
    with pytest.raises(VersionError, match="a is not there whole"):
        manifest().objects(Step(VersionId(3, 1), whole=True))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100_000,
        b"{}",
        b'{"version": 1e400, "attempt": 1, "files": []}',
        manifest().model_dump_json().encode()[:-1],
        manifest().model_dump_json().replace('"a"', '"../a"').encode(),
        manifest().model_dump_json().replace('"format":1', '"format":2').encode(),
        manifest().model_dump_json().replace('"version":3', '"version":4').encode(),
    ],
    ids=["empty", "deep", "fields", "infinite", "cut off", "path", "format", "another version"],
)
def test_a_damaged_manifest_is_named(text: bytes) -> None:
    with pytest.raises(VersionError, match=r"version_0000003\.attempt1/manifest\.json"):
        parse(text, VersionId(3, 1))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("version_0000012.attempt3", VersionId(12, 3)),
        ("version_12345678.attempt1", VersionId(12345678, 1)),
        ("version_1", None),
        ("base", None),
    ],
)
def test_directories_of_versions(name: str, expected: VersionId | None) -> None:
    assert id_of(name) == expected
