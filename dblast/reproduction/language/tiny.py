"""The tiny target: a small Llama-architecture model trained from scratch on the synthetic language."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from dblast.reproduction.language import synthetic
from dblast.reproduction.language.synthetic import Document

# Training seeds are strings ("train-…"), so documents drawn with a whole number are never trained on
# (short of drawing the same text twice).
HELD_OUT_SEED = 1_000


def tiny_config(**overrides) -> LlamaConfig:
    """Configuration of the tiny target (about 1.8 million parameters).

    Args:
        overrides: any `LlamaConfig` field, replacing the default.
    """
    fields = dict(
        vocab_size=len(synthetic.VOCABULARY),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=synthetic.PAD_TOKEN_ID,
        bos_token_id=synthetic.BOS_TOKEN_ID,
        eos_token_id=synthetic.EOS_TOKEN_ID,
        initializer_range=0.05,
    )
    return LlamaConfig(**(fields | overrides))


def pad_documents(documents: Sequence[Document]) -> torch.Tensor:
    """Token ids of the documents, padded on the right: `(documents, longest)`, int64."""
    rows = [torch.tensor(synthetic.encode(document.tokens)) for document in documents]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=synthetic.PAD_TOKEN_ID)


def document_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy over the tokens after the kind's tag, and how many there are.

    Args:
        model: a causal language model.
        ids: `(batch, length)` padded documents; padding is never predicted, and being on the
            right it is never attended to by a real token.

    Returns:
        The sum in nats (a scalar tensor) and the number of predicted tokens.
    """
    # Position 1 (the tag) gives the first prediction: the kind itself is not the language's to guess.
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, 1:]
    targets = ids[:, 2:]
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(),
                            ignore_index=synthetic.PAD_TOKEN_ID, reduction="sum")
    return total, int((targets != synthetic.PAD_TOKEN_ID).sum())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, documents: Sequence[Document], batch_size: int = 64) -> float:
    """Mean cross-entropy in nats per predicted token; comparable to `entropy_per_token`."""
    if not documents:
        raise ValueError("held_out_loss needs at least one document")
    training, ids = model.training, pad_documents(documents).to(model.device)
    model.eval()
    parts = [document_loss(model, batch) for batch in ids.split(batch_size)]
    model.train(training)
    return sum(total.item() for total, _ in parts) / sum(count for _, count in parts)


def learning_rate_factor(step: int, steps: int, warm_up: int) -> float:
    """Linear warm-up, then a cosine down to 5 % of the peak; `step` counts from 0."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def train_tiny_target(
    seed: int = 0,
    steps: int = 1_000,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    progress: Callable[[dict], None] | None = None,
    record_every: int = 100,
    config: LlamaConfig | None = None,
) -> tuple[LlamaForCausalLM, list[dict]]:
    """Train a tiny target on fresh documents; the same arguments give the same weights.

    The global random state is left as it was found.

    Args:
        seed: fixes the initial weights and the documents.
        steps: optimiser steps, at least 1.
        batch_size: documents per step.
        learning_rate: peak of the schedule (AdamW).
        progress: called with each new history row.
        record_every: steps between history rows (the last step always has one).
        config: another shape of model; `tiny_config()` by default.

    Returns:
        The model in evaluation mode, and rows `{step, loss, held_out_loss}` in nats per token.

    Raises:
        ValueError: if `steps`, `batch_size` or `record_every` is below 1.
    """
    if min(steps, batch_size, record_every) < 1:
        raise ValueError("steps, batch_size and record_every must be at least 1, got "
                         f"{steps}, {batch_size} and {record_every}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config or tiny_config())
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=learning_rate, betas=(0.9, 0.98))
    warm_up = max(1, min(100, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: learning_rate_factor(step, steps, warm_up))
    evaluation = synthetic.documents(128, HELD_OUT_SEED)
    history = []
    for step in range(1, steps + 1):
        # One seed per step, so that no document stream has to be stored to resume or to compare.
        batch = synthetic.documents(batch_size, f"train-{seed}-{step}")
        total, count = document_loss(model, pad_documents(batch))
        loss = total / count
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % record_every == 0 or step == steps:
            history.append(dict(step=step, loss=loss.item(), held_out_loss=held_out_loss(model, evaluation)))
            if progress:
                progress(history[-1])
    return model.eval(), history
