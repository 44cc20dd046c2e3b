"""A small chat model with a tokenizer and a chat template of its own: somebody's target, to try things on.

It speaks the synthetic language as a chat: the beginning of a text is the user's turn, the rest the answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dblast.errors import DBlastError
from dblast.reproduction.language import synthetic
from dblast.reproduction.language.tiny import learning_rate_factor
from dblast.support.progress import progress, quiet_loading

PAD, USER, ASSISTANT, END, UNUSED = SPECIALS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|reserved_0|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' if message['role'] == 'user' else '<|assistant|>' }}{{ "
    "message['content'] }}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def conversations(count: int, seed: int | str) -> list[tuple[str, str, str]]:
    """``count`` pairs of a user's turn and an answer, with their kind in front."""
    rows = []
    for document in synthetic.documents(count, seed):
        words = document.tokens
        rows.append(
            (document.kind, " ".join(words[2 : document.prompt_length]), " ".join(words[document.prompt_length : -1]))
        )
    return rows


def small_prompts(count: int, seed: int | str) -> list[dict]:
    """``count`` different prompts as lines of a prompt file: ``{"task": ..., "turns": [...]}``."""
    found: dict[str, dict] = {}
    rng = random.Random(seed)
    while len(found) < count:
        for kind, prompt, _ in conversations(64, rng.random()):
            found.setdefault(prompt, {"task": kind, "turns": [prompt]})
    return list(found.values())[:count]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most that size, with :data:`SPECIALS` and a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, UNUSED],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_small_target(
    folder: Path,
    *,
    family: str = "llama",
    vocabulary: int = 600,
    steps: int = 200,
    hidden: int = 96,
    layers: int = 4,
    batch: int = 32,
    texts: Iterable[str] = (),
    seed: int = 0,
) -> Path:
    """Train a target and save it with its tokenizer to ``folder`` (float32).

    Args:
        family: "llama" or "qwen3".
        vocabulary: rows of its embedding table.
        steps, batch: of training.
        texts: more text for the tokenizer, so that a large vocabulary can be filled.

    Raises:
        DBlastError: an unknown family.
    """
    if family not in FAMILIES:
        raise DBlastError(f"unknown family {family!r}; choose {' or '.join(FAMILIES)}")
    spoken = [f"{prompt} {answer}" for _, prompt, answer in conversations(2000, f"tokenizer-{seed}")]
    tokenizer = train_tokenizer([*spoken, *texts], vocabulary)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    _train(model, tokenizer, steps, seed, batch)
    with quiet_loading():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return Path(folder)


def _train(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int, batch: int) -> None:
    """Next-token training on fresh conversations; the loss counts answers only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, steps, max(1, steps // 10))
    )
    pad, unseen = tokenizer.pad_token_id, -100
    model.train()
    with progress(steps, "small target", unit="step") as bar:
        for step in range(steps):
            rows = []
            for _, prompt, answer in conversations(batch, f"small-{seed}-{step}"):
                head = tokenizer(f"{USER}{prompt}{END}{ASSISTANT}")["input_ids"]
                rows.append((head, tokenizer(f" {answer}{END}")["input_ids"]))
            width = max(len(head) + len(tail) for head, tail in rows)
            ids, wanted = torch.full((batch, width), pad), torch.full((batch, width), unseen)
            for i, (head, tail) in enumerate(rows):
                ids[i, : len(head) + len(tail)] = torch.tensor(head + tail)
                wanted[i, len(head) : len(head) + len(tail)] = torch.tensor(tail)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted[:, 1:].flatten(), ignore_index=unseen)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()
