"""The gateway: an endpoint in the worker at which programs ask the model in the usual HTTP APIs.

Tokens in, tokens out: what the model has generated is never encoded again. `conversation` and
`history` are pure: they decide which tokens a request continues, and what is trained of them.
`agent_session` serves one agent of an episode, `server` is the HTTP server, and `interfaces` holds
the wire formats of OpenAI, Anthropic and SGLang.
"""
