"""Learning curves as SVG, drawn by hand: small, and at home in any page."""

from __future__ import annotations

import math
from html import escape
from typing import Any

import numpy as np

from .curves import Line

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 56, 16, 34, 40


def draw_svg(lines: list[Line], title: str, target: float | None = None) -> str:
    """One panel, in the colours of the page around it."""
    xs = np.concatenate([line.x for line in lines] or [np.zeros(1)])
    values = [v for line in lines for v in (line.y, line.raw[1] if line.raw else line.y)]
    ys = np.concatenate([*values, [] if target is None else [target]])
    ys = ys[np.isfinite(ys)] if np.isfinite(ys).any() else np.zeros(1)
    x_ticks, y_ticks = ticks(0, float(xs.max())), ticks(float(ys.min()), float(ys.max()))
    low, high = min(float(ys.min()), y_ticks[0]), max(float(ys.max()), y_ticks[-1])
    wide = max(float(xs.max()), 1)
    px = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * np.asarray(x) / wide
    py = lambda y: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (np.asarray(y) - low) / ((high - low) or 1)
    out = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(title)} against batches" font-family="system-ui, sans-serif" font-size="11" '
        'fill="currentColor">',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    for t in y_ticks:
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(t):.1f}" y2="{py(t):.1f}" stroke="currentColor" '
            f'stroke-opacity=".12"/><text x="{LEFT - 8}" y="{py(t) + 4:.1f}" text-anchor="end" '
            f'opacity=".65">{t:g}</text>'
        )
    for t in x_ticks:
        out.append(
            f'<text x="{px(t):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle" opacity=".65">'
            f"{t:g}</text>"
        )
    out.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" opacity=".65">'
        "batch</text>"
    )
    if target is not None:
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(target):.1f}" y2="{py(target):.1f}" '
            'stroke="currentColor" stroke-opacity=".55" stroke-dasharray="5 4"/>'
            f'<text x="{LEFT + 4}" y="{py(target) + 13:.1f}" opacity=".75">'
            f"target {target:g}</text>"
        )
    for line in lines:
        if line.raw:
            out.append(_polyline(px, py, *line.raw, line, 'stroke-opacity=".22" stroke-width="1"'))
    for line in lines:
        out.append(_polyline(px, py, line.x, line.y, line, 'stroke-width="2.2" stroke-linejoin="round"'))
        if len(line.x) <= 40:
            out += [
                f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.6" fill="{line.color}">'
                f"<title>{escape(line.name)} batch {x:g}: {y:.4g}</title></circle>"
                for x, y in zip(line.x, line.y, strict=True)
                if np.isfinite(y)
            ]
    at = WIDTH - RIGHT
    for line in reversed([line for line in lines if line.name]):
        at -= 7 * len(line.name)
        out.append(
            f'<line x1="{at - 22}" x2="{at - 6}" y1="14" y2="14" stroke="{line.color}" stroke-width="3"/>'
            f'<text x="{at}" y="18">{escape(line.name)}</text>'
        )
        at -= 34
    return "".join(out) + "</svg>"


def _polyline(px: Any, py: Any, x: Any, y: Any, line: Line, style: str) -> str:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(px(x), py(y), strict=True) if np.isfinite(b))
    return f'<polyline points="{points}" fill="none" stroke="{line.color}" {style}/>'


def stack(panels: list[str]) -> str:
    """Panels below each other as one picture, on white."""
    placed = "".join(
        p.replace("<svg ", f'<svg y="{i * HEIGHT}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        for i, p in enumerate(panels)
    )
    size = f'width="{WIDTH}" height="{HEIGHT * len(panels)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} color="#1e293b"><rect {size} fill="white"/>'
    return f"{head}{placed}</svg>\n"


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers in a range."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
