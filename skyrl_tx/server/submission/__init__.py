"""Shared parts of the endpoints for queued requests: checks, tensors, provenance, and storing requests.

Translating a request checks everything that does not depend on the backend. UserError names the
wrong field and its value. The seeds that the client left open are drawn, so that replaying a stored
request gives the same result.
"""
