"""Write the table of model support into a page, between its markers.

python tools/model_table.py PAGE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from sluice.model_support import NOT_TESTED, WORKS, outcome, reason, table, uses

START, END = "<!-- model support -->", "<!-- end of model support -->"
_TITLES = {
    "megatron": "Megatron",
    "fsdp": "FSDP2",
    "sglang": "SGLang",
    "vllm": "vLLM",
    "transformers": "transformers",
}
_USES = {
    "trains": "trains",
    "lora": "LoRA",
    "images": "images",
    "serves": "serves",
    "updates": "updates",
}


def lines() -> Iterator[str]:
    """Yield the table, and its reasons as numbered notes below it."""
    notes: list[str] = []
    yield "| `model_type` | " + " | ".join(_TITLES[part] for part in uses()) + " |"
    yield "|" + "---|" * (1 + len(uses()))
    for model_type in sorted(table()):
        cells = (_cell(model_type, part, tested, notes) for part, tested in uses().items())
        yield f"| `{model_type}` | " + " | ".join(cells) + " |"
    yield ""
    for number, note in enumerate(notes, 1):
        yield f"{number}. {note[0].upper()}{note[1:]}."


def _cell(model_type: str, part: str, tested: tuple[str, ...], notes: list[str]) -> str:
    works, fails = list[str](), list[str]()
    for use in tested:
        result = outcome(model_type, part, use)
        if result == WORKS:
            works.append(_USES[use])
        elif result != NOT_TESTED:
            note = reason(result)
            notes.extend([] if note in notes else [note])
            fails.append(f"no: {_USES[use]} ({notes.index(note) + 1})")
    return ", ".join([*works, *fails])


def page_with(text: str) -> str:
    """Return a page with the table of now between its markers."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return "\n".join([before + START, "", *lines(), "", END + after])


def main() -> None:
    page = Path(sys.argv[1])
    page.write_text(page_with(page.read_text()))


if __name__ == "__main__":
    main()
