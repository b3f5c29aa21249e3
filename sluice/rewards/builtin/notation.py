"""Read a final answer as text: its spelling, numbers, units and list of values.

The mathematical rewards share these functions, so that one rule says which answers cannot be right:
a list if the label has one value, a number that differs from the label's, other words. The module
uses only the standard library, and every step is linear in the length of the answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

_LONGEST_NUMBER = 4000  # characters; Python refuses integers of more than 4,300 digits
_LARGEST_EXPONENT = 400
# Longer answers are not read.
LONGEST = 5000
# Deeper nesting is not read, because parsers take far longer than linear time on it.
DEEPEST = 32

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "∞": r"\infty ", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ",
        "°": r"^{\circ}", "√": r"\sqrt", "∪": r"\cup ", "∈": r"\in ", "≤": r"\le ", "≥": r"\ge ",
        "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    }
)  # fmt: skip
_WRAPPED = (
    re.compile(r"\$\$?([^$]*)\$?\$"),
    re.compile(r"\\\((.*)\\\)", re.DOTALL),
    re.compile(r"\\\[(.*)\\\]", re.DOTALL),
)
_COLOR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}\s*")
_SIZE = re.compile(
    r"\\(?:left|right)\s*\."
    r"|\\(?:left|right|[bB]igg?[lr]?|displaystyle|[hH]uge|LARGE|[lL]arge)(?![a-zA-Z])"
)
_STYLE = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathrm|mathsf|operatorname|textbf|textit|textrm|text|[mf]box|"
    r"emph|underline)\s*\{([^{}]*)\}"
)
_NOTHING = re.compile(r"\\varnothing(?![a-z])|\\\{\s*\\\}")
_SPACE = re.compile(r"(?<!\\)\\(?:[;: !]|,(?!\d)|q?quad(?![a-zA-Z]))|~")
_SHORT_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?=[\d{])")
_SHORT_FRACTION = re.compile(r"\\frac(?:(\d)\s*(?:(\d)|(?=\{))|(\{[^{}]*\})\s*(\d))")
_BARE_DECIMAL = re.compile(r"(?<![\d.])\.(?=\d)")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_END = re.compile(r"(?<=[^\s.])\s*[.,;:]\s*$")


def plain(answer: str) -> str:
    r"""Return one spelling of an answer, without decoration that has no meaning.

    This removes colours, bold print, sizes of brackets, thin spaces and a final full stop, and
    replaces ``\dfrac`` by ``\frac``. Prose becomes ``\text{...}``. Case is kept.
    """
    text = re.sub(r"\s+", " ", answer.translate(_UNICODE)).strip()
    for wrapped in _WRAPPED:
        if match := wrapped.fullmatch(text):
            text = match[1].strip()
    text = _SPACE.sub(" ", _SIZE.sub("", _COLOR.sub("", text)).replace("{,}", ","))
    text = _STYLE.sub(_restyled, _NOTHING.sub(r"\\emptyset", text))
    text = _SHORT_FRACTION.sub(_braced, _FRACTION.sub(r"\\frac", text))
    text = _SHORT_SCRIPT.sub(r"\1\2", text)
    text = _BARE_DECIMAL.sub("0.", _END.sub("", text)).strip()
    while text.startswith("{") and text.endswith("}") and _closes_at_end(text):
        text = text[1:-1].strip()
    if not any(bracket in text for bracket in "([{"):
        text = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    return text


def _restyled(match: re.Match[str]) -> str:
    content, before = match[1].strip(), match.string[: match.start()].rstrip()
    is_unit = before[-1:].isdigit() or before[-1:] in ("}", ")")  # 5\text{ m}
    # A number or a variable, in bold print say.
    if re.fullmatch(r"[^a-zA-Z\\]*", content) or (
        re.fullmatch(r"[a-zA-Z]", content) and not is_unit
    ):
        return content
    return rf"\text{{{match[1]}}}"


def _braced(match: re.Match[str]) -> str:
    above, below, group, digit = match.groups()
    if group:
        return rf"\frac{group}{{{digit}}}"
    return rf"\frac{{{above}}}" + (f"{{{below}}}" if below else "")


def _closes_at_end(text: str) -> bool:
    """Return whether the brace that opens the text is closed by its last character."""
    depth = 0
    for at, character in enumerate(text):
        if text[at - 1 : at] != "\\":
            depth += (character == "{") - (character == "}")
        if depth == 0:
            return at == len(text) - 1
    return False


# --- numbers

_DIGITS = r"(?:\d{1,3}(?:(?:,|\\,|\s)\d{3})+|\d+)"
_DECIMAL = rf"{_DIGITS}(?:\.\d*)?"
_SIGNED = rf"\s*[-+]?\s*{_DECIMAL}\s*"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:"
    rf"(?P<repeating>\d+\.\d*)\\(?:over)?(?:line|bar)\s*\{{(?P<period>\d+)\}}"
    rf"|(?P<mantissa>{_DECIMAL})\s*(?:(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*|[eE])"
    rf"(?P<brace>\{{?)\s*(?P<exponent>[-+]?\s*\d{{1,3}})\s*\}}?"
    rf"|(?:(?P<whole>\d+)\s*)?\\frac\s*\{{(?P<above>{_SIGNED})\}}\s*\{{(?P<below>{_SIGNED})\}}"
    rf"|(?:(?P<whole_of>\d+)\s+)?(?P<over>{_DECIMAL})\s*/\s*(?P<under>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL}))"
)


def number(text: str) -> Fraction | None:
    r"""Return the exact value of a number; None if the text is not a number.

    It reads whole numbers with or without thousands separators, decimals (also repeating ones),
    fractions, mixed numbers and powers of ten such as ``1.6\times 10^{-19}``.
    """
    if len(text) > _LONGEST_NUMBER or not (match := _NUMBER.fullmatch(text.strip())):
        return None
    groups = match.groupdict()
    value = _magnitude(groups)
    return -value if value is not None and groups["sign"] == "-" else value


def _magnitude(groups: dict[str, str | None]) -> Fraction | None:
    if (decimal := groups["decimal"]) is not None:
        return _fraction(decimal)
    if (mantissa := groups["mantissa"]) is not None:
        exponent = int((groups["exponent"] or "").replace(" ", ""))
        if abs(exponent) > _LARGEST_EXPONENT:
            return None
        return _fraction(mantissa) * Fraction(10) ** exponent
    if (repeating := groups["repeating"]) is not None:
        period = groups["period"] or ""
        places = len(repeating.partition(".")[2])
        return _fraction(repeating) + Fraction(int(period), 10**places * (10 ** len(period) - 1))
    whole = groups["whole"] or groups["whole_of"]
    above = _fraction(groups["above"] or groups["over"] or "")
    below = _fraction(groups["below"] or groups["under"] or "")
    if below == 0 or (whole and (above < 0 or below < 0)):
        return None
    return (int(whole) if whole else 0) + above / below


def _fraction(decimal: str) -> Fraction:
    return Fraction(re.sub(r"\\,|[,\s]", "", decimal).removesuffix("."))


def is_decimal(text: str) -> bool:
    """Return whether a number is written with a decimal point."""
    return "." in text and number(text) is not None


# --- units

_SHORT_UNIT = re.compile(
    "cm|mm|km|kg|mg|ml|ft|in|lbs?|oz|mph|kph|hrs?|min|sec|sq|am|pm|deg|rad"  # others are products
)
# Words behind a number that change its value, or say that it is not the whole answer.
_NO_UNIT = re.compile(
    "hundred|thousand|million|billion|trillion|dozen|score|half|third|quarter|squared|cubed|"
    "factorial|times|more|less|fewer|not|no|or|and|if|when|unless|mod|modulo|base|plus|minus|over|"
    "to|through|than|except|maybe|perhaps|either|neither|nor|wrong|incorrect|false|but|where|for|"
    "with|root|negative|answer|is|are|equals"
)
_SAME_UNIT = {
    "dollar": "$", "degree": "°", "deg": "°", "percent": "%", "percentage": "%",
    "centimeter": "cm", "centimetre": "cm", "kilometer": "km", "kilometre": "km",
    "metre": "meter", "m": "meter", "hr": "hour", "min": "minute", "sec": "second", "s": "second",
    "inche": "inch", "in": "inch", "feet": "foot", "ft": "foot",
}  # fmt: skip
_CURRENCY = re.compile(r"^(-?\s*)(\\\$|[$€£])\s*(?=[-\d.])")
_POWER = r"(?P<power>(?:\^\s*\{?\s*[23]\s*\}?)?)"
_MARK = re.compile(r"(?P<mark>\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree)$")
_OF_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_UNIT = (
    re.compile(rf"(?<=[\d}})])\s*\\text\s*\{{(?P<words>[^{{}}]*)\}}\s*{_POWER}$"),
    re.compile(rf"(?<=[\d}})])\s*(?P<words>[a-zA-Z]+(?:[ .]+[a-zA-Z]+)*\.?)\s*{_POWER}$"),
)


def without_unit(text: str) -> tuple[str, str]:
    """Split an answer into its value and its unit; "" if it has no unit.

    Words that change a value (million, dozen) or take it back (or, not) are not units and stay.
    """
    if match := _CURRENCY.match(text):
        return text[: match.end(1)] + text[match.end() :], match[2].removeprefix("\\")
    if (match := _MARK.search(text)) and not _OF_ANGLE.search(text):
        return text[: match.start()].rstrip(), "%" if "%" in match[0] else "°"
    for at, pattern in enumerate(_UNIT):
        if match := pattern.search(text[-200:] if len(text) > 200 else text):
            words = match["words"].lower().replace(".", " ").split()
            start = len(text) - len(match[0].lstrip()) if len(text) > 200 else match.start()
            bare = at == 1
            if _is_unit(words, bare=bare):
                power = re.sub(r"[^23]", "", match["power"])
                return text[:start].rstrip(), _unit_name(words) + power
    return text, ""


def _is_unit(words: list[str], *, bare: bool) -> bool:
    if not 0 < len(words) <= 4 or not all(map(str.isalpha, words)):
        return False
    if any(map(_NO_UNIT.fullmatch, words)):
        return False
    # Without \text, short words are products of variables: 5xy.
    return not bare or all(len(word) >= 4 or _SHORT_UNIT.fullmatch(word) for word in words)


def changes_value(text: str) -> bool:
    """Return whether a text behind a number has a word that changes it or takes it back."""
    return any(map(_NO_UNIT.fullmatch, re.findall(r"[a-z]+", text.lower())))


def _unit_name(words: list[str]) -> str:
    singular = [word if len(word) < 3 else word.removesuffix("s") for word in words]
    return " ".join(_SAME_UNIT.get(word, word) for word in singular)


# --- several values

_OR = re.compile(
    r"\s*,?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
    r"|\\(?:lor|vee)(?![a-zA-Z]))\s*"
)
_OPENS = {"(": ")", "[": "]", "{": "}"}


def values(text: str) -> list[str]:
    r"""Split an answer at its top-level commas, semicolons, "and" and "or".

    ``2 \pm 1`` has two values; a matrix is one, and so is a number with thousands separators.
    """
    if number(text) is not None or "\\begin" in text:
        return [text]
    parts = [part.strip() for part in split(_OR.sub(",", text), ",;")]
    return [value for part in parts if part for value in _both_signs(part)]


def _both_signs(text: str) -> list[str]:
    if text.count("\\pm") != 1 or brackets(text):
        return [text]
    return [text.replace("\\pm", sign).removeprefix("+").strip() for sign in ("+", "-")]


def split(text: str, separators: str) -> list[str]:
    """Split at characters that are not inside brackets of any kind."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(depth - 1, 0)
        elif depth == 0 and character in separators and text[at - 1 : at] != "\\":
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def nesting(text: str) -> int:
    """Return how many brackets of any kind are open at once."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def brackets(text: str) -> tuple[str, str, str] | None:
    r"""Return (opening, content, closing) if one pair of brackets surrounds the text.

    ``(1,2]`` and ``\{1,2\}`` are surrounded, ``(1)(2)`` is not.
    """
    set_ = text.startswith("\\{") and text.endswith("\\}")
    inner = text[2:-2] if set_ else text[1:-1]
    if not set_ and not (len(text) > 1 and text[0] in "([" and text[-1] in ")]"):
        return None
    depth = 0
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
    if depth:
        return None
    return ("{", inner, "}") if set_ else (text[0], inner, text[-1])


# --- words

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_SENTENCE = re.compile(r"[^\W\d_][^\W\d_]*(?:[\s'’.,-]+[^\W\d_]+)*", re.UNICODE)


def words(text: str) -> str | None:
    r"""Return an answer of words, such as "Monday", "ABCD" or ``\text{no solution}``.

    None for others.

    A single letter is a variable, with or without brackets.
    """
    inner = _TEXT.sub(r"\1", text).strip()
    if match := re.fullmatch(r"\(?([A-Z])\)?", inner):
        return match[1]
    if len(inner) < 2 or not _SENTENCE.fullmatch(inner):
        return None
    return re.sub(r"[\s.,-]+", " ", inner).strip()


def is_product(text: str) -> bool:
    """Return whether a word may be a product such as ``xy``: up to three small letters."""
    return bool(re.fullmatch(r"[a-z]{1,3}", text))


def same_words(answer: str, label: str) -> bool:
    """Return whether words agree; only the first letter of each may differ in case."""
    ours, theirs = answer.split(), label.split()
    shortest = 2 if len(ours) > 1 else 3  # Ab is another product than ab
    return len(ours) == len(theirs) and all(
        a == b or (len(a) >= shortest and a[1:] == b[1:] and a[0].lower() == b[0].lower())
        for a, b in zip(ours, theirs, strict=True)
    )


# --- equations

_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)|\\in(?![a-z])")
_GREEK = r"(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|omega|sigma|tau|rho|Delta|Omega)"
# A quantity that is given a value: x, f(2), a_{10}, \angle ABC, P(A), |AB|, \text{Area}.
_NAME = re.compile(
    rf"\(?\|?(?:[a-zA-Z]'*|\\{_GREEK}(?![a-z])|\\(?:text|overline|vec|mathbb|widehat)\s*\{{[^{{}}]*\}}|"
    r"\\(?:angle|triangle|measuredangle)(?![a-z])|\s|,|_\w|_\{[^{}]*\}|\^\{-1\}|\([^()]*\))+\|?\)?"
)


def sides(text: str) -> list[str]:
    r"""Split an equation, or a chain of them, at its top-level ``=`` and ``\in``."""
    return [side.strip() for side in split(_EQUALS.sub("\0", text), "\0")]


def is_name(text: str) -> bool:
    """Return whether the left side of an equation only names what has a value, as in f(2) = 5."""
    return bool(_NAME.fullmatch(text)) and not re.fullmatch(r"[ei]", text)


def listed(text: str) -> list[str]:
    r"""Return the values of an answer; ``x \in \{1,2\}`` and ``\{1,2\}`` list 1 and 2."""
    entries = values(text)
    if len(entries) != 1:
        return entries
    named, *others = sides(entries[0])
    inside = brackets(others[-1] if len(others) == 1 and is_name(named) else entries[0])
    return values(inside[1]) if inside and inside[0] == "{" else entries


# --- what cannot be right

_DOTS = re.compile(r"\\[lc]?dots|\.\.|\?")
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d")


def unreadable(text: str) -> bool:
    """Return whether a text is no single value: dots, question marks, numbers side by side."""
    return bool(_DOTS.search(text)) or (
        number(text) is None and "\\begin" not in text and bool(_SIDE_BY_SIDE.search(text))
    )


def contradicts(answer: str, label: str) -> bool:
    """Return whether an answer cannot be right, whatever a lenient grader makes of it.

    It names more or fewer values than the label, another number, another unknown or other words.
    """
    if len(answer) > LONGEST or nesting(answer) > DEEPEST:
        return True
    answer, label = plain(answer), plain(label)
    if squeezed(answer) == squeezed(label):
        return False
    if len(listed(answer)) != len(listed(label)) or (unreadable(answer) and not unreadable(label)):
        return True
    if _equation_contradicts(sides(answer), sides(label)):
        return True
    if (same := same_number(answer, label)) is not None:
        return not same
    prose = _OR.sub(",", without_unit(answer)[0])
    if "\\text" in prose and "\\text" not in label and not words(answer):
        return True  # words that the label does not have, and that are no unit
    said, expected = words(answer), words(label)
    if said is None or expected is None or (is_product(said) and is_product(expected)):
        return False
    return not same_words(said, expected)


def _equation_contradicts(answer: list[str], label: list[str]) -> bool:
    """Return whether ``6 = 7`` or ``2x = 6`` answers 6, ``y = 3`` answers ``x = 3``."""
    right = number(without_unit(label[-1])[0])
    said = [number(without_unit(side)[0]) for side in answer[:-1]]
    if any(side is not None and side != right for side in said):
        return True
    if len(label) > 1 and not is_name(label[0]):
        return len(answer) == 1 or set(map(squeezed, answer)) != set(map(squeezed, label))
    if len(answer) == 1 or said[0] is not None:
        return False
    if len(label) > 1:
        return squeezed(answer[0]) != squeezed(label[0])
    return has_letter(answer[0]) and not is_name(answer[0])


def has_letter(text: str) -> bool:
    """Return whether a text has a letter that is not part of a command, so perhaps a variable."""
    return bool(re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)))


def _percent_of(answer: str, label: str, ours: Fraction, theirs: Fraction) -> bool:
    """Return whether one of two numbers is the other in percent: 50% answers 0.5."""
    marked, expected = (without_unit(text)[1] == "%" for text in (answer, label))
    return (marked and not expected and ours == 100 * theirs) or (
        expected and not marked and theirs == 100 * ours
    )


def same_number(answer: str, label: str) -> bool | None:
    """Return whether two numbers are equal, None if one of the answers is no number."""
    (ours, our_unit), (theirs, their_unit) = without_unit(answer), without_unit(label)
    a, b = number(ours), number(theirs)
    if a is None or b is None:
        return None
    if our_unit and their_unit and our_unit != their_unit:
        return False
    return a == b or _percent_of(answer, label, a, b)


def squeezed(text: str) -> str:
    """Return an answer without spaces but those between numbers, to compare its spelling."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
