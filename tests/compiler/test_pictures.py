"""Pictures of graphs: the tree, the drawing, the page, and what they say that traces cost."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import warnings
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace._report.pictures.boxes import make_boxes
from braintrace._report.pictures.diagram import read_diagram
from braintrace._report.pictures.placement import place_boxes
from braintrace._report.pictures.sizes import trace_sizes
from tests.run import as_args
from tests.zoo import CASES


class Net(brainstate.nn.Module):
    """Two layers, the first with a loop, a branch and a state that it carries, and a plain readout."""

    def __init__(self) -> None:
        super().__init__()
        zeros = lambda *shape: jnp.zeros(shape)
        self.w, self.a, self.b = (brainstate.ParamState(zeros(3, 4)) for _ in range(3))
        self.u, self.v = brainstate.ParamState(zeros(4, 4)), brainstate.ParamState(zeros(4, 4))
        self.tau, self.out = brainstate.ParamState(zeros(4)), brainstate.ParamState(zeros(4, 2))
        self.h, self.g = brainstate.HiddenState(zeros(2, 4)), brainstate.HiddenState(zeros(2, 4))
        self.mean = brainstate.LongTermState(zeros(2, 4))

    def update(self, x: Any) -> Any:
        y = jax.lax.scan(
            lambda c, s: (c + bt.matmul(x * s, self.w.value), None), jnp.zeros((2, 4)), jnp.ones(5)
        )
        one, other = (lambda x, w=w: bt.matmul(x, w.value) for w in (self.a, self.b))
        y = y[0] + jax.lax.cond(x.sum() > 0, one, other, x) + bt.matmul(self.h.value, self.u.value)
        self.h.value = self.tau.value[None] * self.h.value + y
        self.mean.value = 0.9 * self.mean.value + 0.1 * self.h.value
        self.g.value = 0.5 * self.g.value + bt.matmul(self.h.value - self.mean.value, self.v.value)
        return self.g.value @ self.out.value


def graph_of(model: Any, *args: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return bt.compile_etrace_graph(model, *args)


@pytest.fixture(scope="module")
def graph() -> Any:
    return graph_of(Net(), jnp.ones((2, 3)))


@pytest.fixture(scope="module")
def report(graph: Any) -> Any:
    return bt.CompilationReport(graph)


def test_edges_say_what_feeds_what(report):
    diagram = read_diagram(report)
    names = {f"site:{b.site.index}": ".".join(next(iter(b.params))) for b in diagram.of("site")}
    edges = {(names.get(e.source, e.source), names.get(e.target, e.target), e.past) for e in diagram.edges}
    assert {(s, t) for s, t, past in edges if not past} == {
        *(("input:0", w) for w in "wab"),
        *((w, "group:0") for w in "wabu"),
        *((s, t) for s in ("group:0",) for t in ("state:mean", "v")),
        ("v", "group:1"),
        ("group:1", "plain:0"),
        ("plain:0", "output:0"),
    }
    assert {(s, t) for s, t, past in edges if past} == {("group:0", "u"), ("state:mean", "v")}
    assert list(diagram.boxes["group:0"].params) == [("tau",)]  # reaches the state without a mark
    dropped = {(e.source, names.get(e.target)) for e in diagram.edges if e.dropped}
    assert ("group:0", "u") in dropped
    assert ("input:0", "w") not in dropped


def test_tree(graph, report, capsys):
    text = graph.explain()
    assert text == report.to_str()
    lines = text.splitlines()
    group = next(i for i, line in enumerate(lines) if "group 0" in line)
    assert "h f64[2,4]" in lines[group]
    assert re.search(
        r"matmul w  f64\[3,4\] -> f64\[2,4\]  all_direct  x5 in a loop  trace \S+ \S+  test_pic", text
    )
    assert "in a branch" in text
    assert re.search(r"out  f64\[4,2\]  used by no marked op", text)
    assert "carried, not traced" in text
    assert str(report.exactness).splitlines()[0] in text
    report.show()
    assert capsys.readouterr().out == text + "\n"  # plain, where there is no terminal


def test_objects_print_in_a_line(graph, report):
    assert str(report) == str(graph) == report.to_str()
    assert repr(graph) == "<ETraceGraph of Net: 2 groups, 5 of 7 parameters learned online>"
    assert repr(report).startswith(
        "<CompilationReport of Net: 2 groups, 5 of 7 parameters learned online; D_RTRL"
    )
    info = graph.module_info
    several = (info, *info.entries, *info.hidden, info.program, *info.program.nodes, report.exactness)
    for one in (*several, *graph[1], *graph[3], graph.hidden_perturb):
        assert "\n" not in repr(one)
        assert len(repr(one)) < 300


def test_units_and_learner(capsys):
    with warnings.catch_warnings(action="ignore"):
        learner = bt.D_RTRL(Net())
        assert learner._repr_html_() is None
        learner.compile_graph(jnp.ones((2, 3)))
    learner.show_graph()
    assert "group 1" in capsys.readouterr().out
    assert learner._repr_html_().startswith("<iframe srcdoc=")


def test_drawing(graph, tmp_path):
    text = graph.to_svg(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text(encoding="utf-8") == text
    root = ET.fromstring(text)
    keys = [g.attrib["data-key"] for g in root.iter() if "data-key" in g.attrib]
    assert len(keys) == len(set(keys))
    sites, groups = len(graph.module_info.program.sites), len(graph.hidden_groups)
    assert sorted(k for k in keys if k.startswith("site:")) == [f"site:{i}" for i in range(sites)]
    assert sorted(k for k in keys if k.startswith("group:")) == [f"group:{i}" for i in range(groups)]
    edges = [g for g in root.iter() if "data-from" in g.attrib]
    assert {g.attrib[end] for g in edges for end in ("data-from", "data-to")} <= set(keys)
    said = {t.text for t in root.iter() if t.tag.endswith("text")}
    assert {"×5", "branch", "w", "tau"} <= said


def stack(depth: int) -> Any:
    class Stack(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ws = [brainstate.ParamState(jnp.zeros((4, 4))) for _ in range(depth)]
            self.hs = [brainstate.HiddenState(jnp.zeros(4)) for _ in range(depth)]

        def update(self, x: Any) -> Any:
            for w, h in zip(self.ws, self.hs, strict=True):
                h.value = x = 0.5 * h.value + bt.matmul(x, w.value)
            return self.hs[0].value + x

    return Stack()


def test_nothing_lies_over_anything_else(report):
    deep = bt.CompilationReport(graph_of(stack(12), jnp.ones(4)))
    for one in (report, deep):
        placement = place_boxes(make_boxes(read_diagram(one)))
        for placed in placement.boxes:
            assert placed.x >= 0
            assert placed.x + placed.width <= placement.width
            assert placed.y >= 0
            assert placed.y + placed.height <= placement.height
            for other in placement.boxes:
                apart = (
                    placed.x + placed.width <= other.x
                    or other.x + other.width <= placed.x
                    or placed.y + placed.height <= other.y
                    or other.y + other.height <= placed.y
                )
                assert apart or placed is other
        for edge, points in placement.routes.items():
            ends = [b for b in placement.boxes if b.box.key in (edge.source, edge.target)]
            for (x0, y0), (x1, y1) in itertools.pairwise(points):
                for placed in placement.boxes:
                    crosses = (
                        min(x0, x1) < placed.x + placed.width
                        and max(x0, x1) > placed.x
                        and min(y0, y1) < placed.y + placed.height
                        and max(y0, y1) > placed.y
                    )
                    assert not crosses or placed in ends, (edge, placed.box.key)


def test_dot(graph):
    text = graph.to_dot()
    assert text.startswith("digraph")
    assert text.count("{") == text.count("}")
    assert '"site:0" -> "group:0"' in text
    assert '"group:1" -> "plain:0"' in text


class Loads(HTMLParser):
    """Collects whatever a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href", "srcset")]


def test_page_needs_nothing_else(graph, tmp_path):
    page = graph.to_html(tmp_path / "graph.html")
    assert (tmp_path / "graph.html").read_text(encoding="utf-8") == page
    loads = Loads()
    loads.feed(page)
    assert loads.found == []
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) == {"http://www.w3.org/2000/svg"}
    notes = json.loads(re.search(r"const notes = (\{.*\});", page)[1])
    site = dict(notes["site:0"])
    assert site["loop"] == "5 applications a step"
    assert "test_pictures.py" in site["line"]
    assert "ES_D_RTRL" in site
    assert "Approximate." in page


ODD = "<b>&\"'</script>"
odd_p = bt.register_primitive(ODD, lambda x, **weights: x @ weights[ODD], {ODD: "i,io->o"})


def test_names_cannot_break_out_of_a_page():
    class Odd(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, ODD, brainstate.ParamState(jnp.zeros((2, 2))))
            self.h = brainstate.HiddenState(jnp.zeros(2))

        def update(self, x: Any) -> Any:
            w = getattr(self, ODD).value
            self.h.value = 0.5 * self.h.value + bt.matmul(x, w) + odd_p(x, weights={ODD: w})
            return self.h.value

    graph = graph_of(Odd(), jnp.ones(2))
    ET.fromstring(graph.to_svg())
    page = graph.to_html()
    assert "<b>&" not in page
    assert page.count("</script>") == 1
    assert "Exact." in page


@pytest.mark.parametrize("name", ["lru_complex", "lstm", *list(CASES)[:: len(CASES) // 10]])
def test_sizes_are_those_of_the_traces(name):
    case = CASES[name]
    model, x = case.build(), as_args(case.x(np.random.RandomState(0)))
    found = {}
    for rule in (bt.D_RTRL, bt.ES_D_RTRL):
        with warnings.catch_warnings(action="ignore"):
            learner = rule(model)
            learner.compile_graph(*x)
        found[rule] = sum(
            v.value.nbytes for k, v in learner.etrace_states.items() if not k.startswith("steps")
        )
    sizes = trace_sizes(learner.graph).values()
    assert sum(s.d_rtrl for s in sizes) == found[bt.D_RTRL]
    assert sum(s.es_d_rtrl for s in sizes) == found[bt.ES_D_RTRL]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

PROBE = """<script>
const inside = (a, b) => a.x >= b.x - 1 && a.x + a.width <= b.x + b.width + 1;
const over = [...boxes.values()].flatMap(b => [...b.querySelectorAll("text")].filter(
  t => !inside(t.getBBox(), b.querySelector("rect.body").getBBox())).map(t => t.textContent));
boxes.get("site:0").dispatchEvent(new PointerEvent("pointerenter"));
document.title = JSON.stringify({over, lit: svg.classList.contains("lit"), note: note.textContent,
  on: [...boxes].filter(([k, b]) => b.classList.contains("on")).map(([k]) => k)});
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_page_in_a_browser(graph, tmp_path):
    page = tmp_path / "graph.html"
    page.write_text(graph.to_html().replace("</body>", PROBE), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    quiet = "--disable-background-networking --disable-component-update"
    done = subprocess.run(
        [
            CHROMIUM,
            *flags.split(),
            *quiet.split(),
            f"--user-data-dir={tmp_path / 'user'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        timeout=60,
        check=True,
    )
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout.decode())
    seen = json.loads(title[1])
    assert seen["over"] == []  # no label leaves its box
    assert seen["lit"]
    assert set(seen["on"]) == {"input:0", "site:0", "group:0"}
    assert "learned online" in seen["note"]


def test_rank_is_drawn():
    """What is followed in directions is learned online, in the drawing and in the words of the page."""
    learner = bt.D_RTRL(Net(), rank=2)
    with warnings.catch_warnings(action="ignore"):
        learner.compile_graph(jnp.zeros((2, 3)))
    boxes = read_diagram(learner.report).boxes.values()
    assert all(b.online for b in boxes if b.kind in ("site", "plain") and ("tau",) in b.params)
    page = learner.report.to_html()
    assert "within the step only" not in page
    assert "followed in 2 of 12 directions" in page
