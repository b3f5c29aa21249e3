"""Wire formats of the gateway's HTTP interfaces.

`chat`, `completions`, `messages`, `responses` and `sglang_api` have the same three functions:
`read` parses a request's body, `write` makes the body of an answer, and `stream` makes its events.
"""
