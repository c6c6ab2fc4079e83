"""Text as it comes: none, too little, broken, too much."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from streamkl.distillation import needles, packing
from streamkl.distillation.packing import packed
from streamkl.distillation.run import distill
from streamkl.distillation.samples import Samples
from streamkl.evaluation.tasks import TOWNS
from streamkl.text import TextError


@pytest.fixture(scope="session")
def tokenizer(llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(llama)


def pack(tokenizer: Any, *sources: Path | str, length: int = 8, most: int = 1000) -> np.ndarray:
    return packed(tokenizer, [str(source) for source in sources], length, most, field="text", encoding="utf-8")


def test_documents_are_packed_one_after_another_with_an_end_between_them(tokenizer: Any, tmp_path: Path) -> None:
    lines = tmp_path / "two.jsonl"
    lines.write_text(json.dumps({"text": "abcdef"}) + "\n\n" + json.dumps({"text": "ghijklmno"}) + "\n")
    sequences = pack(tokenizer, lines)
    assert [tokenizer.decode(ids) for ids in sequences] == ["abcdef<end>g", "hijklmno"]


def test_parts_of_one_document_have_no_end_between_them(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long document is read in parts; those of the next one come after an end."""
    monkeypatch.setattr(packing, "PART", 3)
    for name, text in (("a.txt", "abcdefg"), ("b.txt", "hijklmno")):
        (tmp_path / name).write_text(text)
    assert [tokenizer.decode(ids) for ids in pack(tokenizer, tmp_path)] == ["abcdefg<end>", "hijklmno"]


def test_a_dataset_is_text_like_any_other(tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["abcdef", " ", "ghijklmno"]}).save_to_disk(tmp_path / "saved")
    sequences = pack(tokenizer, f"dataset:{tmp_path / 'saved'}")
    assert [tokenizer.decode(ids) for ids in sequences] == ["abcdef<end>g", "hijklmno"]
    with pytest.raises(TextError, match="datasets cannot load"):
        pack(tokenizer, f"dataset:{tmp_path / 'nothing'}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text in"),
        (b" \n\n", "no text in"),
        (b"a", "the text has 1 token, less than one sequence of 8"),
        (b"abcdefghi\xff\xfe", "is not UTF-8: byte 0xff at offset 9"),
    ],
)
def test_text_that_does_not_do_is_refused_with_the_reason(
    tokenizer: Any, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    with pytest.raises(TextError, match=message):
        pack(tokenizer, file)


def test_of_a_line_of_200_mb_only_what_is_needed_is_read(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    with file.open("wb") as handle:
        handle.write(b"ab " * 100_000)
        handle.seek(200_000_000)
        handle.write(b"\xff")  # who reads this far fails
    assert pack(tokenizer, file, length=512, most=40).shape == (40, 512)


def test_a_text_shorter_than_one_batch_comes_again(tiny: Any, llama: Path, tmp_path: Path) -> None:
    text = tiny.prose(tmp_path / "short.txt", 300)  # three sequences of 96
    with pytest.warns(RuntimeWarning, match="has 3 sequences of 96 tokens, fewer than one step takes"):
        distill(tiny.settings(llama, text, tmp_path / "run", steps=3, batch=4))
    assert len((tmp_path / "run" / "curves.jsonl").read_text().splitlines()) == 3


def test_samples_depend_on_their_number_alone_and_every_sequence_comes_once_per_pass() -> None:
    sequences = np.arange(7 * 4, dtype=np.uint32).reshape(7, 4)
    one, two = Samples(sequences, 21, seed=3), Samples(sequences, 21, seed=3)
    backwards = [two[n]["input_ids"].tolist() for n in reversed(range(21))][::-1]
    forwards = [one[n]["input_ids"].tolist() for n in range(21)]
    assert forwards == backwards
    passes = [sorted(forwards[start : start + 7]) for start in (0, 7, 14)]
    assert passes == [sequences.tolist()] * 3
    assert forwards[:7] != forwards[7:14]


def test_a_needle_is_hidden_asked_for_at_the_end_and_weighs_what_it_is_told(tokenizer: Any, prose: Path) -> None:
    sequences = pack(tokenizer, prose, length=288, most=20)
    for seed in range(20):
        ids, asked = needles.hide(tokenizer, sequences[seed], seed)
        assert len(ids) == 288
        text, question = tokenizer.decode(ids[:asked]), tokenizer.decode(ids[asked:])
        number = question[-5:]
        assert number.isdigit()
        assert text.count(number) == 1
        assert question.startswith("\n\nQuestion: ")
    samples = Samples(sequences, 40, seed=0, tokenizer=tokenizer, share=0.5, answer_weight=8.0)
    weights = [samples[n]["row_weight"] for n in range(40)]
    hidden = [w for w in weights if w.max() > w.min()]
    assert 10 < len(hidden) < 30
    assert all(abs(float(w.mean()) - 1) < 1e-6 for w in weights)
    assert all(abs(float(w[-1] / w[0]) - 8) < 1e-5 for w in hidden)
    assert not set(needles.NAMES) & set(TOWNS), "an evaluation asks for names that were trained on"
    with pytest.raises(ValueError, match=r"needles need sequences of \d+ tokens or more: got a length of 50"):
        Samples(sequences[:, :50], 40, seed=0, tokenizer=tokenizer, share=0.5)


def test_several_needles_and_quotations_take_half_of_a_sequence_at_most(tokenizer: Any, prose: Path) -> None:
    sequences = pack(tokenizer, prose, length=1024, most=10)
    quoted = 0
    for seed in range(10):
        ids, asked = needles.hide(tokenizer, sequences[seed], seed, facts=8)
        assert len(ids) == 1024
        text, *questions = tokenizer.decode(ids).split("\n\nQuestion: ")
        numbers = [re.search(r"(\d{5})(\s|$)", question) for question in questions]
        assert all(number and text.count(number[1]) == 1 for number in numbers), "each number is hidden, and once"
        quoted += tokenizer.decode(ids[asked:]).count(needles.QUOTED)
        assert 256 < asked < 1024
        assert 2 <= len(questions) <= 8
        assert np.array_equal(ids[:1], sequences[seed][:1]), "what a sequence starts with stays there"
    assert quoted > 3
    assert np.array_equal(ids, needles.hide(tokenizer, sequences[9], 9, facts=8).ids)
