"""Learning curves in a terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.text import Text

from .curves import Line, Runs, lines_of

COLORS = ("blue", "red", "green", "magenta", "yellow", "white")


def show_curves(runs: Runs, metric: str = "loss") -> None:
    """Print curves of one metric of several runs.

    Args:
        runs: Results of `fit`, by name.
        metric: The name of the metric. Default the loss.
    """
    if lines := lines_of(runs, metric):
        Console(highlight=False).print(draw_text(lines, metric))


def draw_text(lines: list[Line], title: str, width: int = 64, height: int = 10) -> Text:
    """Draw curves with Braille dots, two across and four down in a character.

    >>> print(draw_text([Line("a", 0, np.arange(3), np.arange(3.0))], "loss", width=4, height=2))
    loss  ── a
        2 ┤⠀⠀⡠⠊
        0 ┤⡠⠊⠀⠀
          └────
          0  2
    """
    xs = np.concatenate([line.x for line in lines])
    ys = np.concatenate([line.y for line in lines])
    low, high, wide = float(np.nanmin(ys)), float(np.nanmax(ys)), max(float(xs.max()), 1)
    dots = np.zeros((4 * height, 2 * width), int)
    owner = np.full((height, width), -1)
    for line in lines:
        column = np.arange(2 * width)
        y = np.interp(column * wide / (2 * width - 1), line.x, line.y, left=np.nan)
        before: int | None = None
        for c in column[np.isfinite(y)]:
            r = round((4 * height - 1) * (1 - (y[c] - low) / ((high - low) or 1)))
            last = r if before is None else before
            # a steep curve has no gaps
            for row in range(r, last, 1 if last > r else -1) if last != r else [r]:
                dots[row, c] = 1
                owner[row // 4, c // 2] = line.number
            before = r
    bits = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
    text = Text(title, style="bold")
    for line in lines:
        text.append("  ──", style=_color(line.number))
        text.append(f" {line.name}", style="not bold")
    for r in range(height):
        label = f"{high:.3g}" if r == 0 else f"{low:.3g}" if r == height - 1 else ""
        text.append(f"\n{label:>5} ┤", style="not bold dim")
        for c in range(width):
            cell = int((dots[4 * r : 4 * r + 4, 2 * c : 2 * c + 2] * bits).sum())
            style = _color(owner[r, c]) if owner[r, c] >= 0 else ""
            text.append(chr(0x2800 + cell), style=f"not bold {style}".strip())
    text.append(f"\n      └{'─' * width}", style="not bold dim")
    text.append(f"\n      {'0':<{width // 2}}{f'{wide:g}':>{width - width // 2}}", style="not bold dim")
    return text


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
