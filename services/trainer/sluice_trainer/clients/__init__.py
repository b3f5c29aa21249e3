"""The services that a trainer talks to."""
