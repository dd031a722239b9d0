"""The PyPI braintrace 0.2.6, in an environment and a process of its own.

Run by that environment's Python, this file is the process: it reads one request a line and answers each
with a line of JSON. `Yardstick` is the other end.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from nets import Case


class Yardstick:
    """Asks the process. A run in turns with our own goes through `run`, one request for each."""

    def __init__(self, python: str) -> None:
        # a folder of this repository on the path would hide the package under test
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [*shlex.split(python), __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"The yardstick's process ended, with status {self.process.wait()}.")
        return json.loads(line)

    def build(self, case: Case, names: list[str]) -> None:
        """Begin to compile; `receive` gives the costs by name, or an error."""
        self.send(what="build", case=asdict(case), names=names)

    def run(self, name: str) -> float:
        self.send(what="run", name=name)
        return float(self.receive())

    def about(self) -> Any:
        self.send(what="about")
        return self.receive()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a package prints goes elsewhere

    import brainstate
    import brainunit as u
    import measure

    class Neuron(brainstate.nn.Module):
        """A neuron of `brainpy.state`, with currents and voltages in mA and mV."""

        def __init__(self, name: str, size: int) -> None:
            super().__init__()
            import brainpy.state  # needs much that a GPU machine may lack

            self.neuron = getattr(brainpy.state, name)(size)

        def update(self, x: Any) -> Any:
            return self.neuron(x * u.mA)

    runs: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["what"] == "about":
            answer: Any = measure.about()
        elif request["what"] == "run":
            answer = runs[request["name"]]()
        else:
            runs.clear()
            answer = {}
            for name in request["names"]:
                try:
                    runs[name], answer[name] = measure.build(Case(**request["case"]), name, Neuron)
                except Exception as error:  # a release that this JAX no longer runs is a result as well
                    answer[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
