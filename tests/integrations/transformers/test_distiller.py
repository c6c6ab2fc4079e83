"""Gradients of attention distillation are those of the matrices that ``output_attentions`` gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import streamkl.integrations.transformers as skl
from streamkl.integrations.transformers import AttentionDistiller, DistillationStep, capture_attention
from streamkl.integrations.transformers.checkpointing import checkpoint_activations
from streamkl.sparse import OracleSelector
from streamkl.testing.materialised import materialised_losses
from streamkl.testing.tiny_models import tiny_model, tokens

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Of the largest gradient."""
TOKENS = 12
EQUAL = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
GROUPED = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def models(dtype: torch.dtype, depth: int = 2, **options: Any) -> tuple[Any, Any]:
    """A student of other width and depth than its teacher, which has 4 layers, 4 query heads and 2 key heads."""
    student = tiny_model("llama", num_hidden_layers=depth, **{**GROUPED, **options})
    return student.to(dtype).train(), tiny_model("llama", seed=1, num_hidden_layers=4).to(dtype)


def batches() -> dict[str, dict[str, torch.Tensor]]:
    ids = tokens(2, TOKENS)
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    right[0, -5:], left[1, :4] = 0, 0
    positions = torch.cat([torch.arange(n) for n in (5, 4, 3)])[None].expand(2, -1)
    return {
        "plain": {"input_ids": ids},
        "padded right": {"input_ids": ids, "attention_mask": right},
        "padded left": {"input_ids": ids, "attention_mask": left},
        "packed": {"input_ids": ids, "position_ids": positions},
    }


def gradients(student: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    student.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


def check(distiller: AttentionDistiller, batch: dict[str, torch.Tensor], run: Any = None, **options: Any) -> None:
    """Holds losses and gradients to those of the matrices."""
    student, dtype = distiller.student, distiller.student.dtype
    run = student if run is None else run
    with distiller.step() as step:
        run(**batch, use_cache=False)
        step.teach(**batch)
    got = gradients(student, step.loss())
    copied = copy.deepcopy(student)  # whose change of implementation compiles nothing again
    for module in copied.modules():
        module.gradient_checkpointing = False  # what is repeated would not have the implementation of the matrices
    losses, _ = materialised_losses(copied, distiller.teacher, batch, distiller.pairs, **options)
    wanted = gradients(copied, torch.stack([losses[n] * distiller.weights[n] for n in losses]).mean())
    largest = max(float(g.abs().max()) for g in wanted.values())
    assert largest > 1e-3
    assert set(wanted) <= set(got)
    assert not any(gradient.any() for name, gradient in got.items() if name not in wanted)  # a compiled model has zeros
    for name, gradient in wanted.items():
        error = float((got[name] - gradient).abs().max())
        assert error <= TOLERANCE[dtype] * largest, f"{name}: {error:.1e} of {largest:.1e}"
    for layer, loss in losses.items():
        assert float((step.losses[layer] - loss).detach().abs()) <= TOLERANCE[dtype] * max(1, float(loss.detach()))


@both_dtypes
@pytest.mark.parametrize("batch", batches())
@pytest.mark.parametrize("heads", [EQUAL, GROUPED], ids=["equal heads", "grouped heads"])
def test_gradients_are_those_of_the_matrices(heads, batch, dtype) -> None:
    student, teacher = models(dtype, **heads)
    check(AttentionDistiller(student, teacher), batches()[batch])


@both_dtypes
@pytest.mark.parametrize("layers", ["uniform", "last", {0: 0, 2: 3}])
def test_so_are_those_of_fewer_layers_with_weights(layers, dtype) -> None:
    student, teacher = models(dtype, depth=3)
    distiller = AttentionDistiller(student, teacher, layers=layers)
    assert distiller.pairs == {"uniform": {0: 0, 1: 1, 2: 3}, "last": {2: 3}}.get(str(layers), layers)
    weighted = AttentionDistiller(student, teacher, layers=layers, weight={n: 0.5 + n for n in distiller.pairs})
    check(weighted, batches()["plain"])


@both_dtypes
@pytest.mark.parametrize(("divergence", "temperature"), [("forward", 2.0), ("reverse", 1.0), ("reverse", 0.5)])
def test_so_are_those_of_either_divergence_at_any_temperature(divergence, temperature, dtype) -> None:
    student, teacher = models(dtype, **EQUAL)
    options = {"divergence": divergence, "temperature": temperature}
    check(AttentionDistiller(student, teacher, **options), batches()["padded left"], **options)


@pytest.mark.parametrize("implementations", [("eager", "sdpa"), ("sdpa", "eager")])
def test_the_two_may_run_with_different_implementations(implementations) -> None:
    student, teacher = models(torch.float32)  # in float64 the softmax of transformers' eager attention has float32
    for model, implementation in zip((student, teacher), implementations, strict=True):
        model.set_attn_implementation(implementation)
    check(AttentionDistiller(student, teacher), batches()["padded left"])


@both_dtypes
@pytest.mark.parametrize("batch", ["padded left", "packed"])
def test_so_are_those_under_checkpointing(batch, dtype) -> None:
    student, teacher = models(dtype)
    checkpoint_activations(student)
    check(AttentionDistiller(student, teacher), batches()[batch])


class Table(nn.Module):
    """RoPE in the model's dtype, made ahead."""

    def __init__(self, rope: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.cos, self.sin = (x[0] for x in rope(torch.empty(1, dtype=dtype), torch.arange(TOKENS)[None]))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[position_ids], self.sin[position_ids]


def without_float32(model: Any) -> None:
    """Replaces what transformers computes in float32 in a model of any dtype, where inductor rounds otherwise."""
    model.model.rotary_emb = Table(model.model.rotary_emb, model.dtype)
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape[0], child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "checkpointing", "dtype", "compiler"),
    [
        ("packed", True, torch.float64, "aot_eager"),
        *(
            pytest.param(*case, "inductor", marks=pytest.mark.nightly)  # it takes more than a minute for each
            for case in (("plain", False, torch.float32), ("padded left", True, torch.float32),
                         ("packed", True, torch.float64))
        ),
    ],
)  # fmt: skip
def test_so_are_those_of_a_student_that_is_compiled_in_one_graph(batch, checkpointing, dtype, compiler) -> None:
    torch._dynamo.reset()
    student, teacher = models(dtype)
    without_float32(student)
    compiled = torch.compile(student, fullgraph=True, backend=compiler)
    distiller = AttentionDistiller(student, teacher)
    if checkpointing:
        checkpoint_activations(student)
    for patch in ({}, {"error_on_recompile": True}):
        with torch._dynamo.config.patch(**patch):
            check(distiller, batches()[batch], compiled)


@both_dtypes
@pytest.mark.parametrize("heads", [{0: (3, 0), 1: (1, 2)}, {0: 2, 1: 1}], ids=str)
def test_a_map_of_heads_compares_those(heads, dtype) -> None:
    student, teacher = models(dtype)
    taught = [head for group in heads.values() for head in ((group,) if isinstance(group, int) else group)]
    check(AttentionDistiller(student, teacher, heads=heads), batches()["padded right"], teacher_heads=taught)


def test_a_teacher_left_in_training_mode_is_in_evaluation_mode_in_a_step_and_has_no_gradients() -> None:
    student, teacher = models(torch.float32)
    distiller, batch = AttentionDistiller(student, teacher), batches()["plain"]
    teacher.train()
    with distiller.step() as step:
        student(**batch, use_cache=False)
        assert not teacher.training
        step.teach(**batch)
    step.loss().backward()
    assert all(p.grad is None for p in teacher.parameters())


def test_a_student_with_adapters_learns_as_it_does_whole() -> None:
    """LoRA of q and k, whose gradients are those of the matrices."""
    from peft import LoraConfig, get_peft_model

    student, teacher = models(torch.float64)
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    adapted = get_peft_model(student, config).double()
    check(AttentionDistiller(adapted, teacher), batches()["padded left"])


def test_a_teacher_in_bfloat16_teaches_a_student_in_float32() -> None:
    student, teacher = models(torch.float32, **EQUAL)
    distiller, batch = AttentionDistiller(student, teacher.bfloat16(), layers={1: 3}), batches()["plain"]
    with capture_attention(teacher, [3]) as taught, capture_attention(student, [1]) as learnt, distiller.step() as step:
        student(**batch, use_cache=False)
        step.teach(**batch)
    assert (taught[3].call.q.dtype, learnt[1].call.q.dtype) == (torch.bfloat16, torch.float32)
    p, q = (
        ((call.q.double() @ call.k.double().repeat_interleave(2, 1).mT) * call.scale)
        .masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -torch.inf)
        .log_softmax(-1)
        for call in (taught[3].call, learnt[1].call)
    )
    wanted = (p.exp() * (p - q)).nan_to_num().sum(-1).mean()
    torch.testing.assert_close(step.losses[1].double(), wanted, rtol=1e-4, atol=0)
    step.loss().backward()
    assert student.model.layers[1].self_attn.q_proj.weight.grad.any()


def one_step(
    distiller: AttentionDistiller, batch: dict[str, torch.Tensor], use_cache: bool = False
) -> DistillationStep:
    with distiller.step() as step:
        distiller.student(**batch, use_cache=use_cache)
        step.teach(**batch)
    return step


def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    student, teacher = models(torch.float32)
    batch = batches()["packed"]
    with pytest.raises(ValueError, match="student and teacher are one model"):
        AttentionDistiller(student, student)
    with pytest.raises(ValueError, match="at least as many teacher layers: the student has 4"):
        AttentionDistiller(teacher, student)
    for layer in (9, "model.layers.0"):
        with pytest.raises(
            ValueError, match=rf"no attention in layers \[.*{layer}.*\]: they are numbers, of \[0, 1, 2"
        ):
            AttentionDistiller(student, teacher, layers={0: layer})
    parallel = copy.deepcopy(teacher)
    parallel._tp_size = 2
    with pytest.raises(ValueError, match="the teacher is tensor parallel, and a process has some of its heads only"):
        AttentionDistiller(student, parallel)
    with pytest.raises(ValueError, match="weight must not be negative: got -1"):
        AttentionDistiller(student, teacher, weight=-1.0)
    with pytest.raises(ValueError, match="models of transformers: got str"):
        AttentionDistiller(student, "path/to/teacher")
    with pytest.raises(ValueError, match="equally many of the teacher's"):
        one_step(AttentionDistiller(student, teacher, heads={0: 0, 1: (1, 2)}), batches()["plain"])
    with pytest.raises(ValueError, match="the student has heads 0 to 1"):
        one_step(AttentionDistiller(student, teacher, heads={"0": 0}), batches()["plain"])
    with pytest.raises(ValueError, match=r"one per student's layer \[0, 1\]"):
        AttentionDistiller(student, teacher, weight={0: 1.0})
    with pytest.raises(ValueError, match="attend to different sequences"):  # the student attends across them
        one_step(AttentionDistiller(student, teacher), batch, use_cache=True)
    odd = tiny_model("llama", seed=2, **{**EQUAL, "num_attention_heads": 3, "num_key_value_heads": 3})
    with pytest.raises(ValueError, match=r"4 heads are not a multiple of the student's 3: give heads="):
        one_step(AttentionDistiller(odd, teacher), batch)
    windowed = tiny_model("gemma3", layer_types=["sliding_attention", "full_attention", "full_attention"])
    with pytest.raises(ValueError, match=r"has the window \(6, 0\), layer 0 of the teacher None"):
        one_step(AttentionDistiller(windowed, teacher, layers={0: 0}), batch)
    sparse = copy.deepcopy(teacher)
    skl.sparsify(sparse, OracleSelector(4, 2))
    with pytest.raises(ValueError, match="layer 0 of the student, or 0 of the teacher, attends to selected keys only"):
        one_step(AttentionDistiller(student, sparse, layers={0: 0}), batches()["plain"])
    with AttentionDistiller(student, teacher).step() as step:
        student(**batch, use_cache=False)
    with pytest.raises(ValueError, match="the teacher did not run in this step"):
        step.loss()


def test_reentrant_checkpointing_is_refused_in_a_sentence() -> None:
    student, teacher = models(torch.float32)
    checkpoint_activations(student, use_reentrant=True)
    student.enable_input_require_grads()
    with pytest.raises(ValueError, match=r"layer 0 of the student has no graph.*checkpointing must be non-reentrant"):
        one_step(AttentionDistiller(student, teacher), batches()["plain"])
