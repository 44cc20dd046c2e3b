"""Decoded text with the origin of every token told apart by colour, for terminals and notebooks."""

from __future__ import annotations

import html
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from transformers import PreTrainedTokenizerBase

from dblast.errors import DBlastError

if TYPE_CHECKING:
    from dblast.decoding import Generated
    from dblast.trees import Tree, TreeOutcome


#: Kind of token: (HTML background, ANSI code, marks around it where there are no colours, what it is).
KINDS = {
    "accepted": ("#cdeed6", "32", ("", ""), "accepted draft token"),
    "replacement": ("#fbd0c9", "31;1", ("[", "]"), "replacement after a rejection"),
    "bonus": ("#cfe0fc", "34;1", ("{", "}"), "bonus token: the target's own, nothing was rejected"),
}


@dataclass(frozen=True)
class Piece:
    """Text of one token (of several, where a character spans them): what it is and which pass emitted it."""

    text: str
    kind: str
    step: int


@dataclass(frozen=True)
class BlockView:
    """Shown as HTML by a notebook, as :meth:`text` on a terminal, in a pipe or a file, as bare text by ``str``."""

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
        legend = "  ".join(f"\x1b[{code}m{name}\x1b[0m" for name, (_, code, *_) in KINDS.items())
        return f"{text}\n\n{legend}"

    def marked(self) -> str:
        """The text with the target's own tokens between marks, then a legend: needs no colours.

        Space around a token stays outside its marks, so that words and lines stand as in the bare text.
        """
        parts = []
        for piece in self.pieces:
            word = piece.text.strip()
            before, after = piece.text.split(word, 1) if word else ("", piece.text)
            left, right = KINDS[piece.kind][2]
            # A token of white space alone keeps its marks where they would enclose nothing else.
            parts.append(f"{before}{left}{word}{right}{after}" if piece.text else "")
        legend = "  ".join(f"{left}{name}{right}" for name, (_, _, (left, right), _) in KINDS.items())
        return f"{''.join(parts)}\n\n{legend}"

    def text(self, stream: TextIO | None = None) -> str:
        """:meth:`ansi` for a terminal (default: stdout), unless ``NO_COLOR`` is set; else :meth:`marked`."""
        stream = sys.stdout if stream is None else stream
        return self.ansi() if stream.isatty() and not os.environ.get("NO_COLOR") else self.marked()

    def _repr_html_(self) -> str:
        spans = []
        for number, piece in enumerate(self.pieces):
            first = number == 0 or self.pieces[number - 1].step != piece.step
            edge = "border-left:2px solid #555;" if first else ""
            background, *_, meaning = KINDS[piece.kind]
            spans.append(
                f'<span title="pass {piece.step + 1}: {meaning}" style="background:{background};{edge}">'
                f"{html.escape(piece.text)}</span>"
            )
        legend = " ".join(
            f'<span style="background:{background};padding:0 4px">{meaning}</span>'
            for background, *_, meaning in KINDS.values()
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
