"""`braintrace tasks`: list the tasks, or describe one."""

from __future__ import annotations

import inspect
from argparse import Namespace
from typing import TYPE_CHECKING

from .options import UsageError, add_command, hint

if TYPE_CHECKING:
    from .options import Commands

ABOUT = """\
List the tasks, or describe one. None needs a download; some read data inside installed packages.

examples:
  braintrace tasks
  braintrace tasks copying
  braintrace train --task copying --set delay=50
"""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "tasks", "list the tasks, or describe one", ABOUT, run)
    parser.add_argument("task", nargs="?", help="the task to describe")


def run(given: Namespace) -> int:
    from .. import tasks

    if given.task is None:
        width = max(map(len, tasks.names()))
        for name in tasks.names():
            print(f"{name:{width}}  {tasks.summary(name)}")
        return 0
    check_name(given.task)
    options = inspect.signature(tasks.FACTORIES[given.task]).parameters.values()
    task = tasks.get(given.task)
    better = "or more" if task.higher_is_better else "or less"
    facts = {
        "sequences": f"{task.length} steps of {task.inputs} inputs{' (spikes)' if task.spiking else ''}",
        "outputs": f"{task.outputs}",
        "judged by": f"{task.metric_name}: chance {task.chance:.3g}, target {task.target:.3g} {better}",
        "test set": f"{task.test_size} sequences",
        "options": ", ".join(f"{o.name}={o.default}" for o in options) or "none",
        "reference": task.reference or "none",
    }
    print(f"{task.name}: {task.description}\n\n{inspect.getdoc(tasks.FACTORIES[given.task])}\n")
    for name, value in facts.items():
        print(f"{name:10}  {value}")
    return 0


def check_name(name: str) -> None:
    """Raise an error that suggests the closest name if a task is unknown."""
    from .. import tasks

    if name not in tasks.names():
        raise UsageError(f"There is no task {name!r}; {hint(name, tasks.names())}")
