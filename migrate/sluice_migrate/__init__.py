"""Brings launch scripts, configurations and functions of slime and verl to sluice.

`commands` is `sluice import`. `bash` reads launch scripts, `slime` and `verl` translate their
settings by tables (`translation`) into a draft of an RLJob (`draft`), which `manifest` writes.
`functions` runs functions that were written for the two projects; their imports find `stubs`.

Scripts are parsed and never run, except with `--exact`: then bash runs them in a sandbox.
"""
