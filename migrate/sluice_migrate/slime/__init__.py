"""Translates launch scripts of slime."""
