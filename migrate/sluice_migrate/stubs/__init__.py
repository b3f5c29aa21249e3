"""Stubs of the modules of slime and verl that generate functions import.

Functions of these projects reach their engine through a router or a server manager. In sluice that
is the gateway of the episode, so processes that load user code replace the modules involved. Other
modules of the two packages stay as they are, if the packages are installed. Names and signatures
are those of slime 0.3 and verl 0.9, and of their main branches of autumn 2026.
"""
