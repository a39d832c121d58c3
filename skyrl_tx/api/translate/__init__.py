"""Schemas to `contract.requests`: the only place where the two meet.

Checks what needs no knowledge of the backend; raises UserError naming the field and its value. Random choices that the
client left open are drawn here, so that what is stored is complete.
"""
