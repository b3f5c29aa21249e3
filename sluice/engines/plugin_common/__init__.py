"""Files that the plugins of all engines share.

Each plugin has links to them, and to `sluice/runtime/open_files.py` and
`sluice/runtime/kernel_cache.py`. They run in the engines' processes and import only the standard
library and torch, so they can be copied into any image.
"""
