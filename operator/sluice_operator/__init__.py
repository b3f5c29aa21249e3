"""The operator, which turns RLJobs into pods: planner, reconciler and clusters."""
