"""Commands that show jobs: list, status, logs, report."""
