"""The drafter: DFlash's block backbone with DBLAST's category heads (section 4 of arXiv 2608.05448).

Shapes: B sequences, A anchors a sequence, N = B * A blocks, S context positions,
b draft positions, K categories, H hidden size, m tapped target layers.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from dblast.backbone import DBlastConfig, DraftLayer, RMSNorm, packed_mask, rotary
from dblast.chunked import chunked_log_q
from dblast.errors import ArtefactError, DBlastError
from dblast.show import quiet_loading
from dblast.targets import sha256_file

#: Keys and values of the context, one (keys, values) pair per layer, each (B, kv_heads, S, head_dim).
ContextCache = list[tuple[Tensor, Tensor]]

#: Logits (anchors * K * b * vocabulary) that :meth:`DBlastDrafter.log_q` computes in one piece: 32 MiB in float32.
PLAIN_LOGITS = 2**23
#: Logits that :meth:`DBlastDrafter.greedy_tokens` holds at once: 16 MiB, which the C library reuses (as in :mod:`dblast.chunked`).
GREEDY_LOGITS = 2**22


@dataclass
class DraftOutput:
    """What one drafter pass knows about its blocks.

    Attributes:
        branch_hidden: (N, K, b, H) hidden state of every branch and draft position (eq. 13).
        prior_logits: (N, K) category logits l_z.
    """

    branch_hidden: Tensor
    prior_logits: Tensor

    def log_prior(self, category_temperature: float = 1.0) -> Tensor:
        """log q(z | y) = log softmax(l / Z_T), (N, K) float32; Z_T = 0 puts all mass on the first largest logit."""
        return log_category_prior(self.prior_logits, category_temperature)


def most_likely(logits: Tensor) -> Tensor:
    """argmax over the last dimension, the first of equals. On a CPU by NumPy, whose loop is five times faster than torch's."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.detach().numpy().argmax(-1))


def log_category_prior(prior_logits: Tensor, category_temperature: float) -> Tensor:
    """log softmax(l / Z_T) over the last dimension; Z_T = 0 is argmax (eq. 5).

    Raises:
        DBlastError: negative category temperature.
    """
    if category_temperature < 0:
        raise DBlastError(f"category temperature must not be negative, got {category_temperature}")
    logits = prior_logits.float()
    if category_temperature == 0:
        winner = F.one_hot(logits.argmax(-1), logits.shape[-1])
        return torch.zeros_like(logits).masked_fill(winner == 0, float("-inf"))
    return (logits / category_temperature).log_softmax(-1)


class DBlastDrafter(PreTrainedModel):
    """A block drafter with K latent categories.

    The embedding table and the LM head are the target's own and frozen:
    :meth:`attach` borrows them, they are neither trained nor saved.

    Raises:
        DBlastError: from the constructor, for a configuration that cannot work.
    """

    config_class = DBlastConfig
    base_model_prefix = "dblast"
    main_input_name = "anchor_tokens"
    _supports_sdpa = True

    def __init__(self, config: DBlastConfig):
        super().__init__(config)
        config.check()
        h, k = config.hidden_size, config.num_categories
        self.fc = nn.Linear(len(config.target_layer_ids) * h, h, bias=False)
        self.hidden_norm = RMSNorm(h, config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(h, config.rms_norm_eps)
        if k:
            self.expander = nn.Linear(h, k * h)
            self.prior = nn.Linear(h, k)
        if config.draft_vocab_size:
            self.register_buffer("draft_token_ids", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self._borrowed: dict[str, Tensor] = {}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            # Branches that start equal stay equal, and a loaded backbone should be
            # barely perturbed: the expander starts small and random, the prior flat.
            std = self.config.initializer_range
            if module is getattr(self, "prior", None):
                std = 0.0
            elif module is getattr(self, "expander", None):
                std = std / self.config.hidden_size**0.5
            nn.init.normal_(module.weight, std=std) if std else nn.init.zeros_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)

    # -- the target's tables -------------------------------------------------------------------

    def attach(self, target: PreTrainedModel) -> DBlastDrafter:
        """Borrow the target's embedding table and LM head; returns self.

        Raises:
            DBlastError: hidden size, vocabulary or layer count does not fit the target.
        """
        ours, theirs = self.config, target.config
        for name, mine, its in (
            ("hidden size", ours.hidden_size, theirs.hidden_size),
            ("vocabulary", ours.vocab_size, theirs.vocab_size),
            ("number of target layers", ours.num_target_layers, theirs.num_hidden_layers),
        ):
            if mine != its:
                raise DBlastError(f"the drafter was made for a target with {name} {mine}, this target has {its}")
        embedding = target.get_input_embeddings().weight.detach()
        head = target.get_output_embeddings().weight.detach()
        return self.attach_tables(embedding, head)

    def attach_tables(self, embedding: Tensor, head: Tensor) -> DBlastDrafter:
        """Borrow bare tables, both (V, H); with a draft vocabulary only its rows of the head are kept."""
        dtype, device = self.fc.weight.dtype, self.fc.weight.device
        head = head.to(device=device, dtype=dtype)
        if self.config.draft_vocab_size:
            head = head[self.draft_token_ids]
            slot = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=device)
            slot[self.draft_token_ids] = torch.arange(len(self.draft_token_ids), device=device)
            self._borrowed["slot"] = slot
        self._borrowed["embedding"] = embedding.to(device=device, dtype=dtype)
        self._borrowed["head"] = head
        return self

    def _table(self, name: str) -> Tensor:
        if name not in self._borrowed:
            raise DBlastError("the drafter has no embedding table yet; call drafter.attach(target) first")
        return self._borrowed[name]

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Fix the tokens the drafter may propose, (draft_vocab_size,) target ids; all others have q = 0.

        Comes before :meth:`attach`, which must be called (again) afterwards.
        """
        if token_ids.numel() != self.config.draft_vocab_size or token_ids.unique().numel() != token_ids.numel():
            raise DBlastError(f"the draft vocabulary needs {self.config.draft_vocab_size} distinct token ids")
        if token_ids.min() < 0 or token_ids.max() >= self.config.vocab_size:
            raise DBlastError("a draft vocabulary token lies outside the target's vocabulary")
        self.draft_token_ids.copy_(token_ids)
        self._borrowed.clear()  # rows of the head cut for another vocabulary must not be read again

    def in_precision(self, precision: torch.dtype) -> torch.autocast:
        """Context in which this drafter's products run in ``precision``; float32 leaves everything as it is."""
        return torch.autocast(self.device.type, dtype=precision, enabled=precision != torch.float32)

    # -- the pass ------------------------------------------------------------------------------

    def context_cache(self, features: Tensor, positions: Tensor) -> ContextCache:
        """Keys and values of the committed prefix, layer by layer.

        Args:
            features: (B, S, m * H) tapped hidden states, concatenated over layers.
            positions: (B, S) true positions of those tokens.
        """
        context = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        cos_sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        return [layer.self_attn.keys_values(context, cos_sin) for layer in self.layers]

    def block_hidden(
        self, anchor_tokens: Tensor, anchor_positions: Tensor, context: ContextCache, mask: Tensor | None
    ) -> Tensor:
        """Hidden states h_0..h_b of packed blocks.

        Args:
            anchor_tokens, anchor_positions: (B, A).
            context: from :meth:`context_cache`.
            mask: (B, 1, A * (b + 1), S + A * (b + 1)) bool, True where attention is allowed; None allows all.

        Returns:
            (B, A, b + 1, H), after the final norm.
        """
        batch, anchors = anchor_tokens.shape
        size = self.config.block_size
        tokens = torch.full((batch, anchors, size), self.config.mask_token_id, device=anchor_tokens.device)
        tokens[..., 0] = anchor_tokens
        offsets = torch.arange(size, device=anchor_positions.device)
        positions = (anchor_positions.unsqueeze(-1) + offsets).flatten(1)
        x = F.embedding(tokens.flatten(1), self._table("embedding"))
        cos_sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = layer(x, cos_sin, layer_context, mask)
        return self.norm(x).view(batch, anchors, size, -1)

    def heads(self, hidden: Tensor) -> DraftOutput:
        """Category heads on (..., b + 1, H) block states (eq. 13): h_z = h + g_z(h), l = W h_0."""
        k, h = self.config.num_categories, self.config.hidden_size
        hidden = hidden.reshape(-1, self.config.block_size, h)
        slots = hidden[:, 1:]
        if k == 0:
            return DraftOutput(slots.unsqueeze(1), hidden.new_zeros(len(hidden), 1))
        shift = self.expander(slots).view(len(slots), -1, k, h).transpose(1, 2)
        return DraftOutput(slots.unsqueeze(1) + shift, self.prior(hidden[:, 0]))

    def forward(
        self,
        anchor_tokens: Tensor,
        anchor_positions: Tensor,
        features: Tensor,
        context_lengths: Tensor | None = None,
    ) -> DraftOutput:
        """One packed pass over many anchors: every block sees the context strictly before its anchor and itself.

        Args:
            anchor_tokens, anchor_positions: (B, A) token and position of each anchor.
            features: (B, S, m * H) tapped states of positions 0..S-1; may be longer than any anchor needs.
            context_lengths: (B,) number of real positions in ``features`` (default S).

        Returns:
            :class:`DraftOutput` over N = B * A blocks, sequence-major.
        """
        batch, length = features.shape[:2]
        positions = torch.arange(length, device=features.device).expand(batch, -1)
        context = self.context_cache(features, positions)
        mask = packed_mask(anchor_positions, length, self.config.block_size, context_lengths)
        return self.heads(self.block_hidden(anchor_tokens, anchor_positions, context, mask))

    # -- reading q -----------------------------------------------------------------------------

    def logits(self, branch_hidden: Tensor) -> Tensor:
        """(..., H), as (N, K, b, H), to float32 logits (..., V'), V' the draft vocabulary (or the target's)."""
        head = self._table("head")
        # Two dimensions: on a transposed 4-d input matmul falls into a batched product, ten times slower.
        flat = branch_hidden.reshape(-1, branch_hidden.shape[-1]) @ head.T
        return flat.view(*branch_hidden.shape[:-1], -1).float()

    def log_q(self, branch_hidden: Tensor, tokens: Tensor) -> Tensor:
        """log q_i(x_i | y, z) of given tokens.

        Large tables of logits are never held, neither here nor for the backward
        pass (:mod:`dblast.chunked`); small ones are faster in one piece.

        Args:
            branch_hidden: (N, K, b, H).
            tokens: (N, b) target token ids, or (N, b, W) for several at every position.

        Returns:
            (N, K, b) or (N, K, b, W) float32; -inf for tokens outside the draft vocabulary.
        """
        slots = self._borrowed["slot"][tokens] if self.config.draft_vocab_size else tokens
        index = slots.unsqueeze(1).expand(*branch_hidden.shape[:-1], *tokens.shape[2:])
        if branch_hidden.shape[:-1].numel() * len(self._table("head")) > PLAIN_LOGITS:
            flat = branch_hidden.reshape(-1, branch_hidden.shape[-1])
            rows = index.reshape(len(flat), *tokens.shape[2:])
            return chunked_log_q(flat, self._table("head"), rows).view(index.shape)
        logits = self.logits(branch_hidden)
        columns = index.clamp(min=0).view(*logits.shape[:-1], -1)
        log_q = logits.gather(-1, columns) - logits.logsumexp(-1, keepdim=True)
        return log_q.view(index.shape).masked_fill(index < 0, float("-inf"))

    def greedy_tokens(self, branch_hidden: Tensor) -> Tensor:
        """argmax_v q_i(v | y, z) as target ids: (N, K, b) (eq. 18)."""
        flat = branch_hidden.reshape(-1, branch_hidden.shape[-1])
        rows = max(1, GREEDY_LOGITS // len(self._table("head")))
        best = torch.cat([most_likely(self.logits(part)) for part in flat.split(rows)]).view(branch_hidden.shape[:-1])
        return self.draft_token_ids[best] if self.config.draft_vocab_size else best

    def category_parameters(self) -> int:
        """Number of parameters DBLAST adds: K * H^2 + 2 * K * H + K (Table 1)."""
        heads = [module for name, module in self.named_children() if name in ("expander", "prior")]
        return sum(p.numel() for module in heads for p in module.parameters())


def add_categories(backbone: DBlastDrafter, num_categories: int, seed: int) -> DBlastDrafter:
    """A copy of a (K = 0 or any K) drafter with fresh category heads for ``num_categories``.

    The heads are drawn from ``seed``; backbone weights and borrowed tables are those of ``backbone``.
    """
    if num_categories < 1:
        raise DBlastError(f"number of categories K must be at least 1, got {num_categories}")
    settings = backbone.config.to_dict() | {"num_categories": num_categories}
    config = DBlastConfig(**{key: value for key, value in settings.items() if key not in ("model_type",)})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = DBlastDrafter(config)
    state = {k: v for k, v in backbone.state_dict().items() if not k.startswith(("expander.", "prior."))}
    drafter.load_state_dict(state, strict=False)
    drafter.to(device=backbone.device, dtype=backbone.dtype)
    drafter._borrowed = dict(backbone._borrowed)
    return drafter


def load_dflash(path: str | Path, num_categories: int = 0, seed: int = 0) -> DBlastDrafter:
    """Load a public DFlash checkpoint (z-lab's format) as a drafter, K = 0, or with fresh category heads.

    Raises:
        DBlastError: the checkpoint is missing, or lacks or has extra parameters.
    """
    try:
        config = DBlastConfig.from_pretrained(path)
        config.num_categories = 0
        # Sizes that do not fit come back in the report, beside missing and unexpected names.
        drafter, info = DBlastDrafter.from_pretrained(
            path, config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise DBlastError(f"could not load a DFlash checkpoint from {path}: {str(error).splitlines()[0]}") from error
    names = {kind: sorted(info[f"{kind}_keys"])[:3] for kind in ("missing", "unexpected", "mismatched")}
    if any(names.values()):
        found = ", ".join(f"{kind} {some}" for kind, some in names.items() if some)
        raise DBlastError(f"{path} is not a DFlash checkpoint of this shape: {found}")
    return add_categories(drafter, num_categories, seed) if num_categories else drafter


MANIFEST, RECORD = "manifest.json", "training.json"


def check_checkpoint(folder: Path) -> Path:
    """Compare a checkpoint with its manifest; returns the folder.

    Raises:
        ArtefactError: a file is missing or its content is not the one that was written.
    """
    advice = "restore it with git, or make it again with `python -m dblast pretrain`"
    try:
        expected = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"the manifest in {folder} is missing or damaged ({type(error).__name__}); {advice}") from None
    for name in {"config.json", "model.safetensors", RECORD} | expected.keys():
        path = folder / name
        if not path.is_file() or sha256_file(path) != expected.get(name):
            raise ArtefactError(f"{path} is missing or damaged; {advice}")
    return folder


def write_checkpoint(drafter: DBlastDrafter, record: dict, folder: Path) -> Path:
    """Save a drafter in bfloat16 with its record and manifest; the folder appears whole or not at all.

    Args:
        record: JSON-like account of the training.

    Raises:
        DBlastError: the folder exists already.
    """
    if folder.exists():
        raise DBlastError(f"{folder} exists already; move it away, or choose another folder")
    scratch = folder.with_name(folder.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    with quiet_loading():
        copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(scratch)
    (scratch / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    hashes = {path.name: sha256_file(path) for path in sorted(scratch.iterdir())}
    (scratch / MANIFEST).write_text(json.dumps({"sha256": hashes}, indent=1), encoding="utf-8")
    os.replace(scratch, folder)
    return folder
