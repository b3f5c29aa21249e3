"""Evaluates bash arithmetic: `$((...))`, `((...))` and `for ((...))`."""

from __future__ import annotations

import re
from collections.abc import Callable

_SYMBOL = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<=|>>=|[-+*/%&|^]=|<<|>>|<=|>=|==|!="
    r"|&&|\|\||\+\+|--|[-+*/%<>=!&|^~?:(),])"
)
# Binary operators by precedence, the weakest first.
_BINARY: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<=", ">=", "<", ">"),
    ("<<", ">>"), ("+", "-"), ("*", "/", "%"), ("**",),
)  # fmt: skip
_ASSIGNMENTS = ("+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
# Python's numbers do not overflow: a larger exponent would fill the memory.
_LARGEST_SHIFT = 63


def evaluate(text: str, get: Callable[[str], int], put: Callable[[str, int], None]) -> int:
    """Evaluate an expression of whole numbers.

    Parameters
    ----------
    text
        The expression.
    get, put
        Read and set a variable.

    Raises
    ------
    ValueError
        If it is not an expression.
    ArithmeticError
        If it divides by zero.

    """
    reader = _Reader(text, get, put)
    value = reader.comma() if reader.symbol else 0
    if reader.symbol:
        raise ValueError(f"{reader.symbol!r} is not expected here")
    return value


class _Reader:
    """Recursive descent, with a method for each level of precedence."""

    def __init__(
        self, text: str, get: Callable[[str], int], put: Callable[[str, int], None]
    ) -> None:
        self.text, self.at, self.get, self.put = text, 0, get, put
        self.symbol = ""
        self.advance()

    def advance(self) -> str:
        symbol, rest = self.symbol, self.text[self.at :]
        match = _SYMBOL.match(rest)
        if not match and rest.strip():
            raise ValueError(f"{rest.strip()!r} is not an arithmetic expression")
        self.symbol = match[1] if match else ""
        self.at += match.end() if match else len(rest)
        return symbol

    def comma(self) -> int:
        value = self.assignment()
        while self.symbol == ",":
            self.advance()
            value = self.assignment()
        return value

    def assignment(self) -> int:
        if re.match(r"[A-Za-z_]", self.symbol):
            before = self.symbol, self.at
            name = self.advance()
            if self.symbol == "=" or self.symbol in _ASSIGNMENTS:
                operator = self.advance()[:-1]
                value = self.assignment()
                value = _apply(operator, self.get(name), value) if operator else value
                self.put(name, value)
                return value
            self.symbol, self.at = before
        return self.choice()

    def choice(self) -> int:
        condition = self.binary(0)
        if self.symbol != "?":
            return condition
        self.advance()
        yes = self.assignment()
        if self.advance() != ":":
            raise ValueError("? without :")
        no = self.assignment()
        return yes if condition else no

    def binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self.unary()
        left = self.binary(level + 1)
        while self.symbol in _BINARY[level]:
            operator = self.advance()
            right = self.binary(level if operator == "**" else level + 1)
            left = _apply(operator, left, right)
        return left

    def unary(self) -> int:
        symbol = self.advance()
        if symbol in ("-", "+", "!", "~"):
            value = self.unary()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[symbol]
        if symbol in ("++", "--"):
            name = self.advance()
            self.put(name, self.get(name) + (1 if symbol == "++" else -1))
            return self.get(name)
        if symbol == "(":
            value = self.comma()
            if self.advance() != ")":
                raise ValueError("( is not closed")
            return value
        if symbol[:1].isdigit():
            return int(symbol, 16) if symbol[1:2] in ("x", "X") else _number(symbol)
        if not re.match(r"[A-Za-z_]", symbol):
            raise ValueError(f"expected a number, found {symbol!r}")
        value = self.get(symbol)
        if self.symbol in ("++", "--"):
            self.put(symbol, value + (1 if self.advance() == "++" else -1))
        return value


def _number(symbol: str) -> int:
    # A leading zero means octal.
    return int(symbol, 8) if len(symbol) > 1 and symbol[0] == "0" else int(symbol)


def _apply(operator: str, left: int, right: int) -> int:
    match operator:
        case "/" | "%":
            # bash rounds towards zero, Python towards minus infinity.
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if operator == "/" else left - quotient * right
        case "**":
            if not 0 <= right <= _LARGEST_SHIFT:
                raise ValueError(f"an exponent of {right}")
            return int(left**right)
        case "<<" | ">>":
            if not 0 <= right <= _LARGEST_SHIFT:
                raise ValueError(f"a shift by {right}")
            return left << right if operator == "<<" else left >> right
        case "||":
            return int(bool(left or right))
        case "&&":
            return int(bool(left and right))
    table: dict[str, Callable[[int, int], int]] = {
        "+": int.__add__, "-": int.__sub__, "*": int.__mul__, "|": int.__or__, "^": int.__xor__,
        "&": int.__and__, "==": int.__eq__, "!=": int.__ne__, "<=": int.__le__, ">=": int.__ge__,
        "<": int.__lt__, ">": int.__gt__,
    }  # fmt: skip
    return int(table[operator](left, right))
