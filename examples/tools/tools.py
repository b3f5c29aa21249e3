"""The game: the model may ask the calculator, and answers.

    prompt           the model      the calculator       the model
    7 * 8 + 5 =      c              1 >                  1 <eos>

The answer is the last digit. A turn ends with the end token or with `c`; a turn of `c` alone is a
call. The calculator's text is in the context and is never trained. The model has to find out that
a call pays off.
"""

from __future__ import annotations

from sluice.rewards import RewardInput
from sluice_rollout.episode import Episode

CALL, END = "c", "<end>"


async def play(episode: Episode) -> None:
    """Play at most one call, then the answer.

    The reward sees the last turn and whether the model called (`called`).
    """
    turn = await episode.generate(stop=[CALL])
    called = turn.stop == CALL and len(turn.tokens) == 1
    if called:
        episode.observe(f"{calculate(str(episode.prompt.prompt))} >")
        turn = await episode.generate(stop=[CALL])
    episode.metadata.update(called=called, answer=turn.text.strip(), ended=turn.stop is None)


def calculate(prompt: str) -> int:
    """Return the last digit: `7 * 8 + 5 =` -> 1."""
    a, _, b, _, c, _ = prompt.split()
    return (int(a) * int(b) + int(c)) % 10


def right(sample: RewardInput) -> float:
    """Pay a third each for the call, the right digit after it, and the end after that.

    A guess is not paid: a small model learns to guess sooner than to call and to copy. An end after
    the wrong digit is not paid either, as in the quickstart.
    """
    words = str(sample.metadata.get("answer", "")).split() + [END] * bool(
        sample.metadata.get("ended")
    )
    if not sample.metadata.get("called"):
        return 0.0
    if words[:1] != [str(sample.label)]:
        return 1 / 3
    return 1.0 if words[1:] == [END] else 2 / 3


def exact(sample: RewardInput) -> float:
    """Return 1 for the right answer and its end, however it was found."""
    return float(
        sample.metadata.get("answer") == sample.label and bool(sample.metadata.get("ended"))
    )
