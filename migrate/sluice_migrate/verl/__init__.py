"""Translates commands and configurations of verl."""
