"""The API process: stores HTTP requests for the engine and returns stored results to clients.

It does not depend on the engine or on a backend, and needs no device.
"""
