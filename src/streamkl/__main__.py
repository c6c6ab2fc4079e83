"""``python -m streamkl`` is the command line."""

from streamkl.cli import app

app()
