"""Endpoints that speak the APIs of OpenAI and Anthropic: text in, text out, on top of stored sample requests."""
