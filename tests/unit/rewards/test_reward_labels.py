"""Labels that tables and JSON turned into floats are read as a person writes them."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.rewards import RewardInput
from sluice.rewards.builtin.contains import contains
from sluice.rewards.builtin.dapo import dapo
from sluice.rewards.builtin.deepscaler import deepscaler
from sluice.rewards.builtin.exact_match import exact_match
from sluice.rewards.builtin.f1 import f1
from sluice.rewards.builtin.gsm8k import gsm8k
from sluice.rewards.builtin.math import math
from sluice.rewards.builtin.math_prm800k import math_prm800k
from sluice.rewards.builtin.multiple_choice import gpqa, multiple_choice
from sluice.rewards.types import as_text, read_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.0, "7"),
        (7, "7"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (1e-05, "0.00001"),
        (1e22, "10000000000000000000000"),
        (np.float64(7.0), "7"),
        (np.float32(0.1), "0.1"),
        (Decimal("7.00"), "7"),
        (Fraction(1, 3), "1/3"),
        (float("inf"), "inf"),
        (True, "True"),
        ("1.5e3", "1500"),
        ("1E-5", "0.00001"),
        ("7.0", "7.0"),  # a text is what the row says
        ("007", "007"),
        ("e3", "e3"),
        ("1e999", "1e999"),
        ("a 1e3", "a 1e3"),
    ],
    ids=repr,
)
def test_a_label_as_text(value: Any, text: str) -> None:
    assert as_text(value) == text


FORMS = {
    "exact_match": (exact_match, "{}"),
    "contains": (contains, "it is {}."),
    "f1": (f1, "{}"),
    "math": (math, r"\boxed{{{}}}"),
    "math_prm800k": (math_prm800k, r"\boxed{{{}}}"),
    "deepscaler": (deepscaler, r"hm</think>\boxed{{{}}}"),
    "dapo": (dapo, "Answer: {}"),
    "gsm8k": (gsm8k, "#### {}"),
}


@pytest.mark.parametrize(
    ("label", "answer"),
    [(7.0, "7"), (1e-05, "0.00001"), ("1.5e3", "1500"), (1500.0, "1500"), (-3.0, "-3")],
    ids=repr,
)
@pytest.mark.parametrize("name", FORMS)
def test_every_reward_reads_the_label_as_text(name: str, label: Any, answer: str) -> None:
    reward, form = FORMS[name]

    def score(said: str) -> float:
        value = reward(RewardInput(prompt="p", response=form.format(said), label=label))
        return read_value(value, None)[0]

    assert score(answer) == 1.0
    assert score("8") < 1.0


def test_a_column_of_integers_with_a_null_has_the_labels_of_its_integers(tmp_path: Path) -> None:
    import pandas as pd

    pq.write_table(pa.Table.from_pandas(pd.DataFrame({"label": [7, None]})), tmp_path / "rows")
    label = pq.read_table(tmp_path / "rows").to_pylist()[0]["label"]
    assert isinstance(label, float)
    assert exact_match(RewardInput(prompt="p", response="7", label=label)) == 1.0


@pytest.mark.parametrize("reward", [multiple_choice, gpqa], ids=["multiple_choice", "gpqa"])
@pytest.mark.parametrize(
    ("label", "choices", "letter"),
    [
        (1.0, ["red", "blue"], "B"),
        (7.0, [5.0, 7.0, 9.0], "B"),
        ("7", [5.0, 7.0, 9.0], "B"),
        (0.5, [0.25, 0.5], "B"),
        (2, [1, 2, 3], "C"),  # an index goes before a text
    ],
    ids=repr,
)
def test_a_number_is_an_index_or_the_text_of_a_choice(
    reward: Any, label: Any, choices: list[Any], letter: str
) -> None:
    sample = RewardInput(
        prompt="p", response=f"Answer: {letter}", label=label, metadata={"choices": choices}
    )
    assert reward(sample) == 1.0
