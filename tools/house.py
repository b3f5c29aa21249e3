"""Measure the house: sizes, rooms, imports between them, and the English of its comments.

    python tools/house.py                      the tables of docs/architecture.md
    python tools/house.py --write PAGE         write them into a page, between its markers
    python tools/house.py --offenders PATH ... every sentence that a rate counts, as file:line
    python tools/house.py --single-importers   small modules that one neighbour alone imports

It needs nothing but Python and git, so that other repositories can be measured with it:
`python tools/house.py --root ../httpx --product httpx --tests tests`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = ("sluice", "services", "operator", "cli", "client", "migrate", "observability")
TESTS = ("tests",)
GENERATED = ("sluice/wire/v1/",)
START, END = "<!-- house -->", "<!-- end of house -->"  # markers of the tables in a page
SMALL = 80  # lines of a module that may be a part of its only importer

# What the review of the house counted, per 1,000 words of docstrings and comments.
PHRASES = {
    "where": re.compile(r"\bwhere\b", re.I),
    "of its own": re.compile(
        r"\bof (?:its|their|his|our|one's) own\b|\bof ours\b|\ba user's\b", re.I
    ),
    "stands, lies, gives way": re.compile(
        r"\b(?:stands?|stood|lies|lay) (?!for\b)\w+|\bgives? way\b", re.I
    ),
    "beside": re.compile(r"\bbesides?\b", re.I),
    "nobody, nothing, none": re.compile(r"\b(?:nobody|nothing|[Nn]othing|Nobody|none)\b"),
}
RELATIVE = re.compile(
    r"(?:Of|By|As|Its|Their|The same|Who|Whose|Which|What|How|Where|One)\b(?! or more\b)"
)
RIDDLES = frozenset(["each", "one", "known", "wanted", "told", "asked", "of", "here", "found"])


@dataclass
class Prose:
    """The docstrings and comments of a file, each with the line that it starts on."""

    docstrings: list[tuple[int, str]] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)
    lines: int = 0

    def texts(self) -> Iterator[tuple[int, str]]:
        yield from self.docstrings
        yield from self.comments


def listed(root: Path, folders: tuple[str, ...]) -> list[Path]:
    """Python files under `folders` that git tracks, generated ones and links left out."""
    names = subprocess.run(
        ["git", "ls-files", "--", *folders], cwd=root, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [
        root / name
        for name in names
        if name.endswith(".py")
        and not name.startswith(GENERATED)
        and not (root / name).is_symlink()
        and (root / name).exists()
    ]


def prose(source: str) -> Prose:
    """Split the prose of a module from its code; a bare string after a constant is a docstring."""
    result = Prose(lines=source.count("\n"))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                result.docstrings.append((statement.lineno, statement.value.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(
            r"#\s*(?:noqa|type:|!|pragma)", token.string
        ):
            result.comments.append((token.start[0], token.string.lstrip("# ")))
    return result


def without_code(text: str) -> str:
    """Drop what is quoted as code, and doctest lines: they are no English."""
    return re.sub(r"`[^`]*`|^\s*>>>.*$", " ", text, flags=re.M)


def opening_is_relative(text: str) -> bool:
    return bool(RELATIVE.match(text.lstrip()))


@dataclass
class English:
    """Rates of the phrases per 1,000 words, and shares in percent."""

    words: int
    per_thousand: dict[str, float]
    relative_openings: float
    comment_lines: float
    riddle_names: int


def english(files: list[Path]) -> English:
    words = docstrings = relative = lines = comment_lines = riddles = 0
    counts: Counter[str] = Counter()
    for path in files:
        source = path.read_text()
        text_parts = prose(source)
        lines += text_parts.lines
        comment_lines += len({line for line, _ in text_parts.comments})
        for _, text in text_parts.texts():
            plain = without_code(text)
            words += len(plain.split())
            for name, pattern in PHRASES.items():
                counts[name] += len(pattern.findall(plain))
        docstrings += len(text_parts.docstrings)
        relative += sum(opening_is_relative(text) for _, text in text_parts.docstrings)
        riddles += sum(1 for _ in riddle_names(source))
    return English(
        words,
        {name: 1000 * counts[name] / max(words, 1) for name in PHRASES},
        100 * relative / max(docstrings, 1),
        100 * comment_lines / max(lines, 1),
        riddles,
    )


def riddle_names(source: str) -> Iterator[tuple[int, str]]:
    """Variables, arguments and functions whose names say nothing of what they hold."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in RIDDLES:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in RIDDLES:
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in RIDDLES:
            yield node.lineno, node.name


def offenders(path: Path) -> Iterator[str]:
    source = path.read_text()
    text_parts = prose(source)
    for line, text in text_parts.texts():
        plain = without_code(text)
        for name, pattern in PHRASES.items():
            for match in pattern.finditer(plain):
                context = " ".join(plain[max(match.start() - 40, 0) : match.end() + 40].split())
                yield f"{path}:{line + text[: match.start()].count(chr(10))}: {name}: {context}"
    for line, text in text_parts.docstrings:
        if opening_is_relative(text):
            yield f"{path}:{line}: relative opening: {text.strip().splitlines()[0][:80]}"
    for line, name in riddle_names(source):
        yield f"{path}:{line}: name: {name}"


@dataclass
class Modules:
    """Which module of the product imports which, at import time or later."""

    paths: dict[str, Path]
    imports: dict[str, set[str]]

    @classmethod
    def read(cls, root: Path, files: list[Path]) -> Modules:
        paths = {module_of(path): path for path in files}
        imports = {
            name: {
                target
                for target in imported(path.read_text(), name, path.name == "__init__.py", paths)
                if target != name
            }
            for name, path in paths.items()
        }
        return cls(paths, imports)

    def importers(self) -> dict[str, set[str]]:
        result: dict[str, set[str]] = defaultdict(set)
        for name, targets in self.imports.items():
            for target in targets:
                result[target].add(name)
        return result

    def single_importers(self) -> list[tuple[str, str, int]]:
        """Small modules with one importer, in the same folder: module, importer, lines."""
        importers = self.importers()
        result = []
        for name, path in sorted(self.paths.items()):
            users = importers.get(name, set())
            if path.name in ("__init__.py", "__main__.py") or len(users) != 1:
                continue
            (user,) = users
            lines = path.read_text().count("\n")
            if lines <= SMALL and self.paths[user].parent == path.parent:
                result.append((name, user, lines))
        return result

    def two_way_pairs(self) -> list[tuple[str, str]]:
        """Sibling folders that import each other."""
        edges = set()
        for name, targets in self.imports.items():
            for target in targets:
                pair = siblings(self.paths[name].parent, self.paths[target].parent)
                if pair is not None:
                    edges.add(pair)
        return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


def siblings(a: Path, b: Path) -> tuple[str, str] | None:
    """The two folders in which the paths of `a` and `b` part, or None if one holds the other."""
    for depth, (left, right) in enumerate(zip(a.parts, b.parts, strict=False)):
        if left != right:
            return "/".join(a.parts[: depth + 1]), "/".join(b.parts[: depth + 1])
    return None


def module_of(path: Path) -> str:
    """The dotted name of a file, from the outermost folder that has an `__init__.py`."""
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(parts)) or path.stem


def imported(source: str, name: str, is_package: bool, paths: dict[str, Path]) -> Iterator[str]:
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in paths)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                if f"{base}.{alias.name}" in paths:
                    yield f"{base}.{alias.name}"
                elif base in paths:
                    yield base


def tops(root: Path, files: list[Path]) -> dict[str, int]:
    """Files at the top of each package, `__init__` left out."""
    result: dict[str, int] = {}
    for path in files:
        if path.name == "__init__.py" and not (path.parent.parent / "__init__.py").exists():
            result[path.parent.name] = sum(p.parent == path.parent for p in files) - 1
    return result


def shared_class_names(files: list[Path]) -> Counter[str]:
    """Public classes whose name stands in two files or more."""
    owners: Counter[str] = Counter()
    for path in files:
        tree = ast.parse(path.read_text())
        owners.update(
            {n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"}
        )
    return Counter({name: count for name, count in owners.items() if count > 1})


def leaf_fields(crd: Path) -> int:
    """Leaf paths of the spec in a CRD's schema; a list's items and a map's values count once."""
    import ruamel.yaml

    def leaves(schema: dict) -> int:  # type: ignore[type-arg]
        if schema.get("properties"):
            return sum(leaves(child) for child in schema["properties"].values())
        if isinstance(schema.get("items"), dict):
            return leaves(schema["items"])
        if isinstance(schema.get("additionalProperties"), dict):
            return leaves(schema["additionalProperties"])
        return 1

    document = ruamel.yaml.YAML(typ="safe").load(crd.read_text())
    version = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return leaves(version["properties"]["spec"])


def lines_of(files: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in files)


def tables(root: Path, product: tuple[str, ...], tests: tuple[str, ...]) -> Iterator[str]:
    """Lines of two Markdown tables: sizes and structure, and the English of product and tests."""
    files, test_files = listed(root, product), listed(root, tests)
    modules = Modules.read(root, files)
    yield "| size and structure | product | tests |"
    yield "|---|---|---|"
    yield f"| Python files | {len(files)} | {len(test_files)} |"
    yield f"| lines | {lines_of(files):,} | {lines_of(test_files):,} |"
    most = sorted(tops(root, files).items(), key=lambda item: -item[1])[:5]
    top_files = ", ".join(f"`{name}` {count}" for name, count in most)
    yield f"| files at the top of a package, the five largest | {top_files} | |"
    yield f"| pairs of folders that import each other | {len(modules.two_way_pairs())} | |"
    yield (
        f"| modules of at most {SMALL} lines that only one module of their folder imports "
        f"| {len(modules.single_importers())} | |"
    )
    yield f"| class names in two files or more | {len(shared_class_names(files))} | |"
    crd = root / "crds" / "sluice.dev_rljobs.yaml"
    if crd.exists():
        yield f"| fields of an RLJob (leaf paths of the CRD) | {leaf_fields(crd)} | |"
    readme = root / "README.md"
    if readme.exists():
        yield f"| lines of the README | {lines_of([readme])} | |"
    yield ""
    yield "| docstrings and comments | product | tests |"
    yield "|---|---|---|"
    rates, test_rates = english(files), english(test_files)
    for name, rate in rates.per_thousand.items():
        yield f"| “{name}”, per 1,000 words | {rate:.1f} | {test_rates.per_thousand[name]:.1f} |"
    openings = (f"{r.relative_openings:.1f} %" for r in (rates, test_rates))
    yield f"| docstrings that open with a relative or a possessive | {' | '.join(openings)} |"
    comments = (f"{r.comment_lines:.1f} %" for r in (rates, test_rates))
    yield f"| lines that are comments | {' | '.join(comments)} |"
    names = ", ".join(sorted(RIDDLES))
    yield f"| names such as {names} | {rates.riddle_names} | {test_rates.riddle_names} |"


def rewrite(page: Path, lines: list[str]) -> None:
    """Replace what is between the markers of a page."""
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no markers {START} and {END}")
    page.write_text("\n".join([before + start, "", *lines, "", end + after]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--product", nargs="*", default=PRODUCT)
    parser.add_argument("--tests", nargs="*", default=TESTS)
    parser.add_argument("--offenders", nargs="*", metavar="PATH")
    parser.add_argument("--single-importers", action="store_true")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    arguments = parser.parse_args()
    product, tests = tuple(arguments.product), tuple(arguments.tests)
    if arguments.offenders is not None:
        for path in listed(arguments.root, tuple(arguments.offenders) or product):
            for line in offenders(path):
                print(line)
    elif arguments.single_importers:
        modules = Modules.read(arguments.root, listed(arguments.root, product))
        for name, user, lines in modules.single_importers():
            print(f"{lines:4}  {name}  <- {user}")
        for a, b in modules.two_way_pairs():
            print(f"two-way: {a} <-> {b}")
        for name, count in sorted(shared_class_names(listed(arguments.root, product)).items()):
            print(f"class in {count} files: {name}")
    else:
        rendered = list(tables(arguments.root, product, tests))
        if arguments.write is None:
            print("\n".join(rendered))
        else:
            rewrite(arguments.write, rendered)


if __name__ == "__main__":
    main()
