"""Wire formats of the gateway's HTTP interfaces.

`chat`, `completions`, `messages`, `responses` and `sglang_api` have the same two functions: `read`
parses a request's body, and `write` makes the body of an answer. All but the last also have an
`Events` class, which makes the events of a stream (`streaming.AnswerEvents`).
"""
