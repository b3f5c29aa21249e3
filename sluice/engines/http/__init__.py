"""Requests and control calls to an engine that speaks HTTP."""
