"""The machinery of the API: schema, rules, messages, loading."""
