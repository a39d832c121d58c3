"""`skyrl-tx quickstart`: trains a tiny model through the Tinker SDK. Needs the extra `quickstart`."""
