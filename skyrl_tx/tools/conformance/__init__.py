"""The command `skyrl-tx conformance`: checks any Tinker server with the real `tinker` SDK."""
