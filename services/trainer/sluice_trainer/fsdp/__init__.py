"""FSDP2 under transformers: any causal language model of theirs, its parameters spread over ranks.

`policy` is the `Backend`. A `Net` (net.py) is transformers' model, which gives numbers of response
tokens instead of logits; `loading` builds and fills it, `sharding` spreads it, `learner` trains it,
`export` gives its tensors back under their checkpoint's names.
"""
