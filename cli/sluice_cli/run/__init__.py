"""`sluice run`: a job on this machine, watched."""
