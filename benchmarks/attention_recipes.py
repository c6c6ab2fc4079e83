"""What attention KL is worth between models: recipes, each with four losses, at equal steps and at equal time.

A recipe makes a student of a model, and trains it on text with the language-model loss (``lm``), with the KL of the
logits to the model as it was (``logits``), with the KL of attention (``attention``), and with both::

    python benchmarks/attention_recipes.py rope --text books/train --held-out books/test --output recipes.jsonl
    python benchmarks/attention_recipes.py continual --text new/train --held-out new/test --old books/test ...
    python benchmarks/attention_recipes.py --output recipes.jsonl       # only the tables

- ``rope``: positions are divided by 4, as for a context four times as long.
- ``layers``: a third of the layers is dropped.
- ``kv-heads``: all KV heads are merged into one.
- ``continual``: the model itself learns a new domain; what it forgets of ``--old`` text is measured, too. A model that
  knows text like the old one no better than other text has nothing to forget: with ``--adapt`` it is trained on such
  text first, and that is the model which learns, and its teacher.

Seed 0 chooses the learning rate of each loss, and then the weight and the layers of attention KL, in short trainings,
by the held-out loss; the weight of the KL of the logits is 1. Then each loss is trained with each seed until it has
taken the time of the slowest one, and is evaluated after the same number of steps and after the same time. How many
steps take the same time is measured once, in a few steps of each loss in turn. Time is that of the process on all its
cores, so that other work on the machine does not decide how many steps a loss gets; ``OMP_WAIT_POLICY=passive`` keeps
threads that wait out of it. Every training that ends is a line of the output: the same command resumes a run that was
stopped, and a second one beside it takes a share of the trainings. With ``OMP_NUM_THREADS=1`` a command per core takes
less time than one on all cores. What is compared has one dtype (``--dtype``); choices that were made in another one
hold.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from streamkl.bench.machine import facts
from streamkl.cache import locked
from streamkl.distillation.packing import packed
from streamkl.durable import replace_folder
from streamkl.evaluation.statistics import crossed_mean
from streamkl.integrations.transformers import AttentionDistillation, AttentionDistiller

DTYPES = ("float32", "bfloat16")
LOSSES = ("lm", "logits", "attention", "both")
UNTRAINED = "before training"
RATES, WEIGHTS = (3e-5, 1e-4, 3e-4), (3.0, 1.0, 10.0)
WARMUP = 10
"""Steps until the learning rate is reached, which is constant from there on."""
TIMED_STEPS, TIMED_ROUNDS = 5, 3
"""Of a training that is only timed, whose first step is left out, and how often the losses take turns."""
ADAPTED_RATE = 1e-4
"""The learning rate of training on the old text first."""


class DistillingTrainer(AttentionDistillation, Trainer):
    """Trainer with the loss of an `AttentionDistiller`."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        recipe: Its name.
        loss: One of `LOSSES`, or `UNTRAINED`, which takes no steps.
        seed: Of the order of samples.
        rate: The learning rate.
        weight: Of attention KL; 0 where it is not used.
        layers: ``"all"`` or ``"upper"``: those that learn from the teacher's attention.
        steps: How many; the last one is evaluated.
        also: A step that is evaluated, too, if it is not the last one; 0 for none.
    """

    recipe: str
    loss: str
    seed: int
    rate: float
    weight: float
    layers: str
    steps: int
    also: int = 0


def drop_layers(model: Any) -> Any:
    """Keeps two layers of three, the first and the last among them."""
    count = len(model.model.layers)
    kept = [round(i * (count - 1) / (2 * count // 3 - 1)) for i in range(2 * count // 3)]
    model.model.layers = torch.nn.ModuleList(model.model.layers[n] for n in kept)
    for n, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = n
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[n] for n in kept]
    return model


def scale_positions(model: Any) -> Any:
    """Divides positions by 4."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    scaled = type(model)(config)
    scaled.load_state_dict(model.state_dict())
    return scaled


def merge_kv_heads(model: Any) -> Any:
    """Replaces the KV heads by their mean."""
    config = copy.deepcopy(model.config)
    heads, config.num_key_value_heads = config.num_key_value_heads, 1
    state = model.state_dict()
    for name, weight in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            state[name] = weight.unflatten(0, (heads, -1)).mean(0)
    merged = type(model)(config)
    merged.load_state_dict(state)
    return merged


RECIPES: dict[str, Callable[[Any], Any]] = {
    "rope": scale_positions,
    "continual": lambda model: model,
    "layers": drop_layers,
    "kv-heads": merge_kv_heads,
}


class Evaluation(TrainerCallback):
    """Takes the loss of each held-out sequence after some steps, and the processor seconds of training until there."""

    def __init__(self, steps: set[int], texts: dict[str, Tensor], dtype: str) -> None:
        self.steps, self.texts, self.dtype = steps, texts, dtype
        self.found: dict[int, dict[str, Any]] = {}
        self.seconds: list[float] = []
        self._since = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks at the clock."""
        self._since = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Evaluates, if it is time."""
        self.seconds.append(time.process_time() - self._since)
        if state.global_step in self.steps:
            self.evaluate(model, state.global_step)

    def evaluate(self, model: Any, step: int) -> None:
        """Evaluates the model as it is after a step."""
        losses = {name: held_out_losses(model, ids, self.dtype) for name, ids in self.texts.items()}
        self.found[step] = {"seconds": sum(self.seconds), "losses": losses}


@torch.no_grad()
def held_out_losses(model: Any, ids: Tensor, dtype: str) -> list[float]:
    """The mean loss per token of each sequence ``[sequences, tokens]``, with products in a dtype."""
    was_training = model.training
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss.item() for row in ids]
    model.train(was_training)
    return losses


@dataclasses.dataclass
class Bench:
    """The model and the texts of a recipe, and where its records are.

    Attributes:
        model: The folder of the model.
        data: What records are told apart by, beside the training and a digest of all tokens: the model's name, the
            names of the texts, and lengths.
        train: Sequences to train on, ``[sequences, tokens]``.
        texts: Held-out sequences, by name, that trainings are compared by.
        tuning: The same, of other sequences, that short trainings are judged by.
        output: A file of one JSON line per training.
        scratch: A folder that the trainer may use.
        batch: Sequences of a step.
        dtype: Of the teacher, and of the student's products: ``"float32"`` or ``"bfloat16"``.
    """

    model: str
    data: dict[str, Any]
    train: Tensor
    texts: dict[str, Tensor]
    tuning: dict[str, Tensor]
    output: Path
    scratch: Path
    batch: int
    dtype: str

    def texts_of(self, trial: Trial) -> dict[str, Tensor]:
        """The sequences that a training is evaluated on."""
        return self.texts if trial.also or trial.loss == UNTRAINED else self.tuning

    def key(self, trial: Trial) -> dict[str, Any]:
        """What the record of a training is found by, beside its dtype."""
        digest = hashlib.sha256(self.train.numpy().tobytes())
        for name, ids in self.texts_of(trial).items():
            digest.update(name.encode() + ids.numpy().tobytes())
        return {"trial": dataclasses.asdict(trial), "data": {**self.data, "digest": digest.hexdigest()[:16]}}

    def found(self, trial: Trial, dtypes: tuple[str, ...]) -> dict[str, Any] | None:
        """The record of a training that has run in one of the dtypes."""
        wanted = self.key(trial)
        records = (record for record in read(self.output) if record["dtype"] in dtypes)
        return next((record for record in records if wanted.items() <= record.items()), None)

    @contextmanager
    def held(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Whether this process alone has what has a name; another one that has it is waited for, or not."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.scratch / f"{name}.lock", "" if wait else "another process has it"))
            except BlockingIOError:
                yield False
                return
            yield True

    def run(self, trials: Iterable[Trial], *, dtypes: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """The records of trainings, which run where there is none yet of this dtype or of one of `dtypes`.

        What another process trains at the time comes last.
        """
        trials, dtypes = list(trials), (self.dtype, *dtypes)
        for wait in (False, True):
            for trial in trials:
                name = hashlib.sha256(json.dumps(self.key(trial)).encode()).hexdigest()[:16]
                with self.held(name, wait) as held:
                    if held and self.found(trial, dtypes) is None:
                        self._train(trial)
        return [found for trial in trials if (found := self.found(trial, dtypes)) is not None]

    def _train(self, trial: Trial) -> None:
        print(f"{trial.recipe}: {describe(trial)}, {trial.steps} steps", flush=True)
        evaluation = Evaluation({trial.steps, trial.also}, self.texts_of(trial), self.dtype)
        trainer = self._trainer(trial, evaluation)
        if trial.steps:
            trainer.train()
        else:
            evaluation.evaluate(trainer.model, 0)
        self._write(trial, evaluations=evaluation.found, seconds_per_step=median(evaluation.seconds or [0.0]))

    def time(self, trials: dict[str, Trial]) -> dict[str, float]:
        """Processor seconds of a step of each training, by loss: they take turns, in one process."""
        timed = {loss: dataclasses.replace(trial, steps=0) for loss, trial in trials.items()}
        with self.held("timing"):
            records = {loss: self.found(trial, (self.dtype,)) for loss, trial in timed.items()}
            if None in records.values():
                seconds: dict[str, list[float]] = {loss: [] for loss in trials}
                for _ in range(TIMED_ROUNDS):
                    for loss, trial in trials.items():
                        clock = Evaluation(set(), {}, self.dtype)
                        print(f"{trial.recipe}: the time of {loss}", flush=True)
                        self._trainer(dataclasses.replace(trial, steps=TIMED_STEPS), clock).train()
                        seconds[loss] += clock.seconds[1:]
                for loss, trial in timed.items():
                    self._write(trial, evaluations={}, seconds_per_step=median(seconds[loss]), seconds=seconds[loss])
            records = {loss: self.found(trial, (self.dtype,)) for loss, trial in timed.items()}
        return {loss: record["seconds_per_step"] for loss, record in records.items() if record is not None}

    def _write(self, trial: Trial, **found: Any) -> None:
        record = {**self.key(trial), "dtype": self.dtype, **found, "machine": facts(torch.device("cpu"))}
        with self.held("output"):
            append(self.output, record)

    def adapt(self, steps: int, texts: Tensor) -> None:
        """Trains the model on texts by the language-model loss, once; from there on that is the model."""
        folder = self.scratch / f"adapted-{self.data['model']}-{self.data['adapted']}-{self.dtype}"
        with self.held("adapting"):
            if not folder.exists():
                print(f"the model learns text of the old kind, {steps} steps", flush=True)
                trial = Trial("continual", "lm", 0, ADAPTED_RATE, 0.0, "all", steps)
                trainer = dataclasses.replace(self, train=texts)._trainer(trial, Evaluation(set(), {}, self.dtype))
                trainer.train()
                new: Any = self.scratch / "adapting"
                trainer.save_model(new)
                replace_folder(new, folder)
        self.model = str(folder)

    def _trainer(self, trial: Trial, evaluation: Evaluation) -> Trainer:
        student = RECIPES[trial.recipe](AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32))
        teacher: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.model, dtype=getattr(torch, self.dtype))
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(trial.seed))
        samples: Any = [{"input_ids": row, "labels": row} for row in self.train[order]]
        arguments = TrainingArguments(
            str(self.scratch), max_steps=trial.steps, per_device_train_batch_size=self.batch, seed=trial.seed,
            learning_rate=trial.rate, lr_scheduler_type="constant_with_warmup", warmup_steps=WARMUP, weight_decay=0.0,
            logging_steps=10, report_to=[], save_strategy="no", use_cpu=True,
            bf16=self.dtype == "bfloat16",
        )  # fmt: skip
        given: dict[str, Any] = {"train_dataset": samples, "callbacks": [evaluation]}
        if trial.loss in ("lm", UNTRAINED):
            return Trainer(student, arguments, **given)
        count = len(student.model.layers)
        pairs = AttentionDistiller(student, teacher).pairs
        layers = {n: pairs[n] for n in range(0 if trial.layers == "all" else count // 2, count)}
        distiller = AttentionDistiller(student, teacher, layers=layers if trial.weight else {}, weight=trial.weight)
        logits = float(trial.loss in ("logits", "both"))
        return DistillingTrainer(student, arguments, distiller=distiller, logits_weight=logits, **given)

    def tune(self, recipe: str, steps: int) -> dict[str, Trial]:
        """The best learning rate of each loss, and the best weight and layers of attention KL."""

        def best(trials: Iterable[Trial]) -> Trial:
            records = self.run(trials, dtypes=DTYPES)
            return Trial(**min(records, key=judged)["trial"])

        found: dict[str, Trial] = {}
        for loss in LOSSES:
            weight, layers = (0.0, "all") if loss in ("lm", "logits") else (WEIGHTS[0], "all")
            if loss == "both":
                weight, layers = found["attention"].weight, found["attention"].layers
            chosen = best(Trial(recipe, loss, 0, rate, weight, layers, steps) for rate in RATES)
            if loss == "attention":
                chosen = best(dataclasses.replace(chosen, weight=weight) for weight in WEIGHTS)
                chosen = best(dataclasses.replace(chosen, layers=layers) for layers in ("all", "upper"))
            found[loss] = chosen
        return found


def judged(record: dict[str, Any]) -> float:
    """What a choice is made by: the mean of the losses of the held-out texts, new and old, after the last step."""
    losses = record["evaluations"][str(record["trial"]["steps"])]["losses"]
    found = fmean(fmean(values) for values in losses.values())
    return found if math.isfinite(found) else math.inf


def compare(bench: Bench, recipe: str, steps: int, tuning_steps: int, seeds: int) -> None:
    """Tunes the losses of a recipe, and trains each with each seed."""
    tuned = bench.tune(recipe, tuning_steps)
    costs = bench.time(tuned)
    untrained = Trial(recipe, UNTRAINED, seed=0, rate=0.0, weight=0.0, layers="all", steps=0)
    as_long = {loss: round(steps * max(costs.values()) / cost) for loss, cost in costs.items()}
    final = [
        dataclasses.replace(trial, seed=seed, steps=as_long[loss], also=steps)
        for seed in range(seeds)
        for loss, trial in tuned.items()
    ]
    bench.run([untrained, *final])


def describe(trial: Trial) -> str:
    """A training in a few words."""
    attention = f", attention weight {trial.weight:g}, {trial.layers} layers" if trial.weight else ""
    return f"{trial.loss}, seed {trial.seed}, learning rate {trial.rate:g}{attention}"


def read(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that was cut off is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds a record, in the place of a last line that was cut off."""
    path.touch()
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, 2)
        file.write(json.dumps(record).encode() + b"\n")


def tables(records: list[dict[str, Any]]) -> str:
    """A table per recipe, dtype and held-out text: perplexities, beside those of the two losses without attention.

    A change has Student's interval of 95% over seeds and held-out sequences. Before them the short trainings, with the
    losses that choices were made by.
    """
    final = [record for record in records if record["trial"]["also"] or record["trial"]["loss"] == UNTRAINED]
    lines = _choices([record for record in records if record not in final and record["evaluations"]])
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in final:
        runs.setdefault(json.dumps((record["trial"]["recipe"], record["dtype"], record["data"])), []).append(record)
    for run in runs.values():
        recipe, dtype, model = run[0]["trial"]["recipe"], run[0]["dtype"], run[0]["data"]["model"]
        for text in next(iter(run[0]["evaluations"].values()))["losses"]:
            for when in ("steps", "time"):
                lines += _table(run, f"{recipe}, {model}, {dtype}", text, when)
    return "\n".join(lines)


def _choices(records: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for recipe in dict.fromkeys(record["trial"]["recipe"] for record in records):
        lines += [
            f"\n{recipe}, short trainings:\n",
            "| loss | learning rate | weight | layers | steps | dtype | loss on held-out text |",
            "| --- | --: | --: | --- | --: | --- | --: |",
        ]
        for record in records:
            trial = record["trial"]
            if trial["recipe"] == recipe:
                attention = (f"{trial['weight']:g}", trial["layers"]) if trial["weight"] else ("", "")
                cells = trial["loss"], f"{trial['rate']:g}", *attention, trial["steps"], record["dtype"]
                lines.append(f"| {' | '.join(map(str, cells))} | {judged(record):.3f} |")
    return lines


def _table(records: list[dict[str, Any]], what: str, text: str, when: str) -> list[str]:
    lines = [
        f"\n{what}, {text} text, equal {when}:\n",
        "| loss | seeds | steps | processor seconds | perplexity | beside lm | beside logits |",
        "| --- | --: | --: | --: | --: | --- | --- |",
    ]
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        trial = record["trial"]
        step = trial["also"] if when == "steps" and trial["also"] else trial["steps"]
        found = {**record["evaluations"][str(step)], "steps": step}
        rows.setdefault(trial["loss"], {})[trial["seed"]] = found
    losses = {loss: {seed: found["losses"][text] for seed, found in row.items()} for loss, row in rows.items()}
    for loss in (UNTRAINED, *LOSSES):
        if row := rows.get(loss):
            seconds = fmean(found["seconds"] for found in row.values())
            perplexity = math.exp(fmean(fmean(values) for values in losses[loss].values()))
            beside = [_change(losses[loss], losses.get(other, {})) if other != loss else "" for other in LOSSES[:2]]
            steps = next(iter(row.values()))["steps"]
            cells = loss, len(row), steps, f"{seconds:.0f}", f"{perplexity:.2f}", *beside
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _change(ours: dict[int, list[float]], theirs: dict[int, list[float]]) -> str:
    """The change of perplexity from the losses of another training; the seeds that both have."""
    seeds = [seed for seed in theirs if seed in ours]
    if not seeds:
        return ""
    change = [[a - b for a, b in zip(ours[seed], theirs[seed], strict=True)] for seed in seeds]
    e = crossed_mean(change)
    low, value, high = (100 * math.expm1(x) for x in (e.low, e.value, e.high))
    return f"{value:+.1f}% [{low:+.1f}, {high:+.1f}]"


def name_of(folder: Path) -> str:
    """Of a model: that of its folder, and a digest of its weights, by which models of one name are told apart."""
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(path.read_bytes())
    return f"{folder.name}-{weights.hexdigest()[:8]}"


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The defaults of options, and the description as it is written."""


def main(arguments: list[str] | None = None) -> None:
    """Runs what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("recipe", nargs="*", help=f"of {', '.join(RECIPES)}; none: only the tables")
    parser.add_argument("--model", default="", help="a folder, instead of SmolLM2-135M")
    parser.add_argument("--text", action="append", default=[], help="files or folders to train on")
    parser.add_argument("--held-out", action="append", default=[], help="text of the same kind to evaluate on")
    parser.add_argument("--old", action="append", default=[], help="text that shall not be forgotten")
    parser.add_argument("--adapt", action="append", default=[], help="text like the old one to train on first")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/recipes.jsonl"), help="the records")
    for name, default, what in (
        ("steps", 100, "of a training that is compared, for the slowest loss"), ("tuning-steps", 50, "of a short one"),
        ("seeds", 3, "of the trainings that are compared"), ("tokens", 512, "of a sequence"),
        ("batch", 1, "sequences of a step"), ("sequences", 100, "held out of each text, to compare by"),
        ("tuning-sequences", 20, "held out of each text, to choose by"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    native = "bfloat16 as it is" in facts(torch.device("cpu"))["capability"]
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if native else "float32",
                        help="of the products; by default what the CPU multiplies as it is")  # fmt: skip
    given = parser.parse_args(arguments)
    if unknown := set(given.recipe) - set(RECIPES):
        parser.error(f"there is no recipe {', '.join(sorted(unknown))}: there are {', '.join(RECIPES)}")
    if not given.recipe and not given.output.exists():
        parser.error(f"there are no records in {given.output}")
    if given.recipe:
        if not given.text or not given.held_out:
            parser.error("a recipe needs --text and --held-out")
        if not given.model:
            from streamkl.testing import smollm2

            given.model = str(smollm2.checkpoint())
        tokenizer = AutoTokenizer.from_pretrained(given.model)

        def sequences(sources: list[str], most: int) -> Tensor:
            ids = packed(tokenizer, sources, given.tokens, most, field="text", encoding="utf-8")
            return torch.from_numpy(ids.astype("int64"))

        everything = 2**40 // given.tokens
        texts, tuning = {}, {}
        for name, sources in (("held-out", given.held_out), ("old", given.old)):
            if sources:
                ids = sequences(sources, everything)
                tuning[name], rest = ids[: given.tuning_sequences], ids[given.tuning_sequences :]
                if len(rest) < given.sequences:
                    parser.error(f"the {name} text has {len(ids)} sequences: more text, or fewer --sequences")
                texts[name] = rest[torch.linspace(0, len(rest) - 1, given.sequences).long()]  # of all of the text
        names = {what: [Path(name).name for name in getattr(given, what)] for what in ("text", "held_out", "old")}
        data = {"model": name_of(Path(given.model)), **names, "tokens": given.tokens, "batch": given.batch}
        train = sequences(given.text, 4 * given.steps * given.batch)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        scratch = given.output.with_suffix(".scratch")
        bench = Bench(given.model, data, train, texts, tuning, given.output, scratch, given.batch, given.dtype)
        for recipe in given.recipe:
            chosen = bench
            if recipe == "continual" and given.adapt:
                ids = sequences(given.adapt, given.steps * given.batch)
                digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]
                chosen = dataclasses.replace(bench, data={**data, "adapted": digest})
                chosen.adapt(given.steps, ids)
            compare(chosen, recipe, given.steps, given.tuning_steps, given.seeds)
    print(tables(read(given.output)))


if __name__ == "__main__":
    main()
