"""The passes over selected keys, which are gathered one query at a time."""
