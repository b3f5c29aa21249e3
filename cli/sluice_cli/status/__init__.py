"""Commands that look at jobs: list, status, logs, report."""
