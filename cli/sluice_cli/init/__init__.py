"""`sluice init`: the files of a new task."""
