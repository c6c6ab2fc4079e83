"""Distils the attention of a tiny teacher into a student of half the layers and heads, with Hugging Face's trainer.

    python examples/distill_attention.py

Replace `tiny_model` by `AutoModelForCausalLM.from_pretrained` and `samples` by your tokenized text.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from streamkl.integrations.transformers import AttentionDistillation, AttentionDistiller
from streamkl.testing.tiny_models import tiny_model, tokens


class DistillingTrainer(AttentionDistillation, Trainer):
    """Trainer with the loss of an `AttentionDistiller`."""


def main(steps: int = 60, length: int = 64) -> tuple[float, float]:
    """Runs the training, and returns the first and the last KL of attention."""
    teacher = tiny_model("llama", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    student = tiny_model("llama", seed=1, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    samples: Any = [{"input_ids": ids, "labels": ids} for ids in tokens(4 * steps, length)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="constant",
            logging_steps=max(1, steps // 6), report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        torch.manual_seed(0)
        distiller = AttentionDistiller(student, teacher, layers="uniform", weight=1.0)
        trainer = DistillingTrainer(student, arguments, train_dataset=samples, distiller=distiller, lm_weight=0.1)
        trainer.train()
    losses = [line["attention_kl"] for line in trainer.state.log_history if "attention_kl" in line]
    print(f"layers {distiller.pairs}: KL of attention {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
