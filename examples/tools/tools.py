"""The game: the model may ask the calculator, and answers.

    prompt           the model      the calculator       the model
    7 * 8 + 5 =      c              1 >                  1 <eos>

Asked for is the last digit. A turn ends with the end token, or with `c`; where that is all it says,
it is a call. What the calculator writes is in the context and is never trained on; that a call pays
off the model has to find out.
"""

from __future__ import annotations

from sluice.rewards import RewardInput
from sluice_rollout.episode import Episode

CALL, END = "c", "<end>"


async def play(episode: Episode) -> None:
    """At most one call, then the answer. The reward sees the last turn, and whether it was a guess
    (`called`).
    """
    turn = await episode.generate(stop=[CALL])
    called = turn.stop == CALL and len(turn.tokens) == 1
    if called:
        episode.observe(f"{calculate(str(episode.prompt.prompt))} >")
        turn = await episode.generate(stop=[CALL])
    episode.metadata.update(called=called, answer=turn.text.strip(), ended=turn.stop is None)


def calculate(prompt: str) -> int:
    """`7 * 8 + 5 =` -> 1, the last digit of 61."""
    a, _, b, _, c, _ = prompt.split()
    return (int(a) * int(b) + int(c)) % 10


def right(sample: RewardInput) -> float:
    """A third for the call, a third for the right digit after it, a third for the end after that;
    nothing for a guess.

    Where a guess pays too a model of this size is content with it: that is learned sooner than to
    call and to copy. And an end after the wrong digit pays nothing, as in the quickstart.
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
    """1 for the right answer and its end, whichever way it was found."""
    return float(
        sample.metadata.get("answer") == sample.label and bool(sample.metadata.get("ended"))
    )
