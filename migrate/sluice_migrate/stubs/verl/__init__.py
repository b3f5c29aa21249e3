"""Stubs of verl's modules, with the names that agent loops use."""
