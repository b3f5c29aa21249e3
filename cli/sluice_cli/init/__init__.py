"""`sluice init`: create the files of a new task."""
