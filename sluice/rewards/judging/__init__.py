"""Judges: what runs rewards, in processes of their own or behind HTTP,
and bounds what they may do.
"""
