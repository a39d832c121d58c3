"""`skyrl-tx quickstart`: train a tiny model through the Tinker SDK. Needs the extra `quickstart`."""
