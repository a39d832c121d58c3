"""Tests of the API: the SDK and other clients talk to a server with an engine."""
