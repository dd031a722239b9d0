"""How the pages are built (`make docs`): their code runs, and the reference comes from docstrings."""

import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.util.inspect import stringify_signature

jax.config.update("jax_num_cpu_devices", 8)  # for the page on many devices

HERE = Path(__file__).parent
MADE = HERE / "_build" / "made"  # what the code on the pages writes
sys.path.insert(0, str(HERE.parent))

from docs import blocks  # noqa: E402

project, author, copyright = "braintrace", "braintrace developers", "braintrace developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
napoleon_use_rtype = False
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
copybutton_selector = "div:not(.output) > div.highlight > pre"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme, html_title = "furo", "braintrace"
html_static_path, html_css_files = ["static"], ["pages.css"]
html_extra_path = ["_build/made/pages"]
html_copy_source = html_show_sphinx = html_show_copyright = False

default_role = "py:obj"  # `code`, and a link where it is a name
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88


def run_page(app: Any, name: str, source: list[str]) -> None:
    source[0] = blocks.run(source[0], f"docs/{name}.md", MADE)


def write_math(display: str) -> Any:
    """Return a visitor that writes an equation as MathML, which browsers typeset without scripts."""

    def visit(writer: Any, node: Any) -> None:
        writer.body.append(convert(node.astext(), display=display))
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


def own_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any
) -> Any:
    """Modules are made by a metaclass, which hides the arguments of `__init__`."""
    if what != "class" or type(obj).__call__ is type.__call__ or not signature:
        return None
    args = inspect.signature(obj.__init__)
    args = args.replace(parameters=list(args.parameters.values())[1:])
    return stringify_signature(args, show_annotation=False, show_return_annotation=False), None


def setup(app: Any) -> dict[str, bool]:
    shutil.rmtree(MADE, ignore_errors=True)
    (MADE / "pages").mkdir(parents=True)
    app.add_html_math_renderer("mathml", (write_math("inline"), None), (write_math("block"), None))
    app.connect("source-read", run_page)
    app.connect("autodoc-process-docstring", to_rst, priority=400)  # before Napoleon
    app.connect("autodoc-process-signature", own_signature)
    return {"parallel_read_safe": True}  # each worker runs the code of its pages
