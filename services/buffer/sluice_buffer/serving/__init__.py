"""The buffer's gRPC side: streams, memory for messages, answers once they are durable."""
