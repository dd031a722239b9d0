"""How the pages are built (`make docs`): their code runs, and the reference comes from docstrings."""

import inspect
import json
import logging
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.ext.autodoc.preserve_defaults import update_defvalue
from sphinx.util.inspect import stringify_signature

HERE = Path(__file__).parent
MADE = HERE / "_build" / "made"  # files that the code on the pages writes
EXTRA = HERE / "_build" / "extra"  # files that pages link to
sys.path.insert(0, str(HERE.parent))

from docs import blocks  # noqa: E402

NOTEBOOKS = ("start", "tutorial_stream", "tutorial_spiking", "tutorial_rtrl")

project, author, copyright = "braintrace", "braintrace developers", "braintrace developers"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
napoleon_use_rtype = False
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
copybutton_selector = "div:not(.output) > div.highlight > pre"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme, html_title = "furo", "braintrace"
pygments_dark_style = "github-dark"
html_static_path, html_css_files, html_favicon = ["static"], ["pages.css"], "static/icon.svg"
html_extra_path = ["_build/extra"]
html_show_sphinx = html_show_copyright = html_show_sourcelink = False
html_copy_source = False
viewcode_line_numbers = True

default_role = "py:obj"  # `code`, and a link where it is a name
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

outputs: dict[str, list[str]] = {}


def run_pages(app: Any) -> None:
    """Run the code of all pages, and collect the pages and notebooks that the site links to."""
    names = {path.relative_to(HERE).with_suffix("").as_posix(): path for path in HERE.rglob("*.md")}
    texts = {name: path.read_text() for name, path in names.items() if not name.startswith("_build")}
    pages = {name: text for name, text in texts.items() if blocks.FENCE.search(text)}
    MADE.mkdir(parents=True, exist_ok=True)
    logging.getLogger("absl").setLevel(logging.WARNING)
    for (
        package
    ) in "braintrace.nn equinox flax.nnx haiku optax orbax.checkpoint nir matplotlib.pyplot".split():
        import_module(package)  # once, before the pages run in processes of their own
    outputs.update(blocks.run_all(pages, MADE))
    for path in MADE.rglob("*.html"):
        shutil.copy(path, EXTRA)
    for name in NOTEBOOKS:
        (EXTRA / f"{name}.ipynb").write_text(
            json.dumps(blocks.notebook(texts[name], outputs[name]), indent=1)
        )


def show_outputs(app: Any, name: str, source: list[str]) -> None:
    if name in outputs:
        source[0] = blocks.show(source[0], outputs[name])
    if name in NOTEBOOKS:
        title, rest = source[0].split("\n", 1)
        link = f'<a class="notebook" href="{name}.ipynb" download>Download as a notebook</a>'
        source[0] = f"{title}\n\n{link}\n{rest}"


def write_math(display: str) -> Any:
    """Return a visitor that writes an equation as MathML, which browsers typeset without scripts."""

    def visit(writer: Any, node: Any) -> None:
        math = convert(node.astext(), display=display)
        writer.body.append(f'<div class="equation">{math}</div>' if display == "block" else math)
        raise SkipNode

    return visit


def to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """In docstrings an indented paragraph is an equation, and outside of code a star is a star."""
    paragraphs = "\n".join(lines).split("\n\n")
    for i, text in enumerate(paragraphs):
        if text.startswith("    "):
            paragraphs[i] = f"::\n\n{text}"
        elif ">>>" not in text:
            parts = re.split(r"(`[^`]*`)", text)
            names = [re.fullmatch(r"`[A-Za-z_][\w.]*`", p) for p in parts]  # these may be links
            paragraphs[i] = "".join(
                p if name else f"`{p}`" if p.startswith("`") else p.replace("*", r"\*")
                for p, name in zip(parts, names, strict=True)
            )
    lines[:] = "\n\n".join(paragraphs).split("\n")


# long unions of brainstate, and values that have no short form
ARRAY_LIKE = "Array ndarray bool number bool int float complex Quantity"
SIZE = r"int Sequence\[int\] integer Sequence\[~?(?:\w+\.)*integer\]"
SHORTER = {
    r"<[^<>]*>": "...",
    r"(?<![\w.])Learner\b": "~braintrace.Learner",  # not the one of `braintrace.nnx`
    r"Union\[jax[^\]]*Quantity\]": "ArrayLike",
    " \\| ".join(rf"~?(?:\w+\.)*{t}" for t in ARRAY_LIKE.split()): "ArrayLike",
    " \\| ".join(rf"~?(?:\w+\.)*{t}" for t in SIZE.split()): "int | Sequence[int]",
}


def short_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any
) -> Any:
    """Shorten the types and defaults of a signature."""
    if not signature:
        return None
    if what == "class" and type(obj).__call__ is not type.__call__:
        # modules are made by a metaclass, which hides the arguments of `__init__`
        update_defvalue(app, obj.__init__, True)  # defaults as they are written, not their values
        args = inspect.signature(obj.__init__)
        args = args.replace(parameters=list(args.parameters.values())[1:])
        signature = stringify_signature(args, show_return_annotation=False, unqualified_typehints=True)
    for long, short in SHORTER.items():
        signature = re.sub(long, short, signature)
    return signature, returns


def setup(app: Any) -> dict[str, bool]:
    shutil.rmtree(EXTRA, ignore_errors=True)
    EXTRA.mkdir(parents=True)
    app.add_html_math_renderer("mathml", (write_math("inline"), None), (write_math("block"), None))
    app.connect("builder-inited", run_pages)
    app.connect("source-read", show_outputs)
    app.connect("autodoc-process-docstring", to_rst, priority=400)  # before Napoleon
    app.connect("autodoc-process-signature", short_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
