"""Decoded text with the origin of every token told apart by colour, for terminals and notebooks."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from dblast.errors import DBlastError

if TYPE_CHECKING:
    from dblast.decoding import Generated
    from dblast.trees import Tree, TreeOutcome
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

VARIABLE = "DBLAST_PROGRESS"


#: Seconds between two updates of a bar; a batch run without a terminal sets it higher to keep its log short.
INTERVAL = "DBLAST_PROGRESS_SECONDS"


@contextmanager
def progress(total: int, description: str | None, unit: str = "step", initial: int = 0) -> Iterator[tqdm]:
    """A tqdm bar with rate and time left, on stderr or in the file that ``DBLAST_PROGRESS`` names; None hides it."""
    path = os.environ.get(VARIABLE)
    file = open(path, "a", encoding="utf-8") if path else sys.stderr  # noqa: SIM115
    try:
        with tqdm(
            total=total,
            desc=description,
            disable=description is None,
            unit=unit,
            unit_scale=total > 10_000,
            initial=initial,
            file=file,
            mininterval=float(os.environ.get(INTERVAL, 1.0)),
            dynamic_ncols=not path,
            ncols=100 if path else None,
        ) as bar:
            yield bar
    finally:
        if path:
            file.close()


@contextmanager
def quiet_loading(report: bool = True) -> Iterator[None]:
    """Hide the loading bars of transformers and datasets, which take a second here and fill notebooks.

    Args:
        report: False also hides what transformers logs about weights that do not fit, where the caller refuses them.
    """
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled(), datasets_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    datasets_logging.disable_progress_bar()
    if not report:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown[0]:
            transformers_logging.enable_progress_bar()
        if shown[1]:
            datasets_logging.enable_progress_bar()


#: Kind of token: (HTML background, ANSI code, what it is).
KINDS = {
    "accepted": ("#cdeed6", "32", "accepted draft token"),
    "replacement": ("#fbd0c9", "31;1", "replacement after a rejection"),
    "bonus": ("#cfe0fc", "34;1", "bonus token: the target's own, nothing was rejected"),
}


@dataclass(frozen=True)
class Piece:
    """Text of one token (of several, where a character spans them): what it is and which pass emitted it."""

    text: str
    kind: str
    step: int


@dataclass(frozen=True)
class BlockView:
    """Shown as HTML by a notebook, as ANSI colours by :meth:`ansi`, as bare text by ``str``."""

    pieces: tuple[Piece, ...]
    accepted_length: float
    passes: int

    @property
    def summary(self) -> str:
        """One line: tokens, passes, accepted length without the pass's own token."""
        return (
            f"{self.passes} target passes, accepted length {self.accepted_length:.2f} "
            f"({self.accepted_length + 1:.2f} tokens per pass)"
        )

    def __str__(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def ansi(self) -> str:
        """The text in terminal colours, then a legend."""
        text = "".join(f"\x1b[{KINDS[piece.kind][1]}m{piece.text}\x1b[0m" for piece in self.pieces if piece.text)
        legend = "  ".join(f"\x1b[{code}m{name}\x1b[0m" for name, (_, code, _) in KINDS.items())
        return f"{text}\n\n{legend}"

    def _repr_html_(self) -> str:
        spans = []
        for number, piece in enumerate(self.pieces):
            first = number == 0 or self.pieces[number - 1].step != piece.step
            edge = "border-left:2px solid #555;" if first else ""
            background, _, meaning = KINDS[piece.kind]
            spans.append(
                f'<span title="pass {piece.step + 1}: {meaning}" style="background:{background};{edge}">'
                f"{html.escape(piece.text)}</span>"
            )
        legend = " ".join(
            f'<span style="background:{background};padding:0 4px">{meaning}</span>'
            for background, _, meaning in KINDS.values()
        )
        return (
            '<div style="color:#111;background:#fff;padding:6px">'
            f'<div style="white-space:pre-wrap;line-height:1.6">{"".join(spans)}</div>'
            f'<div style="margin-top:6px;font-size:85%">{legend} &nbsp; {self.summary}</div></div>'
        )


def show_blocks(generated: Generated, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> BlockView:
    """Which tokens of a decoded sequence were drafted, and which are the target's own (Algorithm 1).

    Args:
        generated: result of :func:`dblast.decoding.generate`.
        tokenizer: the target's.
        row: which of its prompts.

    Returns:
        A view of the new tokens; leave it as the last value of a notebook cell to see it.

    Raises:
        DBlastError: there is no such row.
    """
    if not 0 <= row < len(generated.tokens):
        raise DBlastError(f"there is no row {row}; the result has rows 0..{len(generated.tokens) - 1}")
    steps, tokens = generated.steps[row], generated.tokens[row].tolist()
    kinds = [
        (kind, number)
        for number, step in enumerate(steps)
        for kind in ["accepted"] * (step.emitted - 1) + [step.ending]
    ]
    pieces, shown = [], ""
    for count, (kind, number) in enumerate(kinds, start=1):
        text = tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False)
        # A character whose bytes are not complete yet appears with the token that completes it.
        if text.endswith("\ufffd") and count < len(kinds):
            pieces.append(Piece("", kind, number))
            continue
        pieces.append(Piece(text[len(shown) :], kind, number))
        shown = text
    accepted = sum(step.accepted for step in steps)
    return BlockView(tuple(pieces), accepted / len(steps), len(steps))


#: Marks of a drawn tree: a node the target walked through, one it left aside, the token it drew itself.
WALKED, ASIDE, OWN = "●", "○", "⇒"


def show_tree(
    tree: Tree, tokenizer: PreTrainedTokenizerBase, row: int = 0, outcome: TreeOutcome | None = None
) -> str:
    """A draft tree as text, one node a line with its q_dep(u | y), likelier siblings first.

    Args:
        tree: from :func:`dblast.trees.draft_tree`.
        tokenizer: the target's.
        row: which of its anchors.
        outcome: of the walk along it; then the accepted path is marked, and the target's own token stands
            among the children of the last accepted node.

    Raises:
        DBlastError: there is no such row.
    """
    if not 0 <= row < len(tree.tokens):
        raise DBlastError(f"there is no row {row}; the tree has rows 0..{len(tree.tokens) - 1}")
    count = int(tree.valid[row].sum())
    tokens, parents = tree.tokens[row].tolist()[:count], tree.parent[row].tolist()[:count]
    weights = tree.log_weight[row].exp().tolist()
    path = [] if outcome is None else outcome.path[row].tolist()[: int(outcome.accepted[row])]
    lines = ["anchor"]

    def text(token: int) -> str:
        return repr(tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def branch(node: int, margin: str) -> None:
        # Nodes stand heaviest first, so children come out in that order.
        below: list[tuple[int | None, str]] = [
            (child, f"{WALKED if child in path else ASIDE} {text(tokens[child])} {weights[child]:.3f}")
            for child in range(count)
            if parents[child] == node
        ]
        if outcome is not None and node == (path[-1] if path else -1):
            below.append((None, f"{OWN} {text(int(outcome.token[row]))} drawn by the target"))
        for number, (child, line) in enumerate(below, start=1):
            last = number == len(below)
            lines.append(f"{margin}{'└─' if last else '├─'}{line}")
            if child is not None:
                branch(child, margin + ("  " if last else "│ "))

    branch(-1, "")
    if outcome is not None:
        lines.append(f"accepted {len(path)}, {count} nodes")
    return "\n".join(lines)
