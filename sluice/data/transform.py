"""Pure transformations of rows: between slime's and verl's shape, add a uid, split in two."""

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
    """Return a row with prompt, label, metadata and tools; other columns stay.

    The metadata include verl's data_source, ability and extra_info.
    """
    parsed = parse_row(row, source)
    named = {"prompt": parsed.prompt, "label": parsed.label, "metadata": parsed.metadata}
    return named | ({source.tools_key: parsed.tools} if parsed.tools else {}) | _others(row, source)


def to_verl(row: Row, source: PromptSource, number: int, data_source: str) -> Row:
    """Return a row with data_source, prompt as messages, ability, reward_model and extra_info.

    The metadata become extra_info; other columns stay.

    Parameters
    ----------
    row
        A row of either shape.
    source
        Names of its columns.
    number
        `extra_info.index` of a row without it.
    data_source
        `data_source` of a row without it.

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
    """Return the columns that sluice does not read."""
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
    """Return the row with a `uid` in its metadata (verl: extra_info), visible to rewards and logs.

    An existing uid stays. A new one is the digest of prompt and label, so equal rows get the same
    uid in every file; `-1`, `-2`, ... are appended for repeated rows.
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
    """Return a 16-byte hash of a JSON value."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def chosen(total: int, count: int, seed: int) -> Iterator[bool]:
    """Yield, for each of `total` rows in order, whether it is among `count` random rows.

    Every choice is equally likely (selection sampling, Knuth, The Art of Computer Programming
    3.4.2, algorithm S).
    """
    generator = random.Random(seed)
    for position in range(total):
        take = generator.random() * (total - position) < count
        count -= take
        yield take
