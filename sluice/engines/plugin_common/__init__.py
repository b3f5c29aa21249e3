"""Files that plugins of all engines share: each has links to those in `path`, and
to `sluice/runtime/open_files.py` and `sluice/runtime/kernel_cache.py`.

They stand in engines' processes, and import the standard library and torch alone, so that they can
be copied into any image.
"""
