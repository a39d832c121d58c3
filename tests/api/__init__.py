"""The SDK, and other clients, against a server with an engine."""
