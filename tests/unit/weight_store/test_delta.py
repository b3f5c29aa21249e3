from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.weight_store import delta
from sluice.weight_store.delta import DeltaError

Bytes = NDArray[np.uint8]


@st.composite
def versions(draw: st.DrawFn) -> tuple[Bytes, Bytes]:
    """Draw two arrays of one length that share some of their bytes."""
    old = draw(st.binary(max_size=300))
    new = draw(st.binary(min_size=len(old), max_size=len(old)))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    keep = np.random.default_rng(draw(st.integers(0, 99))).random(len(old)) < share
    before, after = (np.frombuffer(text, np.uint8).copy() for text in (old, new))
    after[keep] = before[keep]
    return before, after


@given(versions(), st.sampled_from([1, 2, 7, 64, 1000]))
@settings(deadline=None)
def test_the_new_version_follows_from_the_old_one_to_the_bit(
    pair: tuple[Bytes, Bytes], block: int
) -> None:
    old, new = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK_BYTES", block + block % 2)
        data = old.copy()
        changed = delta.apply(data, delta.encode(old, new))
    assert data.tobytes() == new.tobytes()
    assert (changed == 0) == (old.tobytes() == new.tobytes())


@pytest.mark.parametrize("kind", ["float16", "float32", "float8 and bfloat16 as integers"])
def test_every_bit_pattern_survives(kind: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)  # NaN with any payload, -0, infinities, subnormals
    old, new = every.view(np.uint8), np.roll(every, 12345).view(np.uint8)
    if kind == "float32":
        old, new = np.append(old, new), np.append(new, old)
    data = old.copy()
    delta.apply(data, delta.encode(old, new))
    assert data.tobytes() == new.tobytes()


def test_a_version_in_which_nothing_changed_takes_few_bytes() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    assert len(delta.encode(data, data.copy())) < 200


@given(st.binary(max_size=200), versions())
@settings(deadline=None)
def test_damaged_deltas_are_refused_or_end_in_other_bytes(
    noise: bytes, pair: tuple[Bytes, Bytes]
) -> None:
    """The hash of the result decides; whatever a delta holds, nothing else may happen."""
    old, new = pair
    encoded = delta.encode(old, new)
    for damaged in (noise, encoded[:-1], encoded + noise, encoded[: len(encoded) // 2] + noise):
        try:
            delta.apply(old.copy(), damaged)
        except DeltaError:
            continue


@pytest.mark.parametrize("length", [0, 9, 11])
def test_a_delta_of_another_length_is_refused(length: int) -> None:
    ten = np.arange(10, dtype=np.uint8)
    encoded = delta.encode(ten, ten + np.uint8(1))
    with pytest.raises(DeltaError, match="delta"):
        delta.apply(np.zeros(length, np.uint8), encoded)


def test_a_file_is_expanded_to_its_own_size_alone(tmp_path: Path) -> None:
    whole, packed, again = (tmp_path / name for name in ("whole", "packed", "again"))
    for size in (0, 1, 1 << 20):
        whole.write_bytes(bytes(size))
        delta.compress_file(whole, packed)
        delta.expand_file(packed, again, size)
        assert again.read_bytes() == bytes(size)
    with pytest.raises(DeltaError, match="1048576 bytes were compressed, expected 7"):
        delta.expand_file(packed, again, 7)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DeltaError):
        delta.expand_file(packed, again, 1 << 20)


def test_two_lengths_have_no_delta() -> None:
    with pytest.raises(ValueError, match="equal lengths"):
        delta.encode(np.zeros(3, np.uint8), np.zeros(4, np.uint8))
