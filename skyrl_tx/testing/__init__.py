"""Tools for tests of this project and of third-party backends."""
