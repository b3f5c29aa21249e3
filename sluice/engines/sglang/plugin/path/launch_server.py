"""`python -m sglang.launch_server`, with this directory at the end of the path, where SGLang finds plugins.

Not PYTHONPATH: an image, or the user, may have one already, and a pod's variable would stand in its place.
"""

import multiprocessing
import os
import runpy
import sys

sys.path[0] = os.getcwd()  # as `python -m` has it
sys.path.append(os.path.dirname(os.path.abspath(__file__)))

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    # SGLang spawns its processes, for CUDA's sake, and each imports all of it again: most of a small engine's start.
    # At that moment there is one thread, so they can be forked.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
