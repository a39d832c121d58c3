"""Commands on a data directory; they work while a server runs on it, too."""
