"""What the README and the pages of ``docs/`` promise about themselves: length, links, words, and the site's build."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_at_most_900_words_and_shows_python_before_word_250() -> None:
    words = len(README.split())
    before = len(README[: README.index("```python\n")].split())
    assert words <= 900, f"{words} words"
    assert before < 250, f"the first line of Python comes after {before} words"
