"""The game: the model may ask the calculator, and answers.

    prompt           the model      the calculator       the model
    7 * 8 + 5 =      c              1 >                  1 <eos>

Asked for is the last digit. A turn ends with the end token, or with `c`; where that is all it says, it is a call.
What the calculator writes is in the context and is never trained on; that a call pays off the model has to find out.
"""

from __future__ import annotations

from sluice.rewards import RewardInput
from sluice_rollout.episode import Episode

CALL, END = "c", "<end>"


async def play(episode: Episode) -> None:
    """At most one call, then the answer. The reward sees the last turn, and whether it was a guess (`called`)."""
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
    """Which share of the answer's positions is right, its end included; nothing where it was guessed.

    Where a guess pays too a model of this size is content with it: that is learned sooner than to call and to copy.
    """
    given = str(sample.metadata.get("answer", "")).split() + [END] * bool(sample.metadata.get("ended"))
    wanted = [str(sample.label), END]
    share = sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
    return share if sample.metadata.get("called") else 0.0


def exact(sample: RewardInput) -> float:
    """1 for the right answer and its end, whichever way it was found."""
    return float(sample.metadata.get("answer") == sample.label and bool(sample.metadata.get("ended")))
