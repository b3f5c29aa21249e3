"""Prompt files: read, check, render and write them.

Used by buffer, rollout worker and `sluice data`.
"""
