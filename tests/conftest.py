"""Fixtures shared by the tests: tiny random targets, drafters and trajectories, and a cache folder of their own."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

# Read when huggingface_hub is imported: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dblast.backbone import DBlastConfig
from dblast.drafter import DBlastDrafter
from dblast.targets import Target, wrap_target
from dblast.trajectories import Trajectory

VOCABULARY_SIZE, EOS_TOKEN_ID, MASK_TOKEN_ID = 40, 2, 3

# The models here are tiny: more threads only wait for each other, and very long where another process runs.
torch.set_num_threads(int(os.environ.get("DBLAST_TEST_THREADS", "1")))

SHAPE = dict(
    vocab_size=VOCABULARY_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=EOS_TOKEN_ID,
    # Large weights: at the default size every random model predicts nearly the same token everywhere.
    initializer_range=0.15,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files and the tests of each file where a seed is given, so that no test leans on an earlier one."""
    if seed := os.environ.get("DBLAST_TEST_ORDER_SEED"):
        chooser = random.Random(int(seed))
        files = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        # File by file: fixtures of a module are made once.
        order = list(files)
        chooser.shuffle(order)
        for path in order:
            chooser.shuffle(files[path])
        items[:] = [item for path in order for item in files[path]]


def seeded(seed: int, build: Callable):
    """Call ``build`` under a seed, leaving the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Give norms and biases values of their own, so that a test cannot pass by leaving them out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    """No test reads or fills the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DBLAST_CACHE", str(folder))
    monkeypatch.delenv("DBLAST_REGENERATE", raising=False)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", "<mask>"] + [f"w{i}" for i in range(4, VOCABULARY_SIZE)]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    randomise(model, seed=9)
    return model.float().eval()


@pytest.fixture(scope="session")
def llama(tokenizer) -> Target:
    """A random Llama target, tied head, no query/key norms."""
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    return wrap_target("llama", _frozen(seeded(1, lambda: LlamaForCausalLM(config))), tokenizer, MASK_TOKEN_ID)


@pytest.fixture(scope="session")
def qwen3(tokenizer) -> Target:
    """A random Qwen3 target: query/key norms, a head size of its own, an untied head, another RoPE base."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config = Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=False, rope_parameters=rope)
    return wrap_target("qwen3", _frozen(seeded(2, lambda: Qwen3ForCausalLM(config))), tokenizer, MASK_TOKEN_ID)


@pytest.fixture(scope="session")
def make_drafter() -> Callable[..., DBlastDrafter]:
    """Builds a random drafter attached to a target; K = 0 leaves the category heads out."""

    def build(target: Target, *, num_categories: int = 2, seed: int = 3, random_heads: bool = True, **settings):
        settings = dict(num_layers=2, block_length=3, mask_token_id=MASK_TOKEN_ID) | settings
        config = DBlastConfig.for_target(target.model.config, num_categories=num_categories, **settings)
        config.initializer_range = 0.15
        drafter = seeded(seed, lambda: DBlastDrafter(config)).eval()
        heads = [drafter.expander, drafter.prior] if num_categories else []
        before = [parameter.clone() for head in heads for parameter in head.parameters()]
        randomise(drafter, seed)
        if random_heads:
            generator = torch.Generator().manual_seed(seed)
            for head in heads:
                head.weight.data.normal_(std=0.3, generator=generator)
        else:
            for parameter, value in zip((p for head in heads for p in head.parameters()), before, strict=True):
                parameter.data.copy_(value)
        if config.draft_vocab_size:
            order = torch.randperm(VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed))
            drafter.set_draft_vocabulary(order[: config.draft_vocab_size].sort().values)
        return drafter.attach(target.model)

    return build


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    """Builds a trajectory of random tokens, log-probabilities and features."""

    def build(prompt: int = 4, response: int = 10, width: int = 64, seed: int = 0) -> Trajectory:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(4, VOCABULARY_SIZE, (prompt + response,), generator=generator)
        log_p = -2 * torch.rand(response, generator=generator)
        # Drawn from two tokens: itself, and one that takes the rest.
        support = torch.stack([tokens[prompt:], (tokens[prompt:] + 1) % VOCABULARY_SIZE], dim=-1)
        return Trajectory(
            prompt_id=f"random-{seed}",
            task="random",
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            log_p=log_p,
            entropy=torch.rand(response, generator=generator),
            p_max=torch.rand(response, generator=generator),
            support=support,
            support_log_p=torch.stack([log_p, torch.log1p(-log_p.exp())], dim=-1),
            features=torch.randn(prompt + response - 1, width, generator=generator).to(torch.bfloat16),
        )

    return build
