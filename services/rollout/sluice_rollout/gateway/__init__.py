"""The gateway: an OpenAI-compatible endpoint in the worker, token in, token out.

`conversation` and `history` are pure: which tokens a request continues, and what is trained of
them. `seat` is one episode at the gateway, `server` its HTTP; `chat`, `completions` and `responses`
are the shapes of OpenAI's three interfaces.
"""
