"""Inspect a prompt file in one pass: formats, keys, labels, duplicates, rewards, lengths."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.api.groups.data import ImageLimits, PromptSource
from sluice.data.chat import PromptError
from sluice.data.files import LocatedRow
from sluice.data.harbor import CONFIGURATION
from sluice.data.rows import PromptRow, RowError, RowReader, is_verl, parse_row
from sluice.data.transform import digest
from sluice.images.reading import Header, read_header, read_image, scaled
from sluice.rewards.registry import BY_SOURCE, choose
from sluice.rewards.types import RewardError, RewardInput

SHOWN = 5
BARS = 10
# Length of a prompt in tokens or characters.
Length = Callable[[PromptRow], int]


@dataclass(slots=True)
class ImageCounts:
    """Counts over the images of all rows."""

    rows: int = 0
    most: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    scaled: int = 0
    pixels: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, headers: Sequence[Header], max_pixels: int) -> None:
        """Count the images of a row."""
        self.rows += bool(headers)
        self.most = max(self.most, len(headers))
        for header in headers:
            self.formats[header.format] += 1
            self.scaled += header.pixels > max_pixels
            self.pixels.append(header.pixels)
            self.sizes.append(header.size)

    def summary(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "images": len(self.pixels),
            "mostOfARow": self.most,
            "formats": dict(self.formats.most_common()),
            "scaledDown": self.scaled,
            "pixels": statistics(self.pixels),
            "bytes": statistics(self.sizes),
        }


@dataclass(frozen=True, slots=True)
class ImageReader:
    """How the images of rows are inspected.

    Parameters
    ----------
    limits
        Limits that they must keep.
    decode
        Decode every image, which finds those that are cut off, not just read its header.
    added
        Returns the tokens that images of these widths and heights add; None: not known.

    """

    limits: ImageLimits
    decode: bool = False
    added: Callable[[Sequence[tuple[int, int]]], int] | None = None

    def headers(self, row: PromptRow, directory: Path) -> list[Header]:
        """Read the headers of a row's images. Raises ImageError."""
        if self.decode:
            for raw in row.images:
                read_image(raw, directory, self.limits)
        return [read_header(raw, directory, self.limits) for raw in row.images]

    def tokens(self, headers: Sequence[Header]) -> int:
        """Return the tokens that images add to the prompt. Raises ValueError."""
        if self.added is None or not headers:
            return 0
        most = self.limits.max_pixels
        return self.added([scaled(header.width, header.height, most) for header in headers])


@dataclass(slots=True)
class Inspection:
    """Counts over all rows, and the first few unusable and too long rows as `file:line`."""

    rows: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    labels: int = 0
    tools: int = 0
    masked: int = 0
    duplicates: int = 0
    rewards: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    problems: list[str] = field(default_factory=list)
    longer: int = 0
    too_long: list[str] = field(default_factory=list)
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    images: ImageCounts = field(default_factory=lambda: ImageCounts())
    first: PromptRow | None = None

    def summary(self) -> dict[str, Any]:
        """Return everything but the example, as JSON."""
        counters = ("shapes", "keys", "prompts", "rewards", "sources")
        numbers = ("rows", "broken", "labels", "tools", "masked", "duplicates", "longer")
        return {
            **{name: getattr(self, name) for name in numbers},
            **{name: dict(getattr(self, name).most_common()) for name in counters},
            "problems": self.problems,
            "tooLong": self.too_long,
            "lengths": statistics(self.lengths),
            "histogram": [list(bar) for bar in histogram(self.lengths)],
            "images": self.images.summary() if self.images.rows else None,
        }


def inspect(
    rows: Iterable[LocatedRow],
    source: PromptSource,
    length: Length,
    limit: int | None = None,
    read: RowReader = parse_row,
    images: ImageReader | None = None,
) -> Inspection:
    """Inspect every row.

    It keeps 16 bytes and a set entry per row to find duplicates, and 8 bytes for its length.
    """
    inspection = Inspection()
    seen: set[bytes] = set()
    for located in rows:
        inspection.rows += 1
        inspection.keys.update(map(str, located.row))
        try:
            parsed = read(located.row, source)
            headers = images.headers(parsed, located.file.parent) if images else []
            size = length(parsed) + (images.tokens(headers) if images else 0)
        except (RowError, PromptError, ValueError) as error:
            inspection.broken += 1
            if len(inspection.problems) < SHOWN:
                inspection.problems.append(f"{located.where}: {error}")
            continue
        _count(inspection, located, parsed)
        if images:
            inspection.images.add(headers, images.limits.max_pixels)
        sources = [raw.source for raw in parsed.images]
        key = digest([parsed.prompt, getattr(parsed, "tokens", None), sources])
        inspection.duplicates += key in seen
        seen.add(key)
        inspection.lengths.append(size)
        if limit is not None and size > limit:
            inspection.longer += 1
            if len(inspection.too_long) < SHOWN:
                inspection.too_long.append(f"{located.where}: {size}")
    return inspection


def _count(inspection: Inspection, located: LocatedRow, row: PromptRow) -> None:
    inspection.first = inspection.first or row
    slime_or_verl = "verl" if is_verl(located.row) else "slime"
    inspection.shapes["harbor" if located.file.name == CONFIGURATION else slime_or_verl] += 1
    inspection.prompts["text" if isinstance(row.prompt, str) else "messages"] += 1
    inspection.labels += row.label is not None
    inspection.tools += row.tools is not None
    if not isinstance(row.prompt, str):
        inspection.masked += any("step_loss_mask" in m or "loss_mask" in m for m in row.prompt)
    inspection.rewards[reward_of(row)] += 1
    if data_source := row.metadata.get("data_source"):
        inspection.sources[str(data_source)] += 1


def reward_of(row: PromptRow) -> str:
    """Return the row's reward under `reward.type: data_source`, from its rm_type or data_source."""
    if not row.metadata.get("rm_type") and not row.metadata.get("data_source"):
        return "set by the job"
    try:
        name, _ = choose(RewardInput(row.prompt, "", row.label, row.metadata), BY_SOURCE)
    except RewardError:
        return "unknown"
    boxed = "boxed_" if str(row.metadata.get("rm_type", "")).startswith("boxed_") else ""
    return f"{boxed}{name}"


def statistics(lengths: array[int]) -> dict[str, float]:
    """Return the smallest, mean, median, 95th percentile and largest length."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    at = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
    picked = {name: float(ordered[round(share * (len(ordered) - 1))]) for name, share in at.items()}
    return picked | {"mean": round(sum(ordered) / len(ordered), 1)}


def histogram(lengths: array[int]) -> list[tuple[int, int, int]]:
    """Return at most ten bars of equal width: (from, up to and excluding, count)."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // BARS))
    counts = Counter((length - low) // width for length in lengths)
    return [
        (low + i * width, low + (i + 1) * width, counts[i])
        for i in range((high - low) // width + 1)
    ]
