"""Turns messages into requests of the contract, and stores them; no other package knows both.

Checks what needs no knowledge of the backend, and raises UserError naming the field and its value. Draws the seeds
that the client left open, so that a stored request is complete.
"""
