"""A replacement of Megatron, which cannot be imported.

SGLang's dumper imports an installed Megatron in each of SGLang's processes, which takes seconds of
each start and serves only to inspect models that no engine has.
"""

raise ImportError("an engine does without Megatron")
