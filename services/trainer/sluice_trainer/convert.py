"""`python -m sluice_trainer.convert`: what `sluice convert` runs, in a process of its own and
without GPUs.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

from sluice.environment import ConfigurationError


def main(arguments: list[str]) -> int:
    """hf-to-dist SOURCE TARGET | dist-to-hf CHECKPOINT LIKE TARGET. `sluice convert` checks and
    explains them.
    """
    direction, *paths = arguments
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

    from sluice.api import Parallelism
    from sluice_trainer.megatron import parallel
    from sluice_trainer.megatron.checkpoints import conversion

    parallel.initialize(Parallelism(), seed=0, timeout=timedelta(minutes=5))
    try:
        if direction == "hf-to-dist":
            source, target = map(Path, paths)
            print(conversion.hf_to_dist(source, target))
        else:
            checkpoint, like, target = map(Path, paths)
            conversion.dist_to_hf(checkpoint, like, target)
            print(target)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
