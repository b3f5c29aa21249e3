"""Prompt files: reading, checking, rendering, writing. Shared by the buffer, the rollout worker and
`sluice data`.
"""
