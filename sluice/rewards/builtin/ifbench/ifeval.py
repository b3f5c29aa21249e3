"""All 25 instructions of IFEval (Zhou et al. 2023), by id."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from sluice.rewards.builtin.ifbench import text as t

InstructionCheck = Callable[..., bool]


def _related(count: int, bound: float, relation: str) -> bool:
    """Compare with `at least` or `less than`."""
    return count < bound if relation == "less than" else count >= bound


def _existence(text: str, *, keywords: list[str]) -> bool:
    return all(re.search(re.escape(k), text, re.IGNORECASE) for k in keywords)


def _frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    count = len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE))
    return _related(count, frequency, relation)


def _forbidden(text: str, *, forbidden_words: list[str]) -> bool:
    return not any(t.times(word, text) for word in forbidden_words)


def _letters(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _related(text.lower().count(letter.lower()), let_frequency, let_relation)


def _sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _related(len(t.sentences(text)), num_sentences, relation)


def _words(text: str, *, num_words: int, relation: str) -> bool:
    return _related(len(t.words(text)), num_words, relation)


def _paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Count paragraphs separated by `***`. Only the first and the last may be empty."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1]
    return all(p.strip() for p in inner) and sum(bool(p.strip()) for p in parts) == num_paragraphs


def _nth_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = re.split(r"\n\n", text)
    filled = [p for p in parts if p.strip()]
    if (
        len(filled) != num_paragraphs
        or nth_paragraph > len(parts)
        or not parts[nth_paragraph - 1].strip()
    ):
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, *, postscript_marker: str) -> bool:
    loose = {"P.P.S": r"\s*p\.\s?p\.\s?s", "P.S.": r"\s*p\.\s?s\."}
    pattern = loose.get(postscript_marker, r"\s*" + re.escape(postscript_marker.lower()))
    return bool(re.search(rf"{pattern}.*$", text.lower(), re.MULTILINE))


def _bullets(text: str, *, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*[^*].*|-.*)$", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


def _highlights(text: str, *, num_highlights: int) -> bool:
    highlights = re.findall(r"\*\*[^\n*]*\*\*|\*[^\n*]*\*", text)
    return sum(bool(h.strip("*").strip()) for h in highlights) >= num_highlights


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections


def _json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n]+?)>>", text))


def _two_responses(text: str) -> bool:
    parts = text.split("******")
    inner = parts[1:-1]
    answers = [p.strip() for p in parts if p.strip()]
    return all(p.strip() for p in inner) and len(answers) == 2 and answers[0] != answers[1]


def _repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return _related(
        sum(word.isupper() for word in t.tokens(text)), capital_frequency, capital_relation
    )


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _language(text: str, *, language: str) -> bool:
    """Check the language. As in the benchmark, text of undetectable language passes."""
    import langdetect  # imported late: it loads its profiles on first use

    langdetect.DetectorFactory.seed = 0  # otherwise random: one text might get two languages
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:
        return True


CHECKS: dict[str, InstructionCheck] = {
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "combination:repeat_prompt": _repeat_prompt,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": _title,
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:nth_paragraph_first_word": _nth_first_word,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_words": _words,
    "punctuation:no_comma": lambda text: "," not in text,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
}
