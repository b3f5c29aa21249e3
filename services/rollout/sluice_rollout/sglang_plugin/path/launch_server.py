"""`python -m sglang.launch_server`, with this directory at the end of the path, where SGLang finds plugins.

Not PYTHONPATH: an image, or the user, may have one already, and a pod's variable would stand in its place.
"""

import os
import runpy
import sys

sys.path[0] = os.getcwd()  # as `python -m` has it
sys.path.append(os.path.dirname(os.path.abspath(__file__)))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
