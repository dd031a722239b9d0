"""The gallery: what each example says about itself, its picture and its code."""

from __future__ import annotations

import ast
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
TITLES = {
    "demo": "An endless stream (`make demo`)",
    "gru_copying": "Copy letters after a delay",
    "streaming_prediction": "Predict a series, with an update at every step",
    "streaming_agent": "An agent with memory in a T-maze",
    "char_lm": "Read and write, byte by byte",
    "alif_evidence": "Accumulate evidence with adaptive neurons",
    "spiking_digits": "Spiking neurons read digits",
    "sparse_ei": "A sparse network that obeys Dale's law",
    "conv_frontend": "Traces of a convolution",
    "lora_drift": "Adapt to drifting sensors with LoRA",
    "own_op": "An operation of your own",
    "own_rule": "A learning rule of your own",
}


def show() -> None:
    """Print a section for each example, as Markdown."""
    for name, title in TITLES.items():
        path = EXAMPLES / f"{name}.py"
        text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n    python")[0]
        picture = "../benchmarks/results/streams/demo.png" if name == "demo" else f"static/gallery/{name}.png"
        print(f"## {title}\n\n{text}\n\n![{title.replace('`', '')}]({picture})\n")
        print(f"<details><summary><code>examples/{name}.py</code></summary>\n")
        print(f"```{{literalinclude}} ../examples/{name}.py\n:language: python\n```\n\n</details>\n")
