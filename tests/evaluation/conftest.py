"""A tiny random model with a tokenizer of bytes, and text, in folders as users have them."""

import random
from pathlib import Path

import pytest

from streamkl.evaluation.haystack import Book, Haystack

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "runs",
    "into",
    "woods",
    "where",
    "nobody",
    "has",
    "ever",
    "been",
    "before",
)


def prose(characters: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    sentences = []
    while sum(map(len, sentences)) < characters:
        sentences.append(" ".join(rng.choices(WORDS, k=rng.randint(4, 12))).capitalize() + ".")
    return " ".join(sentences)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(["<end>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def haystack(model_folder: Path) -> Haystack:
    from transformers import AutoTokenizer

    books = [Book("long.txt", prose(20_000)), Book("short.txt", prose(100))]
    return Haystack(books, AutoTokenizer.from_pretrained(model_folder))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(prose(20_000))
    return path
