"""The passes over all keys that a row may see; ``split.py`` merges rows whose keys several programs share."""
