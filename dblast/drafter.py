"""The drafter: DFlash's block backbone with DBLAST's category heads (section 4 of arXiv 2608.05448).

Shapes: B sequences, A anchors a sequence, N = B * A blocks, S context positions,
b draft positions, K categories, H hidden size, m tapped target layers.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from dblast.backbone import DBlastConfig, DraftLayer, RMSNorm, packed_mask, rotary
from dblast.errors import ArtefactError, DBlastError
from dblast.sampling import SETTINGS, SamplingSettings
from dblast.support.checks import check_finite, check_number
from dblast.support.chunked import chunked_log_q, product_dtype
from dblast.support.files import MANIFEST, RECORD, check_manifest, json_value, write_manifest
from dblast.support.progress import quiet_loading
from dblast.targets import Target, shape_identity

#: Keys and values of the context, one (keys, values) pair per layer, each (B, kv_heads, S, head_dim).
ContextCache = list[tuple[Tensor, Tensor]]

#: Anchors of one sequence that attend in one packed row. The mask hides blocks from each other, but their attention
#: is computed all the same, and grows with this number.
ANCHORS_PER_ROW = 8
#: Logits (anchors * K * b * vocabulary) that :meth:`DBlastDrafter.log_q` computes in one piece: 32 MiB in float32.
PLAIN_LOGITS = 2**23
#: Logits that :meth:`DBlastDrafter.greedy_tokens` holds at once: 16 MiB, as :mod:`dblast.support.chunked` explains.
GREEDY_LOGITS = 2**22
#: Numbers of a head in another dtype that a CPU converts at once, 32 MiB in float32; a device takes eight times that.
CONVERTED_HEAD = 2**23
#: The borrowed tables: embedding (V, H), head (V', H), and the place of every target token in the draft vocabulary.
TABLES = ("target_embedding", "target_head", "draft_slot")


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
    """argmax over the last dimension, the first of equals. On a CPU by NumPy: its loop is five times faster."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    logits = logits.detach()
    # as_tensor: the argmax of one row is a number, not an array. NumPy has no bfloat16.
    return torch.as_tensor((logits.float() if logits.dtype == torch.bfloat16 else logits).numpy().argmax(-1))


def log_category_prior(prior_logits: Tensor, category_temperature: float) -> Tensor:
    """log softmax(l / Z_T) over the last dimension; 0 is argmax (eq. 5). DBlastError: Z_T below 0 or not finite."""
    check_number("the category temperature", category_temperature, least=0)
    logits = prior_logits.float()
    if category_temperature == 0:
        winner = F.one_hot(logits.argmax(-1), logits.shape[-1])
        return torch.zeros_like(logits).masked_fill(winner == 0, float("-inf"))
    return (logits / category_temperature).log_softmax(-1)


class DBlastDrafter(PreTrainedModel):
    """A block drafter with K latent categories.

    The embedding table and the LM head are the target's own and frozen: :meth:`attach` borrows them. They move
    between devices with the drafter, but stay in the target's dtype, are shared with the target where they can be,
    and are neither trained, copied nor saved. Products with the head run in the dtype of the drafter.

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
            self.register_buffer("draft_token_ids", torch.full((config.draft_vocab_size,), -1))
        for name in TABLES:
            self.register_buffer(name, None, persistent=False)
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

    def attach(self, target: Target | PreTrainedModel) -> DBlastDrafter:
        """Borrow the target's embedding table and LM head; returns self.

        Raises:
            DBlastError: hidden size, vocabulary or layer count does not fit the target, or the drafter remembers
                another one; of a bare model the tokenizer is not known and not compared.
        """
        model = target.model if isinstance(target, Target) else target
        config = self.config
        sizes = (config.hidden_size, config.vocab_size, config.num_target_layers)
        known = dict(zip(("hidden_size", "vocabulary", "target_layers"), sizes, strict=True))
        known |= config.target_identity or {}
        found = target.identity() if "tokenizer" in known and model is not target else shape_identity(model.config)
        for name in known:
            if known[name] != found.get(name, known[name]):
                made = f"{config.target_name or 'a target'} with {name.replace('_', ' ')} {known[name]}"
                raise DBlastError(f"the drafter was made for {made}, this target has {found[name]}")
        embedding = model.get_input_embeddings().weight.detach()
        return self.attach_tables(embedding, model.get_output_embeddings().weight.detach())

    def attach_tables(self, embedding: Tensor, head: Tensor) -> DBlastDrafter:
        """Borrow bare tables, both (V, H); with a draft vocabulary only its rows of the head are kept."""
        device = self.fc.weight.device
        if self.config.draft_vocab_size:
            if not self.draft_vocabulary_is_set:
                raise DBlastError("the draft vocabulary is not set; call drafter.set_draft_vocabulary(token_ids) first")
            head = head[self.draft_token_ids.to(head.device)]
            self.draft_slot = torch.full((self.config.vocab_size,), -1, device=device)
            self.draft_slot[self.draft_token_ids] = torch.arange(len(self.draft_token_ids), device=device)
        self.target_embedding, self.target_head = embedding.to(device), head.to(device)
        return self

    def _table(self, name: str) -> Tensor:
        table = getattr(self, f"target_{name}")
        if table is None:
            raise DBlastError("the drafter has no embedding table yet; call drafter.attach(target) first")
        return table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DBlastDrafter:
        """What ``.to()``, ``.half()``, ``.cuda()`` call: moves the borrowed tables and leaves their dtype alone."""
        tables = {name: getattr(self, name) for name in TABLES if getattr(self, name) is not None}
        self._buffers |= dict.fromkeys(tables)
        super()._apply(fn, recurse)
        for name, table in tables.items():
            # Whole numbers of the same size are never converted.
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[table.element_size()]
            setattr(self, name, fn(table.view(bits)).view(table.dtype))
        return self

    def __deepcopy__(self, memo: dict) -> DBlastDrafter:
        """A copy with weights of its own; the tables stay the target's."""
        memo |= {id(table): table for table in map(self._buffers.get, TABLES) if table is not None}
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    @property
    def draft_vocabulary_is_set(self) -> bool:
        """Whether the tokens that may be proposed are known: always, unless a draft vocabulary waits to be filled."""
        ids = getattr(self, "draft_token_ids", None)
        if ids is None:
            return True
        return bool(ids.min() >= 0 and ids.max() < self.config.vocab_size and ids.unique().numel() == ids.numel())

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Fix the tokens the drafter may propose, (draft_vocab_size,) target ids; all others have q = 0.

        Comes before :meth:`attach`, which must be called (again) afterwards.
        """
        if token_ids.numel() != self.config.draft_vocab_size or token_ids.unique().numel() != token_ids.numel():
            raise DBlastError(f"the draft vocabulary needs {self.config.draft_vocab_size} distinct token ids")
        if token_ids.min() < 0 or token_ids.max() >= self.config.vocab_size:
            raise DBlastError("a draft vocabulary token lies outside the target's vocabulary")
        self.draft_token_ids.copy_(token_ids)
        # Rows of the head cut for another vocabulary must not be read again.
        self.target_embedding = self.target_head = self.draft_slot = None

    def category_temperature(self, setting: str | SamplingSettings) -> float:
        """Z_T that calibration chose for a sampling setting, by name or value; 1, the prior as trained, if none did."""
        names = [name for name, known in SETTINGS.items() if setting in (name, known)]
        if isinstance(setting, str) and not names:
            raise DBlastError(f"unknown setting {setting!r}; known settings: {', '.join(SETTINGS)}")
        chosen = self.config.category_temperatures or {}
        return next((float(chosen[name]) for name in names if chosen.get(name) is not None), 1.0)

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
        x = F.embedding(tokens.flatten(1), self._table("embedding")).to(self.fc.weight.dtype)
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
        (batch, anchors), length = anchor_tokens.shape, features.shape[1]
        positions = torch.arange(length, device=features.device).expand(batch, -1)
        context = self.context_cache(features, positions)
        # Rows of a few anchors, the last of them repeated; those of one sequence share its context.
        rows = -(-anchors // ANCHORS_PER_ROW)
        chosen = torch.arange(rows * -(-anchors // rows), device=features.device).clamp(max=anchors - 1)
        tokens, places = (x[:, chosen].view(batch * rows, -1) for x in (anchor_tokens, anchor_positions))
        context = [tuple(part.repeat_interleave(rows, dim=0) for part in pair) for pair in context]
        lengths = None if context_lengths is None else context_lengths.repeat_interleave(rows)
        mask = packed_mask(places, length, self.config.block_size, lengths)
        hidden = self.block_hidden(tokens, places, context, mask).view(batch, len(chosen), self.config.block_size, -1)
        return self.heads(hidden[:, :anchors])

    # -- reading q -----------------------------------------------------------------------------

    def _head(self, hidden: Tensor) -> Iterator[Tensor]:
        """The head, (V', H), in the dtype of its product with ``hidden``; in pieces where a large one is converted."""
        head, dtype = self._table("head"), product_dtype(hidden, self._table("head"))
        limit = head.numel() if head.dtype == dtype else CONVERTED_HEAD * (1 if head.device.type == "cpu" else 8)
        return (part.to(dtype) for part in head.split(max(1, limit // head.shape[1])))

    def logits(self, branch_hidden: Tensor) -> Tensor:
        """(..., H), as (N, K, b, H), to float32 logits (..., V'), V' the draft vocabulary (or the target's)."""
        # Two dimensions: on a transposed 4-d input matmul falls into a batched product, ten times slower.
        flat = branch_hidden.reshape(-1, branch_hidden.shape[-1])
        parts = [flat @ head.T for head in self._head(flat)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return logits.view(*branch_hidden.shape[:-1], logits.shape[-1]).float()

    def drafts(self, tokens: Tensor) -> Tensor:
        """Which target ids can be drafted at all, bool in the shape of ``tokens``."""
        return self.draft_slot[tokens] >= 0 if self.config.draft_vocab_size else torch.ones_like(tokens, dtype=torch.bool)

    def log_q(self, branch_hidden: Tensor, tokens: Tensor) -> Tensor:
        """log q_i(x_i | y, z) of given tokens.

        Large tables of logits are never held, neither here nor for the backward
        pass (:mod:`dblast.support.chunked`); small ones are faster in one piece.

        Args:
            branch_hidden: (N, K, b, H).
            tokens: (N, b) target token ids, or (N, b, W) for several at every position.

        Returns:
            (N, K, b) or (N, K, b, W) float32; -inf for tokens outside the draft vocabulary.
        """
        head = self._table("head")
        slots = self.draft_slot[tokens] if self.config.draft_vocab_size else tokens
        index = slots.unsqueeze(1).expand(*branch_hidden.shape[:-1], *tokens.shape[2:])
        if branch_hidden.shape[:-1].numel() * len(head) > PLAIN_LOGITS:
            flat = branch_hidden.reshape(-1, branch_hidden.shape[-1])
            rows = index.reshape(len(flat), *tokens.shape[2:])
            return chunked_log_q(flat, head, rows).view(index.shape)
        logits = self.logits(branch_hidden)
        columns = index.clamp(min=0).view(*logits.shape[:-1], *(tokens.shape[2:] or (1,)))
        log_q = logits.gather(-1, columns) - logits.logsumexp(-1, keepdim=True)
        return log_q.view(index.shape).masked_fill(index < 0, float("-inf"))

    def greedy_tokens(self, branch_hidden: Tensor) -> Tensor:
        """argmax_v q_i(v | y, z) as target ids: (N, K, b) (eq. 18); DBlastError where a logit is NaN or +inf."""
        flat = branch_hidden.detach().reshape(-1, branch_hidden.shape[-1])
        best = torch.zeros(len(flat), dtype=torch.long, device=flat.device)
        peak, start = torch.full(best.shape, float("-inf"), device=flat.device), 0
        for head in self._head(flat):
            rows = max(1, GREEDY_LOGITS // len(head))
            for part, best_part, peak_part in zip(flat.split(rows), best.split(rows), peak.split(rows), strict=True):
                logits = (part @ head.T).float()
                winner = most_likely(logits)
                value = logits.gather(1, winner.unsqueeze(1)).squeeze(1)
                # The first of equals, across pieces too.
                best_part.copy_(torch.where(value > peak_part, winner + start, best_part))
                torch.maximum(peak_part, value, out=peak_part)
            start += len(head)
        check_finite(peak, "the drafter's logits")  # NaN counts as the largest
        best = best.view(branch_hidden.shape[:-1])
        return self.draft_token_ids[best] if self.config.draft_vocab_size else best

    def category_parameters(self) -> int:
        """Number of parameters DBLAST adds: K * H^2 + 2 * K * H + K (Table 1)."""
        heads = [module for name, module in self.named_children() if name in ("expander", "prior")]
        return sum(p.numel() for module in heads for p in module.parameters())

    # -- making, saving and loading ------------------------------------------------------------

    def with_categories(self, num_categories: int, seed: int) -> DBlastDrafter:
        """A copy with fresh heads for K categories, drawn from ``seed``, in place of what heads there were.

        Raises:
            DBlastError: K below 1; a drafter without category heads is one to start from.
        """
        if num_categories < 1:
            raise DBlastError(f"number of categories K to add must be at least 1, got {num_categories}")
        config = copy.deepcopy(self.config)
        config.num_categories = num_categories
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            drafter = type(self)(config)
        state = {k: v for k, v in self.state_dict().items() if not k.startswith(("expander.", "prior."))}
        drafter.load_state_dict(state, strict=False)
        drafter.to(device=self.device, dtype=self.dtype)
        for name in TABLES:
            setattr(drafter, name, getattr(self, name))
        return drafter

    @classmethod
    def load(cls, path_or_id: str | Path, *, dtype: torch.dtype | None = None, revision: str = "main") -> DBlastDrafter:
        """A saved drafter, or a public DFlash checkpoint (z-lab's format, K = 0): a folder or a Hugging Face id.

        Args:
            dtype: None takes the stored one.
            revision: commit or tag on the hub.

        Raises:
            DBlastError: no drafter is there, or its configuration and weights do not fit each other or this class.
            ArtefactError: files are not those of the folder's manifest, where it has one, or weights are not finite.
        """
        return cls.from_pretrained(path_or_id, dtype=dtype or "auto", revision=revision).eval()

    @classmethod
    def from_pretrained(
        cls, path_or_id: str | Path, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> DBlastDrafter | tuple[DBlastDrafter, dict]:
        """What transformers calls :meth:`load`, with its options and the same refusals; safetensors alone are read."""
        folder, advice = Path(path_or_id), "give a saved drafter, or a DFlash checkpoint"
        if (folder / MANIFEST).is_file():
            check_manifest(folder)
        if folder.is_dir() and not any(folder.glob("*.safetensors")) and (pickles := sorted(folder.glob("*.bin"))):
            found = f"{pickles[0].name} is a pickle, which can run code: save it as model.safetensors"
            raise DBlastError(f"{folder} holds no drafter ({found}); {advice}")
        # What does not fit comes back in the report; otherwise it is a page of error, or only logged.
        kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        try:
            with quiet_loading(report=False):
                drafter, info = super().from_pretrained(path_or_id, *args, **kwargs)
        except DBlastError as error:
            raise type(error)(f"{path_or_id}: {error}") from None
        except (OSError, ValueError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            where = "" if folder.is_dir() else "no such folder, and none from the hub: "
            raise DBlastError(f"{path_or_id} holds no drafter ({where}{reason}); {advice}") from error
        for kind in ("missing", "unexpected", "mismatched"):
            if names := sorted(str(key[0] if isinstance(key, tuple) else key) for key in info[f"{kind}_keys"]):
                what = f"its config.json does not fit its weights: {kind} {', '.join(names[:3])}"
                raise DBlastError(f"{path_or_id} holds no drafter ({what}); {advice}")
        for name, value in drafter.state_dict().items():
            if not torch.isfinite(value).all():
                raise ArtefactError(f"{path_or_id} is damaged, or its training failed: {name} is not finite")
        return (drafter, info) if output_loading_info else drafter

    def save(self, folder: str | Path, record: dict | None = None, *, dtype: torch.dtype | None = None) -> Path:
        """Write a new folder for :meth:`load`, with a manifest; it appears whole or not at all.

        Args:
            record: JSON-like account of the training, written beside it.
            dtype: of the stored weights; None leaves them as they are.

        Raises:
            DBlastError: the folder exists already.
        """
        folder = Path(folder)
        if folder.exists():
            raise DBlastError(f"{folder} exists already; move it away, or choose another folder")
        scratch = folder.with_name(folder.name + ".part")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            with quiet_loading():
                copy.deepcopy(self).to(dtype or self.dtype).save_pretrained(scratch)
            if record is not None:
                (scratch / RECORD).write_text(json.dumps(json_value(record), indent=1), encoding="utf-8")
            write_manifest(scratch)
            os.replace(scratch, folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return folder
