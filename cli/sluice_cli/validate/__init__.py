"""`sluice validate`: check a job before it runs."""
