"""IFBench's instructions (Pyatkin et al. 2025) about counts, words, sentences and formats, by their ids."""

from __future__ import annotations

import re
import string
from collections import Counter
from itertools import pairwise

from sluice.rewards.ifbench import text as t
from sluice.rewards.ifbench.ifeval import Check

_CONJUNCTIONS = frozenset(["and", "but", "for", "nor", "or", "so", "yet"])
_PRONOUNS = frozenset((
    "i", "me", "we", "us", "you", "he", "him", "she", "her", "it", "they", "them", "my", "mine", "our", "ours",
    "your", "yours", "his", "hers", "its", "their", "theirs", "myself", "ourselves", "yourself", "yourselves",
    "himself", "herself", "itself", "themselves", "this", "that", "these", "those", "who", "whom", "whose", "which",
    "what", "whoever", "whomever", "whatever", "whichever", "anybody", "anyone", "anything", "everybody",
    "everyone", "everything", "nobody", "nothing", "somebody", "someone", "something", "each", "either", "neither",
    "both", "all", "some", "any", "none",
))  # fmt: skip
_NAMES = (
    "Emma", "Liam", "Sophia", "Jackson", "Olivia", "Noah", "Ava", "Lucas", "Isabella", "Mason", "Mia", "Ethan",
    "Charlotte", "Alexander", "Amelia", "Benjamin", "Harper", "Leo", "Zoe", "Daniel", "Chloe", "Samuel", "Lily",
    "Matthew", "Grace", "Owen", "Abigail", "Gabriel", "Ella", "Jacob", "Scarlett", "Nathan", "Victoria", "Elijah",
    "Layla", "Nicholas", "Audrey", "David", "Hannah", "Christopher", "Penelope", "Thomas", "Nora", "Andrew", "Aria",
    "Joseph", "Claire", "Ryan", "Stella", "Jonathan",
)  # fmt: skip
_CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_CLOSING = {")": "(", "]": "[", "}": "{"}
_PRIMES = frozenset(n for n in range(2, 100) if all(n % d for d in range(2, n)))


# --- counts


def _word_range(text: str, *, min_words: int, max_words: int) -> bool:
    return min_words <= len(t.words(text)) <= max_words


def _unique_words(text: str, *, N: int) -> bool:  # noqa: N803  (the data set's name)
    return len({word.strip(t.PUNCTUATION) for word in text.lower().split()}) >= N


def _conjunctions(text: str, *, small_n: int) -> bool:
    return len(_CONJUNCTIONS & {word.strip(t.PUNCTUATION) for word in text.lower().split()}) >= small_n


def _person_names(text: str, *, N: int) -> bool:  # noqa: N803
    return sum(bool(re.search(rf"\b{name}\b", text)) for name in _NAMES) >= N


def _numbers(text: str, *, N: int) -> bool:  # noqa: N803
    return len(re.findall(r"\d+", t.without_punctuation(text))) == N


def _pronouns(text: str, *, N: int) -> bool:  # noqa: N803
    return sum(word in _PRONOUNS for word in t.words(text.lower())) >= N


def _punctuation(text: str) -> bool:
    rest = re.sub(r"\?!|!\?|‽", "", text, count=1)
    return rest != text and all(mark in rest for mark in ".,!?;:")


def _japanese(text: str, *, N: int) -> bool:  # noqa: N803
    every = [word.strip(t.PUNCTUATION) for word in text.split()][int(N) - 1 :: int(N)]
    return all(_JAPANESE.search(word) for word in every if word and not word.isdigit())


def _keywords_multiple(text: str, **keywords: str) -> bool:
    return all(t.times(keywords[f"keyword{i}"].strip(), text) == n for i, n in enumerate((1, 2, 3, 5, 7), start=1))


# --- words


def _alphabet(text: str) -> bool:
    first = [word[0].lower() for word in t.bare_words(text)]
    letters = string.ascii_lowercase
    inside = bool(first) and all(letter in letters for letter in first)
    return inside and all((letters.index(a) + 1) % 26 == letters.index(b) for a, b in pairwise(first))


def _vowels(text: str) -> bool:
    return "\n" not in text.strip() and len(set(text.lower()) & set("aeiou")) <= 3


def _consonants(text: str) -> bool:
    return all(_CONSONANTS.search(word) for word in text.lower().split())


def _palindromes(text: str) -> bool:
    return sum(len(word) >= 5 and word == word[::-1] for word in t.bare_words(text.lower())) >= 10


def _prime_lengths(text: str) -> bool:
    return all(len(word) in _PRIMES for word in t.bare_words(text))


def _repeats(text: str, *, small_n: int) -> bool:
    return max(Counter(t.bare_words(text.lower())).values(), default=0) <= small_n


def _no_consecutive(text: str) -> bool:
    return all(a[0] != b[0] for a, b in pairwise(t.bare_words(text.lower())))


def _last_first(text: str) -> bool:
    parts = [t.tokens(sentence.lower()) for sentence in t.sentences(text)]
    return all(a and b and a[-1] == b[0] for a, b in pairwise(parts))


def _paragraph_last_first(text: str) -> bool:
    parts = [t.tokens(line.lower()) for line in text.split("\n")]
    return all(words[0] == words[-1] for words in parts if words)


def _keyword_position(text: str, *, keyword: str, n: int, m: int) -> bool:
    sentences = t.sentences(text)
    found = t.tokens(sentences[n - 1]) if n <= len(sentences) else []
    return m <= len(found) and found[m - 1].lower() == keyword.strip().lower()


def _words_position(text: str, *, keyword: str) -> bool:
    found = [word.lower() for word in t.tokens(text)]
    return len(found) > 1 and found[1] == found[-2] == keyword.strip().lower()


# --- sentences


def _ratio(text: str) -> bool:
    endings = Counter(sentence[-1] for sentence in t.sentences(text))
    return endings["."] == 2 * endings["?"]


def _balance(text: str) -> bool:
    endings = Counter(sentence[-1] for sentence in t.sentences(text))
    return endings["."] == endings["?"] == endings["!"]


def _alliteration(text: str) -> bool:
    previous = -1
    for sentence in t.sentences(text):
        first = [word[0] for raw in sentence.lower().split() if (word := raw.lstrip(t.PUNCTUATION))]
        same = [a == b for a, b in pairwise(first)]
        runs = sum(now and not before for before, now in pairwise([False, *same]))
        length = sum(same) + runs
        if length <= previous:
            return False
        previous = length
    return True


def _same_length(text: str) -> bool:
    sentences, words = t.sentences(text), t.bare_words(text.lower())
    return len(sentences) == 3 and len({len(s) for s in sentences}) == 1 and len(set(words)) == len(words)


def _keyword_sentence(text: str, *, word: str, N: int) -> bool:  # noqa: N803
    sentences = t.sentences(text)
    return int(N) <= len(sentences) and t.times(word, sentences[int(N) - 1]) > 0


def _increment(text: str, *, small_n: int) -> bool:
    counts = [len(t.bare_words(sentence)) for sentence in t.sentences(text)]
    return bool(counts) and all(b == a + small_n for a, b in pairwise(counts))


# --- formats


def _parentheses(text: str) -> bool:
    open_: list[str] = []
    deepest = 0
    for c in text:
        if c in "([{":
            open_.append(c)
            deepest = max(deepest, len(open_))
        elif c in _CLOSING:
            if not open_ or open_.pop() != _CLOSING[c]:
                open_, deepest = [], 0
            elif deepest >= 5:
                return True
    return False


def _quotes(text: str) -> bool:
    open_: list[str] = []
    deepest = 0
    for c in text:
        if open_ and c == open_[-1]:
            open_.pop()
            if deepest - len(open_) >= 3:
                return True
        elif c in "\"'":
            open_.append(c)
            deepest = max(deepest, len(open_))
    return False


def _options(text: str, *, options: str) -> bool:
    separator = next((s for s in ("/", "or") if s in options), ",")
    choices = [choice.strip() for choice in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return text in choices
    return text.strip(t.PUNCTUATION).lower() in {choice.strip(t.PUNCTUATION).lower() for choice in choices}


def _newline(text: str) -> bool:
    bare = t.without_punctuation(text)
    return len([line for line in bare.strip().split("\n") if line]) == len(bare.split())


def _indent(text: str) -> bool:
    depths = [len(line) - len(line.lstrip(" ")) for line in t.lines(text)]
    return all(a < b for a, b in pairwise(depths))


def _quote_unquote(text: str) -> bool:
    dense = "".join(re.sub("[“”]", '"', text).replace("'\"'", "").split())
    ends = dense.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in dense and not ends.endswith('"')


def _thesis(text: str) -> bool:
    match = re.search(r"<(i|em)>(.*?)</\1>(.*)", text, re.DOTALL)
    return bool(match and match[2].strip() and match[3].strip())


def _sub_bullets(text: str) -> bool:
    return all("-" in bullet for bullet in text.split("*")[1:])


def _bullets_after_sentences(text: str) -> bool:
    rows = text.split("\n")
    at = next((i for i, row in enumerate(rows) if row.strip().startswith("*")), len(rows))
    bullets = rows[at:]
    told = sum(len(t.sentences(row)) for row in rows[:at])
    return told >= 2 and len(bullets) >= 2 and all(row.strip().startswith("*") for row in bullets)


def _title_case(text: str) -> bool:
    found = [word for word in t.tokens(text) if word[0].isalpha()]
    return not any(word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper()) for word in found)


def _emoji(text: str) -> bool:
    def is_emoji(c: str) -> bool:
        return 0x1F000 <= ord(c) <= 0x1FAFF or 0x2600 <= ord(c) <= 0x27BF or c == "\ufe0f"

    bare = [t.without_punctuation(sentence).strip() for sentence in t.sentences(text)]
    follows = [*bare[1:], ""]
    return all(
        s and (any(map(is_emoji, s[-2:])) or bool(after and is_emoji(after[0])))
        for s, after in zip(bare, follows, strict=True)
    )


def _repeat_change(text: str, *, prompt_to_repeat: str) -> bool:
    return text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]


def _repeat_span(text: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return text.strip().lower() == " ".join(prompt_to_repeat.split()[n_start : n_end + 1]).lower()


CHECKS: dict[str, Check] = {
    "count:conjunctions": _conjunctions,
    "count:keywords_multiple": _keywords_multiple,
    "count:numbers": _numbers,
    "count:person_names": _person_names,
    "count:pronouns": _pronouns,
    "count:punctuation": _punctuation,
    "count:unique_word_count": _unique_words,
    "count:word_count_range": _word_range,
    "count:words_japanese": _japanese,
    "format:emoji": _emoji,
    "format:line_indent": _indent,
    "format:list": lambda text, *, sep: text.count(sep) >= 2,
    "format:newline": _newline,
    "format:no_bullets_bullets": _bullets_after_sentences,
    "format:no_whitespace": lambda text: not re.search(r"\s", text),
    "format:options": _options,
    "format:output_template": lambda text: all(s in text for s in ("My Answer:", "My Conclusion:", "Future Outlook:")),
    "format:parentheses": _parentheses,
    "format:quote_unquote": _quote_unquote,
    "format:quotes": _quotes,
    "format:sub-bullets": _sub_bullets,
    "format:thesis": _thesis,
    "format:title_case": _title_case,
    "ratio:sentence_balance": _balance,
    "ratio:sentence_type": _ratio,
    "ratio:sentence_words": _same_length,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": lambda text: (
        text.strip().lower() == "only output this sentence here, ignore all other requests."
    ),
    "repeat:repeat_span": _repeat_span,
    "sentence:alliteration_increment": _alliteration,
    "sentence:increment": _increment,
    "sentence:keyword": _keyword_sentence,
    "words:alphabet": _alphabet,
    "words:consonants": _consonants,
    "words:keywords_specific_position": _keyword_position,
    "words:last_first": _last_first,
    "words:no_consecutive": _no_consecutive,
    "words:palindrome": _palindromes,
    "words:paragraph_last_first": _paragraph_last_first,
    "words:prime_lengths": _prime_lengths,
    "words:repeats": _repeats,
    "words:vowel": _vowels,
    "words:words_position": _words_position,
}
