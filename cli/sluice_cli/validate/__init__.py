"""`sluice validate`: checks before a job runs."""
