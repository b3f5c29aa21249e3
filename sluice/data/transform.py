"""Rows of one shape -> rows of another: between slime's and verl's, with an id of their own, split
in two. Pure.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from sluice.api.groups.data import PromptSource
from sluice.data.files import Row
from sluice.data.rows import is_verl, parse_row, prompt_key

Shape = Literal["slime", "verl"]
_VERL = ("data_source", "prompt", "ability", "reward_model", "extra_info")
UID = "uid"


def to_slime(row: Row, source: PromptSource) -> Row:
    """prompt, label, metadata (with verl's data_source, ability and extra_info), tools; other
    columns stay.
    """
    parsed = parse_row(row, source)
    named = {"prompt": parsed.prompt, "label": parsed.label, "metadata": parsed.metadata}
    return named | ({source.tools_key: parsed.tools} if parsed.tools else {}) | _others(row, source)


def to_verl(row: Row, source: PromptSource, number: int, data_source: str) -> Row:
    """data_source, prompt as messages, ability, reward_model, extra_info (the metadata); other
    columns stay.

    data_source: for rows whose metadata have none. number: extra_info.index of rows that have none.
    """
    parsed = parse_row(row, source)
    metadata = dict(parsed.metadata)
    prompt = parsed.prompt
    verl_row: Row = {
        "data_source": metadata.pop("data_source", data_source),
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": metadata.pop("ability", ""),
        "reward_model": _reward_model(row, parsed.label),
        "extra_info": {"index": number} | metadata,
    }
    return (
        verl_row | ({source.tools_key: parsed.tools} if parsed.tools else {}) | _others(row, source)
    )


def _reward_model(row: Row, label: Any) -> Row:
    reward_model = row["reward_model"] if is_verl(row) else {"style": "rule"}
    return {**reward_model, "ground_truth": label}


def _others(row: Row, source: PromptSource) -> Row:
    """Columns that mean nothing to sluice."""
    read = {
        prompt_key(row, source),
        source.label_key,
        "label",
        source.metadata_key,
        source.tools_key,
    }
    read |= set(_VERL) if is_verl(row) else set()
    return {key: value for key, value in row.items() if key not in read}


def with_uid(row: Row, source: PromptSource, seen: Counter[str]) -> Row:
    """The row with `uid` in its metadata (verl: extra_info), where rewards and logs see it. A uid
    that is there stays.

    It is the digest of prompt and label, so the same row gets the same one in every file; the
    second of two equal rows gets `-1` behind it, and so on.
    """
    parsed = parse_row(row, source)
    if UID in parsed.metadata:
        return row
    uid = digest([parsed.prompt, parsed.label]).hex()
    seen[uid] += 1
    key = "extra_info" if is_verl(row) else source.metadata_key
    held = row.get(key) or {}
    held = json.loads(held) if isinstance(held, str) else held
    return row | {key: {**held, UID: uid if seen[uid] == 1 else f"{uid}-{seen[uid] - 1}"}}


def digest(value: Any) -> bytes:
    """16 bytes that stand for a JSON value."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def chosen(total: int, wanted: int, seed: int) -> Iterator[bool]:
    """Which of `total` rows are among `wanted` random ones, in order and without a list of them.

    Every choice is equally likely (selection sampling, Knuth, The Art of Computer Programming
    3.4.2, algorithm S).
    """
    generator = random.Random(seed)
    for position in range(total):
        take = generator.random() * (total - position) < wanted
        wanted -= take
        yield take
