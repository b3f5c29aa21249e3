"""Launch scripts and configurations of slime and verl -> RLJob manifests.

Nothing of them is executed, but by `--exact`: by the real bash, confined.
"""
