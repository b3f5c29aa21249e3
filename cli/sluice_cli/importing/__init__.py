"""Launch scripts and configurations of slime and verl -> RLJob manifests.

Nothing of them is ever executed.
"""
