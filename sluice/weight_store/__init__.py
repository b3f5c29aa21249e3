"""Weights in a store: snapshots, and lossless deltas between them.

The trainer publishes versions (`manifest`, `delta`), and the worker next to each engine fetches
them (`local_copy`), so neither needs to reach the other.
"""
