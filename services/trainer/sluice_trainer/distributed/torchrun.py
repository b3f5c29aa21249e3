"""`python -m sluice_trainer.distributed.torchrun`: torchrun with `--rdzv-backend sluice`.

All rendezvous of torch serve a store without a password on all addresses of the machine. This one
serves it only on the address that the ranks were told.
"""

from __future__ import annotations

import signal
import sys

from sluice.runtime import pid1

pid1.run_under_init()  # before torch, which takes seconds to import and starts threads

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main

from sluice.telemetry import logs
from sluice_trainer.distributed import store
from sluice_trainer.distributed.rank_failure import EXIT_PEER_LOST

BACKEND = "sluice"
CONFIGURATION_ERROR = 2
_WAIT_SECONDS = 600


class BoundRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, whose store rank 0's pod serves at an address known in advance."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None and self.rank == 0:
            listening = store.listener(self.master_addr, self.master_port)
            self._store = store.serve(
                self.master_addr, listening, self.world_size, self.timeout, wait_for_workers=True
            )
        return super().next_rendezvous()


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    rank = parameters.get_as_int("rank", 0)
    nodes = parameters.max_nodes
    return BoundRendezvous(host, port, rank or 0, nodes, parameters.run_id, _WAIT_SECONDS)


def run() -> None:
    """Run torchrun, and exit with the codes of ranks that have a meaning (docs/contracts.md).

    torchrun alone exits with 1 whatever its ranks exit with.
    """
    rendezvous_handler_registry.register(BACKEND, _handler)
    try:
        main()
    except ChildFailedError as error:
        if any(failure.exitcode == CONFIGURATION_ERROR for failure in error.failures.values()):
            sys.exit(CONFIGURATION_ERROR)
        # A rank that only lost another rank is not the cause if there is a better one.
        causes = {
            rank: end for rank, end in error.failures.items() if end.exitcode != EXIT_PEER_LOST
        }
        if not causes:
            sys.exit(EXIT_PEER_LOST)
        rank, first = min(causes.items(), key=lambda cause: cause[1].timestamp)
        # A rank that raised has printed its reason as the last line, and torch's traceback would
        # bury it. Only for a rank that was killed is there something to add.
        if first.exitcode < 0:
            logs.fail(f"rank {rank} was killed by {signal.Signals(-first.exitcode).name}", 1)
        sys.exit(1)


if __name__ == "__main__":
    run()
