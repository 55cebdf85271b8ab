"""Five AdamW steps of the same folder on the same batches, here and in transformers with PyTorch."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from peer_results import load, torch
from tiny_models import gemma4, kimi_linear, mixtral, qwen3, qwen35

import moezoo
from moezoo.data import Batch
from moezoo.training.build import build_state, build_step

STEPS, ROWS, SEQ, VOCAB = 5, 8, 12, 40
RATE, BETAS, EPSILON, DECAY, CLIP = 0.02, (0.8, 0.95), 1e-6, 0.3, 0.5


class Case(NamedTuple):
    """A model, settings of its training here, and what they are in PyTorch.

    - `frozen`: parts of transformers' names of what is not trained;
    - `cosine`: warm-up of one step, then a half cosine; else one rate;
    - `balance`: the coefficient of the load-balance loss, as transformers defines it: over all layers together, and the
      number of experts per token times ours. So one layer is needed to compare;
    - `changes`: settings that no folder has;
    - `documents`: whether rows have two documents, which transformers' recurrent layers do not tell apart.
    """

    config: Any
    words: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    cosine: bool = False
    balance: float = 0.0
    documents: bool = True
    changes: Mapping[str, Any] = MappingProxyType({})


_CONSTANT = ("mesh=single", "schedule=constant", "schedule.warmup_steps=0")
CASES = {
    "mixtral, load balance": Case(
        mixtral(layers=1, load_balance=0.04),
        _CONSTANT,
        balance=0.02,
        documents=False,
    ),
    "qwen3": Case(
        qwen3(layers=2, mlp_layers=(), load_balance=0.0), ("mesh=single", "schedule.warmup_steps=1"), cosine=True
    ),
    "mixtral, frozen": Case(
        mixtral(load_balance=0.0),
        (
            "frozen=['*.experts.*', .embedding.weight, '*.attention.out', '*.attention_norm.scale']",
            "mesh=fsdp2_ep4",
            "schedule=constant",
            "schedule.warmup_steps=0",
        ),
        frozen=(".experts.", "embed_tokens", "o_proj", "input_layernorm"),
    ),
    "qwen3.5": Case(qwen35(load_balance=0.0), _CONSTANT, documents=False),
    # A layer with a window of 5 and one without, over 12 tokens; its tied table does not decay.
    "gemma4": Case(gemma4(), _CONSTANT),
    # In transformers choice biases stay as they are.
    "kimi linear": Case(
        kimi_linear(),
        _CONSTANT,
        documents=False,
        changes={"load_balance": 0.0, "router": dataclasses.replace(kimi_linear().router, bias_rate=0.0)},
    ),
}
# What decays of matrices in PyTorch by its number of dimensions, and multiplies no activations.
_NO_MATRIX = ("embed_tokens", "conv1d", "A_log")


def batches(documents: bool) -> list[Batch]:
    """Return a batch per step; each row is one document, or two that meet at another token in each row."""
    rng, found = np.random.default_rng(7), []
    for _ in range(STEPS):
        ids = rng.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
        at, places = np.arange(1, ROWS + 1)[:, None] * documents, np.arange(SEQ + 1)[None]
        second = places >= np.where(at, at, SEQ + 1)
        labels = np.where(second[:, 1:] == second[:, :-1], ids[:, 1:], -1).astype(np.int32)
        positions = np.where(second, places - at, places).astype(np.int32)
        found.append(Batch(ids[:, :-1], labels, second[:, :-1].astype(np.int32) + 1, positions[:, :-1]))
    return found


def train_in_pytorch(theirs: Any, case: Case, given: list[Batch]) -> tuple[list[float], list[float]]:
    """Return the cross-entropy and the norm of the gradient, before clipping, of each step."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    decays, others = [], []
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
        if parameter.requires_grad:
            is_matrix = parameter.ndim > 1 and not any(part in name for part in _NO_MATRIX)
            (decays if is_matrix else others).append(parameter)
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON)
    losses, norms = [], []
    for step, batch in enumerate(given):
        if case.cosine and step:
            rate = RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 1) / (STEPS - 2))) / 2)
            for group in optimizer.param_groups:
                group["lr"] = rate
        optimizer.zero_grad()
        tokens, labels, segments, positions = (torch.tensor(x).long() for x in batch)
        apart = (segments[:, :, None] != segments[:, None]) | torch.ones(SEQ, SEQ).triu(1).bool()
        mask = torch.zeros(apart.shape).masked_fill(apart, torch.finfo(torch.float32).min)[:, None]
        # It gives the logits of routers only without such a mask; the rows of that case are whole documents.
        more = {"output_router_logits": True} if case.balance else {"attention_mask": mask, "position_ids": positions}
        if case.config.sees_all and case.config.window:  # layers of both kinds
            outside = torch.ones(SEQ, SEQ).tril(-case.config.window).bool()
            window = mask.masked_fill(outside, torch.finfo(torch.float32).min)
            more["attention_mask"] = {"full_attention": mask, "sliding_attention": window}
        out, balance = theirs(tokens, **more), 0.0
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        if case.balance:
            balance = case.balance * load_balancing_loss_func(out.router_logits, num_experts=8, top_k=2)
        (loss + balance).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(decays + others, CLIP)))
        losses.append(float(loss))
        optimizer.step()
    return losses, norms


# The parts of Kimi Linear and Gemma 4 are in the steps of the parity suite and in the gradients of their tiny models.
# So are those of Qwen3.5, and frozen arrays, which run each week.
MARKS = {"kimi linear": pytest.mark.full, "gemma4": pytest.mark.full}
MARKS |= {"qwen3.5": pytest.mark.weekly, "mixtral, frozen": pytest.mark.weekly}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_five_steps(save, name):
    case = CASES[name]
    folder, given = save(case.config).folder, batches(case.documents)
    rule = dict(learning_rate=RATE, beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, weight_decay=DECAY, clip_norm=CLIP)
    words = [f"optimizer.{key}={value}" for key, value in rule.items()]
    sizes = (f"steps={STEPS}", f"batch_size={ROWS}", f"seq_len={SEQ}", "dispatch=gather")
    cfg = moezoo.compose(*case.words, *words, *sizes)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(case.config, z_loss=0.0, **case.changes))
    execution = moezoo.execution(cfg)
    step = build_step(cfg, execution)
    loaded = moezoo.from_pretrained(folder, execution, "float32")
    # A folder does not have the coefficient of the z-loss, among others; the step's model has that of the case.
    model = jax.tree.unflatten(jax.tree.structure(step.arguments[0].model), jax.tree.leaves(loaded))
    state = build_state(cfg, execution, step, model)
    run, feed, losses, norms = step.compile(), step.feed(), [], []
    for batch in given:
        state, metrics = run(state, feed(Batch(*(x[None] for x in batch))))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.gradient_norm))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        wanted = train_in_pytorch(load(folder), case, given)
    np.testing.assert_allclose(losses, wanted[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(norms, wanted[1], rtol=2e-4)
    assert max(norms) > CLIP  # some are clipped
    assert np.ptp(losses) > 0.05
