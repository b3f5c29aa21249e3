"""Decisions about a job and its gangs: one policy to a file, each a function of what was seen."""
