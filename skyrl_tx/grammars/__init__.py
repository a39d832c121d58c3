"""Grammars that sampled text has to match: JSON schemas, regular expressions and EBNF, with `llguidance`."""
