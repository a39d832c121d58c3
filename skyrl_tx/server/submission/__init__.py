"""Translates wire messages to requests of the contract, and stores them. No other package does.

Checks everything that does not depend on the backend. UserError names the wrong field and its
value. Draws the seeds that the client left open, so that replaying a stored request gives the same
result.
"""
