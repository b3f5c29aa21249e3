"""A module in Megatron's place, which cannot be imported.

SGLang's dumper imports Megatron in each of SGLang's processes, where it is installed: seconds of
each start, for a look at models that no engine has.
"""

raise ImportError("an engine does without Megatron")
