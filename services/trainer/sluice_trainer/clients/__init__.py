"""Clients of the services that a trainer calls."""
