"""Stubs of slime's modules, with the names that generate functions use."""
