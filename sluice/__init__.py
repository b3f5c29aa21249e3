"""The parts of sluice that every room shares: the API, the wire, data, rewards, engines."""

__version__ = "0.1.0"
"""Of the distribution `sluice-rl`."""
