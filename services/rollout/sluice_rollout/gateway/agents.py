"""The seats of one episode, and what of their conversations is its sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.samples.sample import Sample
from sluice.samples.turns import BRANCH_TURNS
from sluice_rollout import metrics
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.agent_session import Seat
from sluice_rollout.gateway.conversation import write
from sluice_rollout.gateway.sample_claims import Claim, ClaimError, written


@dataclass(slots=True)
class Table:
    """An episode's seats, by their names; one without a name where the job has none."""

    episode: Episode
    seats: Mapping[str, Seat]
    _kept: Sample | None = None

    @property
    def full(self) -> bool:
        """True where the last request of a seat was refused, because it did not fit."""
        return any(seat.full for seat in self.seats.values())

    def close(self, *, interrupted: bool) -> None:
        """Put what is trained into the episode's sample. interrupted: all that another play can go
        on from.
        """
        conversations = {name: seat.conversation for name, seat in self.seats.items()}
        branches = write(conversations, self.episode.sample, waiting=interrupted)
        if self._kept and not interrupted:
            self.episode.sample.metadata.pop(BRANCH_TURNS, None)
            self.episode.sample.take(self._kept)
            branches = min(branches, 1)
        metrics.GATEWAY_BRANCHES.inc(branches)

    def keep(self, tokens: Sequence[int], mask: Sequence[int]) -> None:
        """Train what the program says, once its episode ends. Raises ClaimError.

        tokens: ids of prompt and response; mask: [response] 1 for what is to be trained.
        """
        if "" not in self.seats:
            raise ClaimError("a sample of one conversation, but the job has rollout.seats")
        sample = Sample(index=self.episode.sample.index)
        self._kept = written(Claim(tokens, mask), self.seats[""].conversation.turns, sample)

    def reward_turn(self, value: float, seat: str, turn: int) -> None:
        """Add to the reward of a turn that the program has asked for. turn: its place among those
        of its seat, counted from either end. Raises IndexError where there is none.
        """
        self.seats[seat].conversation.asked()[turn].reward += value
