"""Tools for testing backends: a test suite, a fake backend and tiny models.

Third-party backends can use them too. `backend_suite` needs pytest, which the extra `testing`
installs.
"""
