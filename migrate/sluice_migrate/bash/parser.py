"""Parses words and operators into commands: lists, conditions, loops, functions."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice_migrate.bash.lexer import Lexer, Operator, Part, PartKind, ScriptError, Word

# Reserved words that end a list of commands.
_CLOSING = {
    "then", "elif", "else", "fi", "do", "done", "esac", "}",
}  # fmt: skip


@dataclass(slots=True)
class SimpleCommand:
    """A command's words, including the assignments before them."""

    words: list[Word]


@dataclass(slots=True)
class Test:
    """`[[ ... ]]`, a condition of words and operators."""

    words: list[Word | Operator]
    line: int


@dataclass(slots=True)
class Arithmetic:
    """`(( ... ))`, an arithmetic command."""

    text: str
    line: int


@dataclass(slots=True)
class Group:
    """`{ ...; }`, or the subshell `( ... )`."""

    body: Body
    subshell: bool = False


@dataclass(slots=True)
class If:
    """`if`, with a (condition, body) for each `if` and `elif`."""

    branches: list[tuple[Body, Body]]
    otherwise: Body


@dataclass(slots=True)
class Case:
    """`case`, with (patterns, body) for each arm."""

    subject: Word
    arms: list[tuple[list[Word], Body]]


@dataclass(slots=True)
class For:
    """`for NAME in ...`; `words` is None for the arguments of the script."""

    name: str
    words: list[Word] | None
    body: Body


@dataclass(slots=True)
class ArithmeticFor:
    """`for ((start; condition; step))`, its header in this order."""

    header: tuple[str, str, str]
    body: Body
    line: int


@dataclass(slots=True)
class While:
    """`while`, or `until`."""

    condition: Body
    body: Body
    until: bool


@dataclass(slots=True)
class Function:
    """A function definition."""

    name: str
    body: Body


Command = (
    SimpleCommand | Test | Arithmetic | Group | If | Case | For | ArithmeticFor | While | Function
)


@dataclass(slots=True)
class Pipeline:
    """Commands joined by `|`; `before` is the "&&" or "||" in front of it."""

    commands: list[Command] = field(default_factory=list)
    negated: bool = False
    before: str = ""


Body = list[Pipeline]


def parse(text: str, line: int = 1) -> Body:
    """Parse a script. Raises ScriptError if a construct is not closed."""
    parser = _Parser(text, line)
    body: Body = []
    while parser.token is not None:
        body += parser.body(frozenset())
        parser.advance()  # a stray closing word
    return body


class _Parser:
    """Recursive descent, with a method for each construct."""

    def __init__(self, text: str, line: int) -> None:
        self.lexer = Lexer(text, line)
        self.token: Word | Operator | None = None
        self.advance()

    def advance(self) -> None:
        """Go to the next word or operator."""
        self.token = self.lexer.next()

    @property
    def operator(self) -> str:
        """The current token if it is an operator, else ""."""
        return self.token.text if isinstance(self.token, Operator) else ""

    @property
    def reserved(self) -> str:
        """The current token if it may be a reserved word, else ""."""
        return self.token.plain if isinstance(self.token, Word) else ""

    def body(self, ends: frozenset[str]) -> Body:
        """Parse commands up to a closing word, or an operator of `ends`."""
        body: Body = []
        before = ""
        while self.token is not None and self.reserved not in _CLOSING:
            if self.operator in ends:
                break
            if self.operator and self.operator not in ("(", "(("):
                before = self.operator if self.operator in ("&&", "||") else before
                before = "" if self.operator in (";", "&") else before
                self.advance()
                continue
            pipeline = self._pipeline(ends)
            pipeline.before = before if body else ""
            body.append(pipeline)
            before = ""
        return body

    def _pipeline(self, ends: frozenset[str]) -> Pipeline:
        pipeline = Pipeline()
        while self.reserved in ("!", "time"):
            pipeline.negated ^= self.reserved == "!"
            self.advance()
        while True:
            pipeline.commands.append(self._command(ends))
            if self.operator not in ("|", "|&"):
                return pipeline
            while self.operator in ("|", "|&", "\n"):
                self.advance()
            if self.token is None or self.operator:
                return pipeline

    def _command(self, ends: frozenset[str]) -> Command:
        readers = {
            "if": self._if, "case": self._case, "for": self._for, "select": self._for,
            "while": self._while, "until": self._while, "{": self._braces, "[[": self._test,
            "function": self._function,
        }  # fmt: skip
        if self.operator == "((":
            return self._arithmetic()
        if self.operator == "(":
            return self._subshell()
        if reader := readers.get(self.reserved):
            return reader()
        return self._simple(ends)

    def _simple(self, ends: frozenset[str]) -> Command:
        words: list[Word] = []
        while isinstance(self.token, Word):
            words.append(self.token)
            self.advance()
        if len(words) == 1 and self.operator == "(" and words[0].plain:
            self.advance()
            if self.operator == ")":
                self.advance()
                return self._definition(words[0].plain)
        while self.operator in ("(", "((") and self.operator not in ends:
            self.advance()  # it has no special meaning
        return SimpleCommand(words)

    def _expect(self, word: str, opening: str, line: int) -> None:
        if self.reserved != word:
            raise ScriptError(f"line {line}: {opening} is opened here and never closed")
        self.advance()

    def _line(self) -> int:
        return self.token.line if self.token else self.lexer.line

    def _if(self) -> Command:
        line, branches, otherwise = self._line(), [], Body()
        while self.reserved in ("if", "elif"):
            self.advance()
            condition = self.body(frozenset())
            self._expect("then", "if", line)
            branches.append((condition, self.body(frozenset())))
        if self.reserved == "else":
            self.advance()
            otherwise = self.body(frozenset())
        self._expect("fi", "if", line)
        return If(branches, otherwise)

    def _while(self) -> Command:
        line, opening = self._line(), self.reserved
        self.advance()
        condition = self.body(frozenset())
        return While(condition, self._do(opening, line), opening == "until")

    def _do(self, opening: str, line: int) -> Body:
        self._expect("do", opening, line)
        body = self.body(frozenset())
        self._expect("done", opening, line)
        return body

    def _skip(self, *operators: str) -> None:
        while self.operator in operators:
            self.advance()

    def _for(self) -> Command:
        line = self._line()
        self.advance()
        if self.operator == "((":
            start, condition, step = ([*self._double().split(";"), "", ""])[:3]
            self._skip(";", "\n")
            return ArithmeticFor((start, condition, step), self._do("for", line), line)
        name, words = self.reserved, None
        self.advance()
        if self.reserved == "in":
            words = []
            self.advance()
            while isinstance(self.token, Word):
                words.append(self.token)
                self.advance()
        self._skip(";", "\n")
        return For(name, words, self._do("for", line))

    def _case(self) -> Command:
        line = self._line()
        self.advance()
        subject = self.token if isinstance(self.token, Word) else Word(line)
        self.advance()
        self._skip("\n")
        self._expect("in", "case", line)
        arms: list[tuple[list[Word], Body]] = []
        while True:
            self._skip("\n", ";;", ";;&", ";&", ";", "(")
            if self.reserved == "esac" or not isinstance(self.token, Word):
                break
            patterns: list[Word] = []
            while isinstance(self.token, Word) or self.operator == "|":
                patterns += [self.token] if isinstance(self.token, Word) else []
                self.advance()
            self._skip(")")
            arms.append((patterns, self.body(frozenset((";;", ";;&", ";&")))))
        self._expect("esac", "case", line)
        return Case(subject, arms)

    def _braces(self) -> Command:
        line = self._line()
        self.advance()
        body = self.body(frozenset())
        self._expect("}", "{", line)
        return Group(body)

    def _subshell(self) -> Command:
        line = self._line()
        self.advance()
        body = self.body(frozenset((")",)))
        if self.operator != ")":
            raise ScriptError(f"line {line}: ( is opened here and never closed")
        self.advance()
        return Group(body, subshell=True)

    def _function(self) -> Command:
        self.advance()
        name = self.reserved
        self.advance()
        self._skip("(", ")")
        return self._definition(name)

    def _definition(self, name: str) -> Command:
        self._skip("\n")
        return Function(name, [Pipeline([self._command(frozenset())])])

    def _test(self) -> Command:
        line, words = self._line(), list[Word | Operator]()
        while True:
            self._comparison(words)
            self.advance()
            if self.token is None:
                raise ScriptError(f"line {line}: [[ is opened here and never closed")
            if self.reserved == "]]":
                self.advance()
                return Test(words, line)
            words.append(self.token)

    def _comparison(self, words: list[Word | Operator]) -> None:
        """Read the operators that only `[[` has: `<`, `>`, and the pattern after `=~`."""
        lexer = self.lexer
        lexer.space()
        if lexer.peek() and lexer.peek() in "<>":
            words.append(Operator(lexer.take(), lexer.line))
        if words and isinstance(words[-1], Word) and words[-1].plain == "=~":
            start = lexer.at
            while lexer.peek() and lexer.peek() not in " \t\n":
                lexer.take()
            pattern = lexer.text[start : lexer.at]
            words.append(Word(lexer.line, [Part(PartKind.TEXT, pattern, quoted=True)]))

    def _arithmetic(self) -> Command:
        line = self._line()
        return Arithmetic(self._double(), line)

    def _double(self) -> str:
        """Return the text between `((` and `))`; the lexer is just after the opening."""
        lexer, line = self.lexer, self._line()
        lexer.at -= 2
        inner = lexer.balanced("(")
        self.advance()
        if not inner.endswith(")"):
            raise ScriptError(f"line {line}: (( is opened here and never closed")
        return inner[1:-1]
