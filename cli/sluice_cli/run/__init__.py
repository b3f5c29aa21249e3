"""`sluice run`: run a job on this machine."""
