"""Hooks that receive, pass on and load the weights of an update in SGLang's processes."""
