"""Measure prompts for `sluice data inspect`, and print its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice.data.rows import PromptRow
from sluice_cli.data.inspection import SHOWN, Inspection, Length

if TYPE_CHECKING:
    from sluice.data.answers import Encoded
    from sluice.images.processor import ImageProcessor

# Characters of the example, and of the longest bar of the histogram.
_EXAMPLE = 1500
_BAR = 40


def lengths_of(model: Path | None, chat: bool) -> tuple[Callable[[PromptRow], str], Length]:
    """Return functions that give a prompt as the model sees it, and its length.

    The length is in tokens of the model's tokenizer, or without a model in characters.
    """
    if model is None:
        return _plain, lambda row: len(_plain(row))
    from sluice.data.chat import encode, load_tokenizer, render

    tokenizer = load_tokenizer(model)
    return (
        lambda row: render(tokenizer, row.prompt, chat=chat, tools=row.tools),
        lambda row: len(encode(tokenizer, row.prompt, chat=chat, tools=row.tools)),
    )


def added_of(model: Path | None) -> Callable[[Sequence[tuple[int, int]]], int] | None:
    """Return a function that gives the tokens that images of these sizes add to a prompt.

    Without a model the length is in characters, and images add none. Only if a row has images must
    the model have an image processor.
    """
    if model is None:
        return None

    @cache
    def processor() -> ImageProcessor:
        from sluice.images.processor import ImageProcessor

        return ImageProcessor(model)

    return lambda sizes: processor().added(sizes)


def answers_of(
    model: Path | None, chat: bool, shorten: Callable[[Encoded], Encoded] | None = None
) -> tuple[Callable[[PromptRow], str], Length]:
    """Return functions that give a row with its answer as the model sees it, and its length.

    Parameters
    ----------
    model, chat
        Model directory, and whether texts go through its chat template.
    shorten
        Cuts a row before training. The length is that of the whole row.

    Returns
    -------
    Two functions of a row. The text has « and » around the trained tokens.

    """
    if model is None:
        return _plain, lambda row: len(_plain(row))
    from sluice.data.answers import encode
    from sluice.data.chat import PromptError, load_tokenizer, stop_tokens
    from sluice.data.preferences import named_answers

    tokenizer = load_tokenizer(model)
    stops = stop_tokens(tokenizer, model)

    def encoded(row: PromptRow) -> tuple[list[Encoded], int]:
        answers = [answer for _, answer in named_answers(row)]
        whole = [encode(tokenizer, answer, chat_text=chat, stops=stops) for answer in answers]
        encodings = [shorten(encoding) if shorten else encoding for encoding in whole]
        if not all(any(encoding.mask) for encoding in encodings):
            raise PromptError("no token of the row is trained")
        return encodings, max(len(encoding.tokens) for encoding in whole)

    def marked(row: PromptRow) -> str:
        return "\n".join(map(marked_answer, encoded(row)[0]))

    def marked_answer(encoding: Encoded) -> str:
        runs = groupby(zip(encoding.tokens, encoding.mask, strict=True), key=lambda pair: pair[1])
        texts = ((trained, tokenizer.decode([token for token, _ in run])) for trained, run in runs)
        return "".join(f"«{text}»" if trained else text for trained, text in texts)

    return marked, lambda row: encoded(row)[1]


def _plain(row: PromptRow) -> str:
    return row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, ensure_ascii=False)


def print_inspection(facts: dict[str, Any], inspection: Inspection) -> None:
    """Print what an inspection found; `facts` holds its counts and the example."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(facts['source'])}[/]: {inspection.rows} rows", soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    usable = max(inspection.rows - inspection.broken, 1)
    for name, value in (
        ("format", _counted(facts["shapes"])),
        ("prompts", _counted(facts["prompts"])),
        (
            "keys",
            ", ".join(
                k if n == inspection.rows else f"{k} ({n})" for k, n in facts["keys"].items()
            ),
        ),
        ("labels", f"{inspection.labels} ({inspection.labels / usable:.0%})"),
        ("tools", str(inspection.tools) if inspection.tools else ""),
        (
            "loss masks",
            f"{inspection.masked} rows; only supervised fine-tuning uses them"
            if inspection.masked
            else "",
        ),
        ("images", _images(facts["images"])),
        ("data_source", _counted(facts["sources"])),
        ("reward", _counted(facts["rewards"])),
        (
            "duplicates",
            f"{inspection.duplicates} of {inspection.rows} rows repeat an earlier prompt"
            if inspection.duplicates
            else "none",
        ),
    ):
        if value:
            table.add_row(name, escape(value))
    console.print(table)
    _show_lengths(console, facts)
    if facts["example"] is not None:
        text = facts["example"]
        console.print("\n[bold]first prompt[/]")
        console.print(text if len(text) <= _EXAMPLE else f"{text[:_EXAMPLE]}...", markup=False)
    _show_list(
        console,
        f"{inspection.longer} rows are longer than --max-prompt-tokens and are cut"
        if facts["truncation"]
        else f"{inspection.longer} prompts are longer than --max-prompt-tokens",
        inspection.longer,
        inspection.too_long,
    )
    _show_list(
        console, f"{inspection.broken} rows are unusable", inspection.broken, inspection.problems
    )


def _images(facts: dict[str, Any] | None) -> str:
    """Describe the images of all rows."""
    if facts is None:
        return ""
    pixels, sizes = facts["pixels"], facts["bytes"]
    scaled_down = (
        f", {facts['scaledDown']} are scaled down by the default data.images.maxPixels"
        if facts["scaledDown"]
        else ""
    )
    return (
        f"{facts['images']} in {facts['rows']} rows, up to {facts['mostOfARow']} in a row; "
        f"{_counted(facts['formats'])}; {pixels['median']:,.0f} pixels (up to "
        f"{pixels['max']:,.0f}), {sizes['median']:,.0f} bytes (up to {sizes['max']:,.0f})"
        f"{scaled_down}"
    )


def _counted(counts: dict[str, int]) -> str:
    shown = [
        name if len(counts) == 1 else f"{name} ({count})"
        for name, count in list(counts.items())[:8]
    ]
    return ", ".join(shown) + (f" and {len(counts) - 8} more" if len(counts) > 8 else "")


def _show_lengths(console: Console, facts: dict[str, Any]) -> None:
    statistics = facts["lengths"]
    if not statistics:
        return
    parts = ", ".join(
        f"{name} {statistics[name]:g}" for name in ("min", "median", "mean", "p95", "max")
    )
    console.print(f"\n[bold]{facts['unit']}[/]: {parts}")
    most = max(count for _, _, count in facts["histogram"])
    for start, end, count in facts["histogram"]:
        console.print(f"{start:>8}-{end - 1:<8} {'█' * -(-count * _BAR // most):<{_BAR}} {count}")


def _show_list(console: Console, title: str, count: int, lines: list[str]) -> None:
    if not count:
        return
    console.print(f"\n[bold red]{title}[/]")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if count > SHOWN:
        console.print(f"  ... and {count - SHOWN} more")
