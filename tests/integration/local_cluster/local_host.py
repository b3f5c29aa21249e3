"""Hosts a LocalCluster in a separate process, for tests that kill it.

python local_host.py RUN_DIR JOB_JSON
"""

import asyncio
import sys
from pathlib import Path

from sluice.api import RLJob
from sluice_operator.cluster import LocalCluster, RunDirectoryError
from sluice_operator.reconcile import cancelled_by_signals, run_job


async def host(run_dir: Path, job: RLJob) -> int:
    try:
        async with LocalCluster(run_dir, lock_seconds=8) as cluster:
            with cancelled_by_signals():
                status = await run_job(cluster, job)
    except RunDirectoryError as error:
        print(f"error: {error}", flush=True)
        return 3
    except asyncio.CancelledError:
        print("suspended", flush=True)
        return 130
    print(status.state, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(host(Path(sys.argv[1]), RLJob.model_validate_json(sys.argv[2]))))
