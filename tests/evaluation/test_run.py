"""Whole runs on a tiny model: paired, resumable, with a report whose figures follow from the results."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from streamkl.cli import app
from streamkl.cli.evaluate import _name
from streamkl.evaluation.layers import look
from streamkl.evaluation.methods import DENSE, Method, grid
from streamkl.evaluation.records import Record, Records, read
from streamkl.evaluation.subject import Answer, Subject
from streamkl.evaluation.summary import figures, gaps
from streamkl.integrations.transformers import new_indexers, save_indexers
from streamkl.sparse import IndexerSelector
from streamkl.testing.causal_models import tiny_causal_model


def command(name: str, model: Path, book: Path, output: Path, *more: str) -> tuple[int, str]:
    words = [name, str(model), "--text", str(book), "--lengths", "256", "--budgets", "32", "--query-blocks", "1", "16"]
    words += ["--contexts", "2", "--segments", "2", "--layer-segments", "1", "--dtype", "float32"]
    found = CliRunner(env={"COLUMNS": "1000"}).invoke(app, [*words, "--output", str(output), *more])
    return found.exit_code, " ".join((found.output + found.stderr).replace("│", " ").split())


@pytest.fixture(scope="session")
def indexers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    subject = Subject(model_folder, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("indexers") / "trained"
    return save_indexers(folder, subject.model, new_indexers(subject.model, head_dim=8), IndexerSelector(32, 16))


@pytest.mark.slow
def test_a_run_compares_every_method_on_the_same_contexts_and_resumes_where_it_was(
    model_folder: Path, book: Path, indexers: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report"
    few = ("--tasks", "needle", "perplexity", "--selectors", "oracle")
    code, said = command("evaluate", model_folder, book, output, *few)
    assert code == 0, said
    assert "oracle k32 b16" in said, "the tables are shown"
    before = (output / "results.jsonl").read_text()
    with (output / "results.jsonl").open("a") as file:
        file.write('{"task": "needle", "len')  # the process was killed as it wrote
    code, said = command("evaluate", model_folder, book, output, *few, "--indexers", str(indexers), "--contexts", "3")
    assert code == 0, said
    after = (output / "results.jsonl").read_text()
    assert after.startswith(before)
    run, records = read(output)
    assert set(run["indexers"]) == {"trained"}
    assert len({record.key for record in records}) == len(records)
    methods = {"dense", *(f"{s} k32 b{b}" for s in ("oracle", "trained") for b in (1, 16))}
    for task, count in (("needle", 3), ("perplexity", 2), ("layers", 1)):
        found = {(r.number, r.method) for r in records if r.task == task}
        wanted = methods - {"dense"} if task == "layers" else methods
        assert found == {(n, method) for n in range(count) for method in wanted}, task
    answers = {(r.number, r.found["answer"]) for r in records if r.task == "needle"}
    assert len(answers) == 3, "each context has one answer for all methods"
    report = json.loads((output / "report.json").read_text())
    assert len(report["figures"]) == 2 * len(methods)
    assert {gap["kind"] for gap in report["gaps"]} == {"oracle", "indexer", "realization"}
    page = (output / "report.md").read_text()
    for name in ("frontier", "quality", "gaps", "layers"):
        assert (output / f"{name}.png").stat().st_size > 10_000
        assert f"({name}.png)" in page


def test_an_interrupted_run_reports_what_it_did_and_ends_as_if_it_had_not_been(
    model_folder: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--tasks", "needle", "--selectors", "window", "--layer-segments", "0")
    asked, answer = [], Subject.answer

    def stopped(self: Subject, ids: list[int], steps: int) -> Answer:
        asked.append(ids)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return answer(self, ids, steps)

    monkeypatch.setattr(Subject, "answer", stopped)
    code, said = command("oracle", model_folder, book, tmp_path / "report", *few)
    assert code == 130, said
    assert "resumes from here" in said
    assert len(read(tmp_path / "report")[1]) == 3
    assert (tmp_path / "report" / "report.md").exists()
    assert command("oracle", model_folder, book, tmp_path / "report", *few)[0] == 0
    assert command("oracle", model_folder, book, tmp_path / "whole", *few)[0] == 0
    found = [[(r.key, r.found["generated"]) for r in read(tmp_path / name)[1]] for name in ("report", "whole")]
    assert len(found[0]) == 6
    assert found[0] == found[1]


def test_a_length_without_results_of_a_task_has_an_empty_panel(model_folder: Path, book: Path, tmp_path: Path) -> None:
    output = tmp_path / "report"
    few = ("--selectors", "window", "--contexts", "1", "--segments", "1", "--layer-segments", "0")
    assert command("oracle", model_folder, book, output, *few, "--tasks", "needle", "--lengths", "320")[0] == 0
    code, said = command("oracle", model_folder, book, output, *few, "--tasks", "perplexity")
    assert code == 0, said
    assert (output / "frontier.png").exists()
    assert {(r.task, r.length) for r in read(output)[1]} == {("needle", 256), ("needle", 320), ("perplexity", 256)}


def test_a_run_of_something_else_is_refused(model_folder: Path, book: Path, tmp_path: Path) -> None:
    output = tmp_path / "report"
    few = ("--tasks", "needle", "--selectors", "window", "--contexts", "1", "--layer-segments", "0")
    assert command("oracle", model_folder, book, output, *few)[0] == 0
    code, said = command("oracle", model_folder, book, output, *few, "--seed", "1")
    assert code == 2
    assert "seed = 0, and this run has 1" in said.replace("\n", " ")
    other = shutil.copytree(model_folder, tmp_path / "other" / model_folder.name)
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * x for name, x in weights.items()}, other / "model.safetensors", {"format": "pt"})
    code, said = command("oracle", other, book, output, *few)
    assert code == 2
    assert "has results with weights = " in said.replace("\n", " "), "a model of the same name"


@pytest.mark.parametrize("content", ['{"mine": 1}', '{"mine": 1}\n', "[1]", '{"run": {}}\n{"task": \n'])
def test_a_file_of_results_that_is_not_ours_or_damaged_is_left_as_it_is(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"is not a file of results|line 2 of .* is damaged"):
        Records(tmp_path, {})
    assert (tmp_path / "results.jsonl").read_text() == content


def test_a_budget_that_nearly_holds_all_keys_is_nearly_dense_and_a_small_one_is_not(
    model_folder: Path, haystack
) -> None:
    subject = Subject(model_folder, dtype=torch.float32)
    ids = haystack.encode(haystack.books[0].text[:256])
    losses = {}
    for method in (DENSE, Method("oracle", 255, 1), Method("oracle", 255, 64), Method("oracle", 4, 1)):
        subject.use(method)
        losses[method] = subject.losses(ids).rows
    subject.use(DENSE)
    with torch.no_grad():
        logits = subject.model(torch.tensor([ids])).logits[0, :-1]
    whole = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    assert torch.allclose(losses[DENSE], whole, atol=1e-5)
    distance = {m.name: float((rows - whole).abs().mean()) for m, rows in losses.items()}
    assert distance["oracle k255 b1"] < 1e-5, distance
    # The queries of the last block share a top-k without one key, which one of them may need.
    assert 1e-5 < distance["oracle k255 b64"] < 0.01 * distance["oracle k4 b1"], distance


def test_answers_are_what_generate_says(model_folder: Path, haystack) -> None:
    subject = Subject(model_folder, dtype=torch.float32)
    ids = haystack.encode(haystack.books[0].text[:200])
    for method in (DENSE, Method("oracle", 16, 8), Method("window", 16, 8)):
        subject.use(method)
        out = subject.model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
        wanted = subject.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        assert subject.answer(ids, 6).text == wanted


def test_layers_of_the_oracle_have_full_recall_and_no_method_covers_more(model_folder: Path, haystack) -> None:
    subject = Subject(model_folder, dtype=torch.float32)
    methods = [Method("oracle", 16, 1), Method("oracle", 16, 8), Method("window", 16, 1), Method("random", 16, 1)]
    found = look(subject, haystack.encode(haystack.books[0].text[:200]), methods)
    best = found[methods[0]]
    assert best.recall == pytest.approx({0: 1.0, 1: 1.0})
    for method in methods[1:]:
        assert all(found[method].mass[layer] <= best.mass[layer] + 1e-5 for layer in (0, 1)), method
        assert all(found[method].recall[layer] < 1 for layer in (0, 1)), method


def test_a_budget_of_all_keys_is_left_out() -> None:
    assert grid(["oracle"], [64, 128, 256], [1], length=128) == [DENSE, Method("oracle", 64, 1)]


def test_figures_and_gaps_are_paired(tmp_path: Path) -> None:
    records = Records(tmp_path, {})
    losses = {"dense": (1.0, 2.0), "oracle k8 b1": (1.1, 2.1), "oracle k8 b4": (1.2, 2.2), "mine k8 b4": (1.4, 2.4)}
    for method, nll in losses.items():
        for number, value in enumerate(nll):
            found = {"nll": 10 * value, "tokens": 10, "nll_last": 0.0, "tokens_last": 0, "seconds": 1.0}
            records.add(Record("perplexity", 64, number, method, found))
    lost = {(g.kind, g.worse): g.loss for g in gaps(records)}
    # Each method is worse by the same on both passages, so that the intervals have no width.
    for key, nats in {
        ("oracle", "oracle k8 b1"): 0.1,
        ("realization", "oracle k8 b4"): 0.1,
        ("indexer", "mine k8 b4"): 0.2,
    }.items():
        expected = 100 * (torch.tensor(nats).exp().item() - 1)
        assert lost[key] == pytest.approx((expected,) * 3, rel=1e-4), key
    assert len(lost) == 3
    assert next(f for f in figures(records) if f.method == DENSE).quality.value == pytest.approx(4.4817, rel=1e-4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text in"),
        (b"x", "256 tokens of prose are needed, and the longest of 1, text.txt, has 1"),
        (b"caf\xe9 " * 400, "is not UTF-8: byte 0xe9 at offset 3"),
        (b"too short. " * 10, "256 tokens of prose are needed, and the longest of 1, text.txt, has 110"),
    ],
    ids=["empty", "one token", "latin-1", "short"],
)
def test_hostile_text_ends_the_command_with_a_sentence(
    content: bytes, message: str, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    code, said = command("evaluate", model_folder, tmp_path / "text.txt", tmp_path / "report", "--tasks", "perplexity")
    assert code == 2
    assert message in " ".join(said.split()), said
    assert "Traceback" not in said
    assert not (tmp_path / "report").exists()


@pytest.mark.slow
def test_a_line_of_200_mb_is_evaluated(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    with path.open("w") as file:
        line = "all in one line. " * ((1 << 20) // 17)
        for _ in range(200):
            file.write(line)
    few = ("--tasks", "needle", "--selectors", "window", "--contexts", "1", "--layer-segments", "0")
    code, said = command("oracle", model_folder, path, tmp_path / "report", *few, "--budgets", "32", "256")
    assert code == 0, said
    assert "256 tokens: a top-k of 256 keys is dense attention, and left out." in said


def test_without_selectors_dense_attention_is_left(model_folder: Path, book: Path, tmp_path: Path) -> None:
    few = ("--tasks", "perplexity", "--selectors", "none", "--segments", "1", "--layer-segments", "0")
    code, said = command("evaluate", model_folder, book, tmp_path / "report", *few)
    assert code == 0, said
    lines = (tmp_path / "report" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines[1:]] == ["dense"]


def test_wrong_numbers_and_names_are_refused(model_folder: Path, book: Path, tmp_path: Path) -> None:
    for more, message in (
        (("--tasks", "needles"), "a task is one of needle"),
        (("--selectors", "best"), "--selectors are of oracle"),
        (("--decode", "fast"), "--decode is one of"),
        (("--device", "gpu"), "--device is cpu or cuda: got 'gpu'"),
        (("--indexers", str(tmp_path / "oracle")), "has the name of another method: rename the folder"),
        (("--budgets", "0"), "budgets are numbers of at least 1"),
        (("--lengths", "32"), "no budget is below 32 tokens"),
        (("--query-blocks", "512"), "a query block of 512 queries is longer than 256 tokens"),
        (("--output", str(book)), "is a file: it names a folder"),
        (("--indexers", str(book.parent)), "has no complete.json"),
        (("--indexers", "nowhere/indexers"), "--indexers nowhere/indexers: there is no such folder"),
        (("--text", "nowhere.txt"), "there is no file nowhere.txt"),
        (("--text", 300 * "n"), "File name too long"),
        (("--lengths", "513"), "more than the 512 that the model was made for"),
    ):
        code, said = command("evaluate", model_folder, book, tmp_path / "report", *more)
        assert code != 0, more
        assert message in " ".join(said.replace("│", " ").split()), said


def test_a_refusal_leaves_nothing_behind_and_says_where_the_indexers_are(
    model_folder: Path, book: Path, indexers: Path, tmp_path: Path
) -> None:
    code, said = command("evaluate", model_folder, book, tmp_path / "report", "--indexers", str(indexers.parent))
    assert code == 2
    assert f"is no folder of indexers: {indexers} is" in " ".join(said.split())
    code, said = command("evaluate", tmp_path / "nowhere", book, tmp_path / "report")
    assert code == 2
    assert "so no model" in said
    assert not (tmp_path / "report").exists()


def test_runs_whose_folders_have_one_name_are_told_apart(indexers: Path, tmp_path: Path) -> None:
    for run in ("one", "other"):
        shutil.copytree(indexers, tmp_path / run / "indexers")
    paths = [tmp_path / run / "indexers" for run in ("one", "other")]
    assert [_name(path) for path in (*paths, indexers)] == ["one/indexers", "other/indexers", "trained"]


def test_a_model_with_sinks_which_has_no_sdpa_is_evaluated_beside_its_own_attention(
    model_folder: Path, tmp_path: Path
) -> None:
    sinks = tiny_causal_model("gpt_oss", vocab_size=257, sliding_window=64)
    sinks.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    subject, ids = Subject(tmp_path, dtype=torch.float32), list(range(60, 100))
    dense = subject.losses(ids).rows
    subject.use(Method("oracle", 40, 8))
    torch.testing.assert_close(subject.losses(ids).rows, dense, rtol=0, atol=1e-5)
    subject.use(Method("oracle", 8, 8))
    assert (subject.losses(ids).rows - dense).abs().max() > 1e-5
    subject.use(DENSE)
    assert torch.equal(subject.losses(ids).rows, dense)


@pytest.mark.parametrize("model_type", ["granite", "cohere", "gemma2"])
def test_losses_are_those_of_the_model_whatever_it_does_to_its_logits(
    model_folder: Path, tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.25}}.get(model_type, {})
    tiny_causal_model(model_type, vocab_size=257, **options).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    subject, ids = Subject(tmp_path, dtype=torch.float32), torch.arange(60, 101)
    monkeypatch.setattr("streamkl.evaluation.subject.LOGITS", 9 * 257)  # several parts, the last of one token less
    with torch.no_grad():
        logits = subject.model(ids[None]).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    torch.testing.assert_close(subject.losses(ids.tolist()).rows, expected, rtol=0, atol=1e-5)
