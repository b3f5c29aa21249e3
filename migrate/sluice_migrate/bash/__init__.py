"""Reads a launch script as bash would run it, to find the commands that it starts."""
