"""Rewards that come with sluice, one to a file. The registry beside this room knows
them by name.
"""
