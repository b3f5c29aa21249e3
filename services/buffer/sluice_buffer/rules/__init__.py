"""Rules of the buffer as pure functions: what may start, what is sound, what goes where."""
