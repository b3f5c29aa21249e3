"""Middlewares of SGLang's HTTP application: who may call, and in which order calls begin."""
