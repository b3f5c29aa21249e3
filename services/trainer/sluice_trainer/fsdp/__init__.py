"""FSDP2 backend: trains any causal language model of transformers, sharded over all ranks.

`policy` is the `Backend`. A `Net` (net.py) wraps transformers' model so that it returns values of
response tokens instead of logits. `loading` builds and loads the model, `sharding` shards it,
`learner` trains it, and `export` returns its tensors under their names in the checkpoint.
"""
