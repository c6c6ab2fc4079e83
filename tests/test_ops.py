"""The PyTorch contract: registration, compilation, autocast, checkpointing, double backward, saved tensors."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import streamkl
from streamkl import attention_kl, attention_lse, engines, indexer_kl, ops
from streamkl.testing import STUDENT, TEACHER, Heads, IndexerHeads, evaluate, make_case, make_indexer_case

pytestmark = pytest.mark.usefixtures("small_tiles")

PATHS = {
    "paired": {"heads": Heads(4, 2, 4, 2), "wanted": STUDENT + TEACHER},
    "mixture": {"heads": Heads(4, 2, 2, 1), "reduction": "none"},
    "train": {"heads": Heads(4, 2, 2, 1), "teacher_lse": True},
}
"""One problem for each path through the operators."""


def compiler(path: str, dynamic: bool) -> str:
    """Inductor for one path, and for the others what traces as it does and compiles no C++."""
    return "inductor" if path == "train" and not dynamic else "aot_eager"


SCALED = {"teacher_scale": 0.3, "student_scale": 0.7}


def small(path: str, **changes):
    options = {"tokens": (9, 13), "dims": (8, 8), "guard": False, "causal": True, **PATHS[path], **changes}
    return make_case(0, **options)


def run(case, function=attention_kl, **options):
    return evaluate(function, case.tensors, case, **case.options, teacher_lse=case.teacher_lse, **options).named()


def op_arguments() -> dict[str, tuple]:
    """Arguments of every operator, dense and packed, by name and case."""
    rng = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).requires_grad_()

    a_q, a_k, b_q, b_k = leaf(1, 4, 9, 8), leaf(1, 2, 13, 8), leaf(1, 2, 9, 6), leaf(1, 1, 13, 6)
    b_w = leaf(1, 9, 2).detach().mT.requires_grad_()
    topk = torch.stack([torch.randperm(13, generator=rng)[:5] for _ in range(9)])[None, None]
    options = ops.Options(None, 0.5, False, True, False, 5, 0, 1, 1, False, "tiled")
    indexer = options._replace(b_head_summed=True)
    packed = (torch.tensor([0, 4, 9]), torch.tensor([0, 6, 13]))
    arguments = {}
    for kind, keys in (
        ("dense", (None, None, None)), ("packed", (None, *packed)), ("topk", (topk, None, None)),
        ("packed_topk", (topk, *packed)),
    ):  # fmt: skip
        teacher = (a_q.detach(), a_k.detach())
        groups, heads = (*teacher, b_q, b_k, None, *keys), (a_q, a_k, leaf(1, 4, 9, 6), b_k, None, *keys)
        index = (*teacher, b_q, b_k, b_w, *keys)
        lse = (5, 0, 1, False, torch.float32, "tiled")
        student = (b_q.detach(), b_k.detach())
        norm_a = torch.ops.streamkl.logsumexp(*teacher, None, *keys, None, False, False, *lse)
        norm_b = torch.ops.streamkl.logsumexp(*student, None, *keys, 0.5, True, False, *lse)
        norm_i = torch.ops.streamkl.logsumexp(*student, b_w.detach(), *keys, 0.5, True, True, *lse)
        _, mean, *stats = (x.detach() for x in torch.ops.streamkl.paired_rows(*heads, *options))
        arguments |= {
            f"logsumexp-{kind}": (*teacher, None, *keys, None, False, False, *lse),
            f"logsumexp-{kind}_index": (*student, b_w.detach(), *keys, 0.5, True, True, *lse),
            f"paired_rows-{kind}": (*heads, *options),
            f"mixture_rows-{kind}": (*groups, *norm_a, False, *options),
            f"mixture_rows-{kind}_index": (*index, *norm_a, False, *indexer),
            f"mixture_rows-{kind}_max": (*groups, *norm_a, False, *options._replace(runs=2)),
            f"train-{kind}": (*groups, *norm_a, *norm_b, torch.rand(1, 2, 9), *options),
            f"train-{kind}_index": (*index, *norm_a, *norm_i, torch.rand(1, 1, 9), *indexer),
            f"rows_backward-{kind}_index": (
                torch.rand(1, 1, 9), None, *norm_a, *norm_i, *(x if x is None else x.detach() for x in index),
                *indexer, False, True, True,
            ),
            f"rows_backward-{kind}": (
                torch.rand(1, 4, 9), mean, *stats, *(x if x is None else x.detach() for x in heads), *options,
                True, False, False,
            ),
        }  # fmt: skip
    arguments["padded_sequences-"] = (torch.tensor([[True, True, False], [False, True, True]]),)
    arguments["checked_weight-"] = (torch.rand(1, 9)[:, None].expand(1, 2, 9), torch.float64)
    arguments["checked_mass-"] = (torch.rand(1, 2, 9), torch.ones(1, 2, 9), torch.randn(1, 4, 9))
    arguments["scale_gradient-"] = (torch.randn(2, 3), torch.tensor(3.0), torch.float16)
    return arguments


ARGUMENTS = op_arguments()


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.streamkl, name.split("-")[0]).default, ARGUMENTS[name])


def test_every_operator_is_opchecked() -> None:
    assert {name.split("-")[0] for name in ARGUMENTS} == set(ops.SCHEMAS)


def test_gradcheck_in_float64() -> None:
    for path in PATHS:
        case = small(path, dtypes=(torch.float64, torch.float64), tokens=(5, 7), dims=(4, 4))
        leaves = [case.tensors[name].requires_grad_(name in case.wanted) for name in case.tensors]

        def loss(*tensors, case=case):
            return attention_kl(*tensors, **case.options, teacher_lse=case.teacher_lse, backend="tiled")

        assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_gradcheck_of_both_divergences(divergence: str, activation: str | None) -> None:
    case = small("paired", dtypes=(torch.float64, torch.float64), tokens=(5, 7), dims=(4, 4))
    leaves = [x.requires_grad_() for x in case.tensors.values()]
    options = {"divergence": divergence, "student_activation": activation, "causal": True, "reduction": "none"}
    assert torch.autograd.gradcheck(lambda *x: attention_kl(*x, **options), leaves, fast_mode=True)


INDEXER_PATHS = {
    "mixture": {"reduction": "none"},
    "train": {"teacher_lse": True},
    "unweighted": {"weight_dtype": None, "activation": None},
    "topk": {"topk_indices": torch.stack([torch.randperm(7)[:4] for _ in range(10)]).view(2, 5, 4)},
    "packed": {"batch": 1, "cu_seqlens": ([0, 2, 5], [0, 3, 7]), "reduction": "sum"},
}
"""One indexer for each path through the operators."""


def small_indexer(path: str, **changes):
    heads = IndexerHeads(4, 2, 3)
    options = {"heads": heads, "tokens": (5, 7), "dims": (4, 4), "guard": False, **INDEXER_PATHS[path], **changes}
    return make_indexer_case(0, **options)


@pytest.mark.parametrize("path", INDEXER_PATHS)
def test_gradcheck_of_an_indexer(path: str) -> None:
    weight = {} if "weight_dtype" in INDEXER_PATHS[path] else {"weight_dtype": torch.float64}
    case = small_indexer(path, dtypes=(torch.float64, torch.float64), **weight)
    leaves = [x.requires_grad_(name in case.wanted) for name, x in case.tensors.items()]

    def loss(*tensors):
        return indexer_kl(*tensors, **case.options, teacher_lse=case.teacher_lse, backend="tiled")

    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


@pytest.mark.slow
def test_gradcheck_on_selected_keys() -> None:
    case = small("paired", dtypes=(torch.float64, torch.float64), tokens=(5, 7), dims=(4, 4))
    leaves = [x.requires_grad_() for x in case.tensors.values()]
    topk = INDEXER_PATHS["topk"]["topk_indices"]
    assert torch.autograd.gradcheck(lambda *x: attention_kl(*x, causal=True, topk_indices=topk), leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("path", INDEXER_PATHS)
def test_compiled_indexer_equals_eager(path: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(indexer_kl, fullgraph=True, dynamic=dynamic, backend=compiler(path, dynamic))
    case = small_indexer(path)
    for (name, eager), ours in zip(run(case, indexer_kl).items(), run(case, compiled).values(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("path", INDEXER_PATHS)
def test_autocast_leaves_the_weights_of_an_indexer_alone(path: str) -> None:
    case = small_indexer(path)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(case, indexer_kl)
    case.tensors = {name: x if name == "index_w" else x.bfloat16() for name, x in case.tensors.items()}
    for name, value in run(case, indexer_kl).items():
        assert torch.equal(ours[name], value.float()), name
        assert ours[name].dtype == torch.float32


def test_an_indexer_whose_weights_alone_are_trained() -> None:
    for path in ("mixture", "train"):
        case = small_indexer(path)
        everything = run(case, indexer_kl)
        case.wanted = ("index_w",)
        assert torch.equal(run(case, indexer_kl)["index_w"], everything["index_w"])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("path", PATHS)
def test_compiled_whole_equals_eager(path: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention_kl, fullgraph=True, dynamic=dynamic, backend=compiler(path, dynamic))
    calls = [((9, 13), {}), ((9, 13), SCALED)]
    if dynamic:
        calls += [((17, 11), {"student_scale": 0.2}), ((17, 12), {"student_scale": 0.1, "window": (4, 2)})]
    for tokens, options in calls:
        case = small(path, tokens=tokens, row_weight=torch.rand(2, tokens[0]), **options)
        for (name, eager), ours in zip(run(case).items(), run(case, compiled).values(), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.slow
def test_compiled_with_packed_sequences_equals_eager() -> None:
    torch._dynamo.reset()
    case = small("train", batch=1, tokens=(9, 13), cu_seqlens=([0, 4, 9], [0, 6, 12]))
    compiled = torch.compile(attention_kl, fullgraph=True, backend="aot_eager")
    for (name, eager), ours in zip(run(case).items(), run(case, compiled).values(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.slow
def test_compiled_reverse_equals_eager() -> None:
    torch._dynamo.reset()
    case = small("paired", divergence="reverse", student_activation="relu")
    compiled = torch.compile(attention_kl, fullgraph=True, backend="aot_eager")
    for (name, eager), ours in zip(run(case).items(), run(case, compiled).values(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.slow
def test_compiled_lse_equals_eager() -> None:
    torch._dynamo.reset()
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 13, 8)
    compiled = torch.compile(attention_lse, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, causal=True), attention_lse(q, k, causal=True))


@pytest.mark.parametrize("path", PATHS)
def test_autocast_casts_the_inputs_as_it_does_for_attention(path: str) -> None:
    case = small(path)
    with torch.autocast("cpu", torch.bfloat16):
        sdpa = torch.nn.functional.scaled_dot_product_attention(*(torch.randn(1, 1, 3, 8) for _ in range(3)))
        ours = run(case)
    assert sdpa.dtype == torch.bfloat16
    rounded = {name: x.bfloat16().requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
    loss = attention_kl(**rounded, **case.options, teacher_lse=case.teacher_lse)
    assert loss.dtype == ours["loss"].dtype == torch.float32
    assert torch.equal(ours["loss"], loss.detach())
    gradients = torch.autograd.grad(loss, [rounded[name] for name in case.wanted], case.upstream.to(loss.dtype))
    for name, gradient in zip(case.wanted, gradients, strict=True):
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name], gradient.float())


def test_autocast_takes_a_query_and_a_key_of_different_dtypes() -> None:
    case = small("train")
    with torch.autocast("cpu", torch.bfloat16):
        whole = attention_kl(**case.tensors)
        mixed = attention_kl(**{**case.tensors, "teacher_q": case.tensors["teacher_q"].bfloat16()})
    assert torch.equal(whole, mixed)


def test_autocast_leaves_float64_alone() -> None:
    case = small("paired", dtypes=(torch.float64, torch.float64))
    plain = run(case)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(case)
    assert ours["loss"].dtype == torch.float64
    assert torch.equal(ours["loss"], plain["loss"])


@pytest.mark.parametrize("path", PATHS)
def test_selective_checkpointing_saves_the_pass_and_does_not_repeat_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small(path)
    plain = run(case)
    passes = {
        torch.ops.streamkl.logsumexp.default,
        torch.ops.streamkl.paired_rows.default,
        torch.ops.streamkl.mixture_rows.default,
        torch.ops.streamkl.train.default,
    }
    calls = []
    choose = ops.engines.choose
    monkeypatch.setattr(ops.engines, "choose", lambda *args: calls.append(args) or choose(*args))

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in passes else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(**arguments):
        def context_fn():
            return create_selective_checkpoint_contexts(policy)

        names = list(arguments)
        return checkpoint(
            lambda *values: attention_kl(**dict(zip(names, values, strict=True))),
            *arguments.values(),
            use_reentrant=False,
            context_fn=context_fn,
        )

    run(case)
    uncheckpointed, calls[:] = len(calls), []
    ours = run(case, checkpointed)
    assert len(calls) == uncheckpointed
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("path", PATHS)
def test_double_backward_raises(path: str) -> None:
    case = small(path, reduction="sum")
    leaves = {name: x.requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
    loss = attention_kl(**leaves, **case.options, teacher_lse=case.teacher_lse)
    (gradient,) = torch.autograd.grad(loss, [leaves["student_q"]], create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiated a second time"):
        gradient.sum().backward()


def test_lse_is_not_differentiated_but_can_be_given_to_the_loss() -> None:
    case = small("train")
    q, k = (case.tensors[name].requires_grad_() for name in TEACHER)
    lse = attention_lse(q, k, causal=True)
    with pytest.raises(RuntimeError, match="attention_lse is not differentiated"):
        lse.sum().backward()
    student = [case.tensors[name].requires_grad_() for name in STUDENT]
    attention_kl(q.detach(), k.detach(), *student, causal=True, teacher_lse=lse).backward()
    assert student[0].grad is not None


@pytest.mark.parametrize("path", PATHS)
def test_tensors_are_saved_where_hooks_see_them(path: str) -> None:
    """All that a backward needs goes through ``save_for_backward``, so offloading and leak checks work."""
    case = small(path, reduction="sum", wanted=STUDENT)
    leaves = {name: x.requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        loss = attention_kl(**leaves, **case.options, teacher_lse=case.teacher_lse)
    nodes = [loss.grad_fn]
    for node in nodes:
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    (ours,) = (node for node in nodes if "streamkl" in node.name())
    assert len(ours.saved_tensors) >= 2
    kept = [name for name, value in vars(ours).items() if isinstance(value, torch.Tensor)]
    assert not kept, f"tensors on ctx: {kept}"
    assert any(x.shape == leaves["student_q"].shape for x in packed)


def test_changing_an_input_in_place_before_the_backward_is_an_error() -> None:
    case = small("paired")
    leaves = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}
    student_q = leaves["student_q"] * 1
    loss = attention_kl(**{**leaves, "student_q": student_q})
    student_q.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_half_precision_gradients_survive_a_loss_scale_of_65536() -> None:
    """On the one-pass path gradients are computed before the upstream gradient is known: they must not be rounded."""
    case = small("train", dtypes=(torch.float16, torch.float16), tokens=(64, 64), student_scale=1e-3)
    leaves = {name: x.clone().requires_grad_(name in STUDENT) for name, x in case.tensors.items()}
    loss = attention_kl(**leaves, **case.options, teacher_lse=case.teacher_lse)
    unscaled = torch.autograd.grad(loss, [leaves[name] for name in STUDENT], retain_graph=True)
    scaled = torch.autograd.grad(loss, [leaves[name] for name in STUDENT], torch.tensor(65536.0), retain_graph=True)
    doubles = {name: x.detach().double().requires_grad_(name in STUDENT) for name, x in leaves.items()}
    exact = torch.autograd.grad(
        attention_kl(**doubles, **case.options, backend="reference"), [doubles[name] for name in STUDENT]
    )
    for name, ours, rounded_early, wanted in zip(STUDENT, scaled, unscaled, exact, strict=True):
        wanted = wanted * 65536
        error = (ours.double() - wanted).abs().max()
        assert error <= 2 * torch.finfo(torch.float16).eps * wanted.abs().max(), name
        assert error < 0.1 * (rounded_early.double() * 65536 - wanted).abs().max(), (
            "the test has no underflow to survive"
        )


def test_two_backwards_of_one_graph_agree() -> None:
    case = small("train", dtypes=(torch.bfloat16, torch.bfloat16))
    leaves = {name: x.requires_grad_(name in STUDENT) for name, x in case.tensors.items()}
    loss = attention_kl(**leaves, causal=True, teacher_lse=case.teacher_lse)
    first = torch.autograd.grad(loss, [leaves[n] for n in STUDENT], torch.tensor(4.0), retain_graph=True)
    second = torch.autograd.grad(loss, [leaves[n] for n in STUDENT], torch.tensor(4.0), retain_graph=True)
    third = torch.autograd.grad(loss, [leaves[n] for n in STUDENT], torch.tensor(2.0))
    for a, b, half in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, half * 2)


@pytest.mark.parametrize("frozen", STUDENT)
def test_one_student_tensor_may_be_frozen(frozen: str) -> None:
    for path in PATHS:
        case = small(path)
        both = run(case)
        case.wanted = tuple(name for name in STUDENT if name != frozen)
        assert torch.equal(run(case)[case.wanted[0]], both[case.wanted[0]])


def test_meta_tensors_get_their_shapes() -> None:
    q, k = torch.empty(2, 4, 9, 8, device="meta"), torch.empty(2, 2, 13, 8, device="meta")
    assert attention_kl(q, k, q, k, reduction="none").shape == (2, 4, 9)
    assert attention_lse(q, k).shape == (2, 4, 9)
    topk = torch.empty(2, 9, 5, dtype=torch.int64, device="meta")
    assert indexer_kl(q, k, q, k[:, 0], q[..., 0].mT, topk_indices=topk, reduction="none").shape == (2, 1, 9)


def test_a_float64_lse_beside_float32_keeps_its_digits() -> None:
    """At an offset of 5,000 a float32 LSE is off by 2e-4, and so would the probabilities be."""
    q, k = (torch.randint(-3, 4, (1, 2, 40, 8)).float() / 2 for _ in range(2))
    q[..., 0], k[..., 0] = 50.0, 100.0
    student = torch.randn(1, 2, 40, 8, requires_grad=True)
    options = {"teacher_scale": 1.0, "causal": True}
    lse = attention_lse(q.double(), k.double(), scale=1.0, causal=True)
    ours = attention_kl(q, k, student, student.detach(), teacher_lse=lse, **options)
    (gradient,) = torch.autograd.grad(ours, student)
    doubles = student.detach().double().requires_grad_()
    exact = attention_kl(q.double(), k.double(), doubles, doubles.detach(), backend="reference", **options)
    (exact_gradient,) = torch.autograd.grad(exact, doubles)
    assert (ours - exact).abs() < 1e-6
    assert (gradient - exact_gradient).abs().max() < 1e-7


@pytest.mark.parametrize(("globally", "given"), [(True, None), (True, False), (False, None), (False, True)])
def test_deterministic_algorithms_ask_for_a_deterministic_engine_unless_the_call_says(
    globally: bool, given: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, choose = [], engines.choose

    def recorded(backend, device, problem=None, function=None):
        asked.append(problem.deterministic)
        return choose(backend, device, problem, function)

    monkeypatch.setattr(engines, "choose", recorded)
    case, before = small("paired"), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(globally)
    try:
        run(case, deterministic=given)
    finally:
        torch.use_deterministic_algorithms(before)
    assert set(asked) == {globally if given is None else given}


def test_public_names() -> None:
    names = {"attention_kl", "attention_lse", "attention_mass", "indexer_kl", "topk_recall"}
    assert set(streamkl.__all__) == names | {"__version__"}


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_torch_func_are_refused_with_what_to_do(transform) -> None:
    q, k = torch.randn(1, 1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    loss = transform(lambda x: attention_kl(k, k, x, k, causal=True))
    message = r"streamkl: the transforms of torch\.func .* are not supported; .* backward"
    with pytest.raises(RuntimeError, match=message):
        loss(q if transform is torch.func.vmap else q[0])
