"""Pages that the library writes, in a real browser: no script errors, nothing cut off, zoom works."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --hide-scrollbars "
    "--disable-background-networking --disable-component-update --virtual-time-budget=3000 --dump-dom"
).split()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]

# The page under test is in a frame of a given width, from the same server, so that its inside can be read.
WATCHER = """<!doctype html><title>waiting</title>
<iframe id="page" style="width: WIDTHpx; height: 900px; border: 0"></iframe>
<script>
const frame = document.getElementById("page"), errors = [];
frame.addEventListener("load", () => setTimeout(() => {
  const win = frame.contentWindow, doc = frame.contentDocument, found = {errors: win.errors};
  const root = doc.documentElement;
  found.width = [root.scrollWidth, root.clientWidth];
  // an inner frame shows all of its content
  found.frames = [...doc.querySelectorAll("iframe")].map(f =>
    [f.contentDocument.documentElement.scrollHeight, f.clientHeight]);
  const inner = doc.querySelector("svg.etrace") ? doc :
    [...doc.querySelectorAll("iframe")].map(f => f.contentDocument).find(d => d.querySelector("svg.etrace"));
  if (inner) {
    const svg = inner.querySelector("svg.etrace"), press = kind =>
      (inner.querySelector(`[data-zoom="${kind}"]`).click(), svg.getBoundingClientRect().width);
    found.zoom = [press("fit"), press("in"), press("out"), press("out"), press("fit")];
  }
  document.title = JSON.stringify(found);
}, 300));
frame.src = "page.html";
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def look(tmp_path: Path) -> Iterator[Callable[[str, int], dict[str, Any]]]:
    """Open a page in a frame of so many pixels, and return what was seen."""
    server = http.server.ThreadingHTTPServer(("localhost", 0), partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def look(page: str, width: int) -> dict[str, Any]:
        catch = "<script>var errors = []; addEventListener('error', e => errors.push(e.message));</script>"
        (tmp_path / "page.html").write_text(re.sub("(?i)<!doctype html>", rf"\g<0>{catch}", page, count=1))
        (tmp_path / "watch.html").write_text(WATCHER.replace("WIDTH", str(width)))
        address = f"http://localhost:{server.server_port}/watch.html"
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'user'}", address]
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
        title = re.search(r"<title>(\{.*?\})</title>", done.stdout.decode())
        assert title, done.stderr.decode()[-2000:]
        return json.loads(title[1])

    yield look
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def defaults_of_users() -> Iterator[None]:
    with (
        brainstate.environ.context(precision=32),
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


def learner() -> Any:
    brainstate.random.seed(0)
    net = brainstate.nn.Sequential(bt.nn.GRUCell(2, 8), bt.nn.LSTMCell(8, 4), bt.nn.Linear(4, 1))
    return bt.compile(net, "d_rtrl", jnp.zeros((3, 2)), batch_size=3)


def graph_page(folder: Path) -> str:
    return learner().report.to_html()


def training_report(folder: Path) -> str:
    learning = learner()
    data = [(np.ones((5, 3, 2), "float32"), np.zeros((5, 3, 1), "float32"))] * 3
    step = lambda x, y: jnp.mean((learning(x) - y) ** 2)
    result = bt.fit(learning, data, step, optax.adam(1e-2), progress=False)
    return bt.write_report(folder / "r.html", {"GRU": result}, learning, title="A report").read_text()


def comparison_report(folder: Path) -> str:
    data = np.ones((5, 3, 2), "float32"), np.zeros((5, 3, 1), "float32")
    loss = lambda learner, x, y: jnp.mean((learner(x) - y) ** 2)
    found = bt.compare(learner().model, *data, loss, rules=["d_rtrl", "rtrl"])
    found.save(folder / "c.html")
    return (folder / "c.html").read_text()


def demo_report(folder: Path) -> str:
    demo = Path(__file__).parent.parent / "examples" / "demo.py"
    env = {**os.environ, "PYTHONPATH": str(demo.parent.parent)}
    command = [sys.executable, str(demo), "--quick", "--out", str(folder / "demo")]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return (folder / "demo" / "demo.html").read_text()


@pytest.mark.parametrize("make", [graph_page, training_report, comparison_report, demo_report])
def test_page(make: Callable[[Path], str], look: Any, tmp_path: Path) -> None:
    page = make(tmp_path)
    for width in (1400, 400):
        seen = look(page, width)
        assert seen["errors"] == []
        assert seen["width"][0] <= seen["width"][1], f"wider than {width} px"
        assert all(content <= shown + 1 for content, shown in seen["frames"]), seen["frames"]
        if "zoom" in seen:
            fit, larger, again, smaller, last = seen["zoom"]
            assert smaller < again < larger
            assert last == pytest.approx(fit)
    assert ("zoom" in seen) == (make in (graph_page, training_report))
