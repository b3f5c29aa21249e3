"""Programs whose output or exit status is known without running them.

These work on text alone, or ask which kind of machine the script runs on.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace

from sluice_migrate.bash.conditions import Truth
from sluice_migrate.bash.expansion import Argument, Variables

# Numbers that `seq` may print.
_MOST_NUMBERS = 10_000
# Checks for accelerators of Huawei, AMD and Moore Threads.
_OTHER_MACHINES = re.compile(r"torch_npu|npu-smi|rocm-smi|torch_musa")


def succeeds(arguments: list[Argument]) -> Truth:
    """Tell whether a program succeeds; None if that is not known.

    Sluice runs on NVIDIA GPUs, so a check for another kind of accelerator fails.
    """
    words = [argument.text for argument in arguments]
    if _OTHER_MACHINES.search(" ".join(words)):
        return False
    if words[0] in ("command", "which", "type", "hash", "grep", "nvidia-smi"):
        return None
    return True if words[0] in ("echo", "printf", "cd", "mkdir", "pwd", "sleep", "ray") else None


def output(arguments: list[Argument], variables: Variables) -> Argument | None:
    """Return the output of a program that works on text alone; None for any other."""
    name, rest = arguments[0].text, arguments[1:]
    if name == "pwd" and not rest:
        folder = variables.values.get("PWD")
        return folder and replace(folder, line=arguments[0].line)
    texts = [argument.text for argument in rest if argument.text != "--"]
    line = arguments[0].line
    text = _text_output(name, texts)
    if text is None:
        return None
    missing = tuple(word for argument in rest for word in argument.missing)
    if missing and name not in ("echo", "printf"):
        return None
    return Argument(text, line, missing, tuple(w for a in rest for w in a.conditional))


def _text_output(name: str, texts: list[str]) -> str | None:
    match name, texts:
        case "echo", [*_]:
            words = [text for text in texts if text not in ("-n", "-e")]
            return None if "-e" in texts and "\\" in "".join(words) else " ".join(words)
        case "printf", [form, *values] if form in ("%s", "%s\n") and len(values) == 1:
            return values[0]
        case "printf", [form, *values]:
            return _formatted(form, values)
        case "basename", [path, *suffix] if not path.startswith("-"):
            base = posixpath.basename(path.rstrip("/")) or path[:1]
            ending = suffix[0] if suffix else ""
            return base.removesuffix(ending) if base != ending else base
        case "dirname", [path] if not path.startswith("-"):
            return posixpath.dirname(path.rstrip("/")) or "."
        case (("realpath" | "readlink"), [*options, path]) if set(options) <= {"-f", "-m", "-e"}:
            return posixpath.normpath(path) if path.startswith("/") else None
        case "seq", [*numbers] if all(re.fullmatch(r"-?\d+", number) for number in numbers):
            return _counted([int(number) for number in numbers])
    return None


def change_directory(path: Argument, variables: Variables) -> None:
    """Read `cd`. After a path that is not known, the current folder is not known either."""
    current = variables.values.pop("PWD", None)
    if path.missing:
        return
    if path.text.startswith("/"):
        variables.values["PWD"] = Argument(posixpath.normpath(path.text), path.line)
    elif current is not None and not (current.missing and ".." in path.text.split("/")):
        text = posixpath.normpath(posixpath.join(current.text, path.text))
        variables.values["PWD"] = Argument(text, path.line, current.missing)


def _counted(numbers: list[int]) -> str | None:
    match numbers:
        case [last]:
            span = range(1, last + 1)
        case [first, last]:
            span = range(first, last + 1)
        case [first, step, last] if step:
            span = range(first, last + (1 if step > 0 else -1), step)
        case _:
            return None
    return "\n".join(map(str, span)) if len(span) <= _MOST_NUMBERS else None


def _formatted(form: str, values: list[str]) -> str | None:
    """Format as `printf` does with %s and %d; None for other formats."""
    kinds = re.findall(r"%(.)", form)
    if "\\" in form.replace("\\n", "") or len(kinds) != len(values) or set(kinds) - {"s", "d"}:
        return None
    pieces = re.split(r"%.", form.replace("\\n", "\n"))
    return pieces[0] + "".join(
        value + piece for value, piece in zip(values, pieces[1:], strict=True)
    )
