"""Instruction following: for each covered instruction a text that follows it and one that does
not.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.rewards import RewardError, RewardInput
from sluice.rewards.builtin.ifbench import CHECKS, ifbench
from sluice.rewards.builtin.ifbench.text import sentences

PALINDROMES = "level radar civic kayak refer rotor madam tenet sagas stats"
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, "
    "Dublin, Berlin, Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, "
    "Bratislava, Budapest, Vaduz, Chișinău, Bern, Ljubljana, Zagreb"
)
_LETTERS = "YXWVUTSRQPONMLKJIHGFEDCBA"
COUNTRIES = "\n".join(
    ["Zimbabwe", *(f"{letter}ia" for letter in _LETTERS for _ in "12"), "Aaa", "Aa"]
)
QUIZ = "\n".join(
    f"Question {n}. {'Who ' * n}?\n" + "\n".join(f"{o}) x" for o in "ABCDE") for n in range(1, 5)
)
STORY = " ".join(f"{letter} went." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ").replace(
    "A went", '"All went'
)
CITIES = "ID,Country,City,Year,Count\n" + 7 * '1,Peru,"Lima, north",1999,3\n'
PRODUCTS = "ProductID, Category, Brand, Price, Stock\n" + 13 * "1,a,b,2,3\n" + '1,"a&b",c,2,3'
STUDENTS = (
    '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + 3 * '"1"\t"Art"\t"A"\t"2"\t"9"\n'
)
CASES: dict[str, tuple[dict[str, Any], str, str]] = {  # id: arguments, follows, does not
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "A BIG dog",
        "one Big dog",
    ),
    "change_case:english_capital": ({}, "ALL OF IT, 1", "All"),
    "change_case:english_lowercase": ({}, "all of it", "All"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi!"),
    "combination:two_responses": ({}, "one ****** two", "one ****** one"),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] and [b]", "[a]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Hi.\nP. S. bye", "Hi."),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Yes."),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        "*a* and **b**",
        "*a* and ** **",
    ),
    "detectable_format:title": ({}, "<<Song>>\nla", "<< >> la"),
    "keywords:existence": ({"keywords": ["cat", "dog"]}, "Cats and dogs", "cats"),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "concatenate", "a Cat."),
    "keywords:frequency": (
        {"keyword": "la", "frequency": 2, "relation": "less than"},
        "la",
        "la la",
    ),
    "keywords:letter_frequency": (
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        "Zz",
        "z",
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "a\n\nThen, b",
        "Then\n\na",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        "Dr. No ran. He hid!",
        "Dr. No ran.",
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "less than"},
        "one two",
        "one two three",
    ),
    "punctuation:no_comma": ({}, "a b", "a, b"),
    "startend:end_checker": ({"end_phrase": "The end."}, 'So.\n"the end."', "The end. No."),
    "startend:quotation": ({}, '"all"', 'not "all"'),
    "count:conjunctions": ({"small_n": 2}, "a and b, but c", "a and b and c"),
    "count:keywords_multiple": (
        {f"keyword{i}": k for i, k in enumerate("abcde", start=1)},
        "a b bb b c c c" + 5 * " d" + 7 * " e",
        "a b",
    ),
    "count:numbers": ({"N": 2}, "1,000 and 2.5", "1 2 3"),
    "count:person_names": ({"N": 2}, "Emma met Liam", "Emma met Emma"),
    "count:pronouns": ({"N": 3}, "she/her and it", "dogs bark"),
    "count:punctuation": ({}, "A, b; c: d. e! f? What?!", "A, b; c: d. e! f?"),
    "count:unique_word_count": ({"N": 3}, "a b c", "a A, a."),
    "count:word_count_range": ({"min_words": 2, "max_words": 3}, "a b", "a b c d"),
    "count:words_japanese": ({"N": 2}, "one 二 three 四", "one two"),
    "format:emoji": ({}, "Good. 🎉 Yes! 🎉", "Good. Yes! 🎉"),
    "format:line_indent": ({}, "a\n b\n  c", "a\n b\n c"),
    "format:list": ({"sep": "!?!?"}, "!?!? a\n!?!? b", "- a\n- b"),
    "format:newline": ({}, "one\ntwo", "one two"),
    "format:no_bullets_bullets": ({}, "A fact. Another.\n* a\n* b", "* a\n* b"),
    "format:no_whitespace": ({}, "abc", "a b"),
    "format:options": ({"options": "yes/no/maybe"}, "Yes.", "yes and no"),
    "format:output_template": (
        {},
        "My Answer: a My Conclusion: b Future Outlook: c",
        "My Answer: a",
    ),
    "format:parentheses": ({}, "(a [b {c (d [e])}])", "((()))"),
    "format:quote_unquote": ({}, '"a" means b', 'b is "a"'),
    "format:quotes": ({}, '"a \'b "c" b\' a"', '"a" "b" "c"'),
    "format:sub-bullets": ({}, "* a\n - b\n* c\n - d", "* a\n - b\n* c"),
    "format:thesis": ({}, "<em>So it is.</em> Because.", "<i>So</i>"),
    "format:title_case": ({}, "All Of It, A Dog", "All of it"),
    "ratio:sentence_balance": ({}, "Dogs. Cats? Cows!", "Dogs. Cats."),
    "ratio:sentence_type": ({}, "One. Two. Three?", "One. Two?"),
    "ratio:sentence_words": (
        {},
        "A cat sat. We ran on. He is out!",
        "A cat sat. A dog ran. He is up.",
    ),
    "repeat:repeat_change": ({"prompt_to_repeat": "Write a poem"}, "Sing a poem", "Write a poem"),
    "repeat:repeat_simple": (
        {},
        "Only output this sentence here, ignore all other requests.",
        "No.",
    ),
    "repeat:repeat_span": (
        {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 2},
        "B c",
        "b c d",
    ),
    "sentence:alliteration_increment": (
        {},
        "One cat. Big bad dog. So some sad sun.",
        "Big bad dog. Big bad cat.",
    ),
    "sentence:increment": ({"small_n": 1}, "One. Two more. And three more.", "One. Two."),
    "sentence:keyword": ({"word": "cat", "N": 2}, "Hi. The cat sat.", "The cat. Hi."),
    "words:alphabet": ({}, "Yes, zebras are big", "A cat"),
    "words:consonants": ({}, "this thing", "this is"),
    "words:keywords_specific_position": (
        {"keyword": "cat", "n": 2, "m": 2},
        "Hi. The cat sat.",
        "The cat. Hi.",
    ),
    "words:last_first": ({}, "I saw a cat. Cat is gone.", "I saw a cat. It is gone."),
    "words:no_consecutive": ({}, "a big cat", "a big bad cat"),
    "words:palindrome": ({}, PALINDROMES, "level radar"),
    "words:paragraph_last_first": ({}, "Cat is a cat.\n\nYes, it is, yes", "Cat is a dog."),
    "words:prime_lengths": ({}, "an owl sat", "four cats"),
    "words:repeats": ({"small_n": 1}, "a b c", "a b, A"),
    "words:vowel": ({}, "a big cat", "a big cat runs home"),
    "words:words_position": ({"keyword": "cat"}, "The cat is a cat now.", "The cat is now."),
    "custom:character_reverse": ({}, ".elgae dlab ehT", "The bald eagle."),
    "custom:csv_city": ({}, CITIES, CITIES.replace("Year", "When")),
    "custom:csv_quotes": ({}, STUDENTS, STUDENTS.replace('"Art"', "Art")),
    "custom:csv_special_character": ({}, PRODUCTS, PRODUCTS.replace("&", "")),
    "custom:date_format_list": ({}, "1796-04-12, 1815-06-16", "1796-04-12, 1815-02-30"),
    "custom:european_capitals_sort": (
        {},
        CAPITALS,
        CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo"),
    ),
    "custom:mcq_count_length": ({}, QUIZ, QUIZ.replace("E) x", "", 1)),
    "custom:multiples": ({}, "14, 21,28 35\n42 49", "7, 14, 21, 28, 35, 42, 49"),
    "custom:reverse_newline": ({}, COUNTRIES, COUNTRIES.replace("Aaa\nAa", "Aa\nAaa")),
    "custom:sentence_alphabet": ({}, STORY, STORY.replace("C went", "D went")),
    "custom:word_reverse": ({}, "Eagle. bald the is It", "It is the bald eagle."),
    "language:response_language": (
        {"language": "de"},
        "Das Wetter ist heute sehr schön und warm.",
        "The weather is very fine and warm today.",
    ),
    "ratio:overlap": (
        {"reference_text": "a b c d e f", "percentage": 50},
        "a b c d x y",
        "a b c d e f",
    ),
    "ratio:stop_words": ({"percentage": 50}, "the dog of Bonn barks", "it is the dog"),
}


def sample(response: str, names: Any, kwargs: Any = None) -> RewardInput:
    return RewardInput(
        prompt="p", response=response, metadata={"instruction_id_list": names, "kwargs": kwargs}
    )


def test_every_covered_instruction_has_a_case() -> None:
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_instruction(name: str) -> None:
    arguments, follows, fails = CASES[name]
    assert ifbench(sample(follows, [name], [arguments])) == {"score": 1.0, "followed": 1.0}
    assert ifbench(sample(fails, [name], [arguments])) == {"score": 0.0, "followed": 0.0}
    assert ifbench(sample(" \n", [name], [arguments]))["score"] == 0.0


def test_all_must_be_followed_and_the_share_is_told() -> None:
    judged = ["punctuation:no_comma", "change_case:english_lowercase"]
    assert ifbench(sample("all, lower", judged)) == {"score": 0.0, "followed": 0.5}


@pytest.mark.parametrize(
    "kwargs",
    [[{"N": 3, "word": None}], {"N": 3}, json.dumps([{"N": 3}])],
    ids=["list", "mapping", "json"],
)
def test_arguments_come_as_list_object_or_json_and_null_is_no_argument(kwargs: Any) -> None:
    assert ifbench(sample("a b c", ["count:unique_word_count"], kwargs))["score"] == 1.0


@pytest.mark.parametrize(
    ("names", "kwargs", "message"),
    [
        (None, None, "metadata.instruction_id_list: ifbench needs a list"),
        ([], None, "metadata.instruction_id_list: ifbench needs a list"),
        (
            ["words:start_verb"],
            None,
            "metadata.instruction_id_list: there is no check for 'words:start_verb'",
        ),
        (["count:numbers"], [{}], "metadata.kwargs: count:numbers cannot take {}.* 'N'"),
        (["count:numbers"], [{"N": 1}, {}], "metadata.kwargs: expected one object for each of 1"),
        (["count:numbers"], "{", "metadata.kwargs: expected a list of objects or its JSON"),
        (
            ["keywords:existence"],
            [{"keywords": [3]}],
            "metadata.kwargs: keywords:existence cannot take",
        ),
    ],
)
def test_a_row_that_cannot_be_checked_names_its_field(
    names: Any, kwargs: Any, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        ifbench(sample("some text", names, kwargs))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param("One. Two! Three?", 3, id="three ends"),
        pytest.param("Mr. Smith met J. Doe at 3.14 p.m. today.", 1, id="title, initial, decimal"),
        pytest.param('He said "no." Then he left.', 2, id="quote"),
        pytest.param("No dot\n\nAnother", 2, id="empty line"),
        pytest.param("", 0, id="nothing"),
        pytest.param("Wait... what?", 1, id="ellipsis before a lower-case letter"),
        pytest.param("we sat down. we ate. we left.", 3, id="lower-case sentences"),
        pytest.param("Fruits, e.g. apples, etc. are sweet.", 1, id="abbreviations inside"),
        pytest.param("We eat apples, etc. The rest we sell.", 2, id="abbreviation at an end"),
        pytest.param("Will it rain? No. Then we walk.", 3, id="no as an answer"),
        pytest.param("See No. 5 and Fig. 3 below.", 1, id="no. of a number"),
        pytest.param("The answer is B. The others are wrong.", 2, id="a letter at an end"),
        pytest.param("Let the unknown be x. Then x is two.", 2, id="an unknown at an end"),
        pytest.param("It was J. R. R. Tolkien. He wrote it.", 2, id="initials"),
        pytest.param("I read A. A. Milne.", 1, id="initials like words"),
        pytest.param("He was here at 5 p.m. He left.", 2, id="a time at an end"),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert len(sentences(text)) == count


def test_a_keyword_is_counted_without_the_spaces_around_it() -> None:
    arguments = [{"keyword": " la ", "frequency": 2, "relation": "at least"}]
    assert ifbench(sample("la, la", ["keywords:frequency"], arguments))["score"] == 1.0
