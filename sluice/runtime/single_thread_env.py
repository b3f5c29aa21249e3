"""Variables for processes that load what a user brings: mathematical libraries compute on one core.

By themselves these start a thread for each core of the node, however few of them a pod may use.
Each thread takes 64 MiB or more of the address space, so a limit to that which is enough on a
laptop is too small for `import numpy` on a node of 64 cores; and a process that has threads cannot
be forked. Many such processes run side by side, so that more threads would gain nothing.
"""

from __future__ import annotations

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
