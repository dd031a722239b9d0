"""Networks that go from snnTorch and Norse to braintrace, learn online, and go back.

Each command runs in an environment of its own, with the package that it names:

    python benchmarks/nir_exchange.py record snntorch tests/nir/recorded    # write networks and their spikes
    python benchmarks/nir_exchange.py record norse tests/nir/recorded
    python benchmarks/nir_exchange.py learn tests/nir/recorded FOLDER       # braintrace: train online, save
    python benchmarks/nir_exchange.py run snntorch FOLDER                   # run them there again
    python benchmarks/nir_exchange.py run norse FOLDER
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np

STEPS = 200
# how each network is read: what the simulator computes
SETTINGS = {
    "snntorch_leaky": {"dt": 1e-4, "method": "euler"},
    "snntorch_subtract": {"dt": 1e-4, "method": "euler", "reset": "soft-delayed"},
    "snntorch_synaptic": {"dt": 1e-4, "method": "semi-implicit"},
    "snntorch_recurrent": {"dt": 1e-4, "method": "euler"},
    "snntorch_conv": {"dt": 1e-4, "method": "euler"},
    "norse_lif": {"dt": 1e-3, "method": "euler"},
    "norse_readout": {"dt": 1e-3, "method": "euler"},
}


def snntorch_nets():
    """Networks of snnTorch with the shape of their input."""
    import snntorch as snn
    import torch
    from torch.nn import AvgPool2d, Conv2d, Flatten, Linear, Sequential

    def leaky(*shape, beta, cell=snn.Leaky, output=False, **more):
        betas = {
            name: torch.full(shape, value) for name, value in {"beta": beta, **more.pop("alphas", {})}.items()
        }
        kind = {"reset_mechanism": "zero", "reset_delay": False, **more}
        return cell(**betas, threshold=torch.ones(shape), init_hidden=True, output=output, **kind)

    subtract = {"reset_mechanism": "subtract", "reset_delay": True}
    synaptic = {"cell": snn.Synaptic, "alphas": {"alpha": 0.7}}
    recurrent = {"cell": snn.RLeaky, "all_to_all": True, "linear_features": 20}
    ends = {"output": True, "beta": 0.8}
    return {
        "leaky": (Sequential(Linear(6, 20), leaky(20, beta=0.9), Linear(20, 8), leaky(8, **ends)), (6,)),
        "subtract": (
            Sequential(
                Linear(6, 20), leaky(20, beta=0.9, **subtract), Linear(20, 8), leaky(8, **ends, **subtract)
            ),
            (6,),
        ),
        "synaptic": (
            Sequential(
                Linear(6, 20), leaky(20, beta=0.9, **synaptic), Linear(20, 8), leaky(8, **ends, **synaptic)
            ),
            (6,),
        ),
        "recurrent": (
            Sequential(Linear(6, 20), leaky(20, beta=0.9, **recurrent), Linear(20, 8), leaky(8, **ends)),
            (6,),
        ),
        "conv": (
            Sequential(
                Conv2d(2, 4, 3, padding=1),
                leaky(4, 6, 6, beta=0.9),
                AvgPool2d((2, 2)),
                Flatten(),
                Linear(36, 5),
                leaky(5, **ends),
            ),
            (2, 6, 6),
        ),
    }


def norse_nets():
    """Networks of Norse with the shape of their input."""
    import norse.torch as norse
    import torch
    from torch.nn import Linear

    def lif(*shape, tau):
        values = {"tau_mem_inv": 1 / tau, "v_leak": 0.0, "v_th": 1.0, "v_reset": 0.0}
        return norse.LIFBoxCell(
            norse.LIFBoxParameters(**{k: torch.full(shape, v) for k, v in values.items()})
        )

    def readout(*shape, tau):
        values = {"tau_mem_inv": torch.full(shape, 1 / tau), "v_leak": torch.full(shape, 0.1)}
        return norse.LIBoxCell(norse.LIBoxParameters(**values))

    chain = norse.SequentialState
    return {
        "lif": (chain(Linear(6, 20), lif(20, tau=0.01), Linear(20, 8), lif(8, tau=0.005)), (6,)),
        "readout": (chain(Linear(6, 20), lif(20, tau=0.01), Linear(20, 3), readout(3, tau=0.02)), (6,)),
    }


def record(package: str, folder: Path) -> None:
    """Write the networks of a simulator, and their outputs for random spikes."""
    import nir
    import torch

    torch.manual_seed(0)
    for name, (net, shape) in {"snntorch": snntorch_nets, "norse": norse_nets}[package]().items():
        x = (torch.rand(STEPS, 1, *shape) < 0.3).float()
        with torch.no_grad():
            for layer in net.modules():
                if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
                    layer.weight *= 2 if package == "snntorch" else 16
        graph = export(package, net, x)
        y = simulate(package, net, x)[:, 0]
        nir.write(folder / f"{package}_{name}.nir", graph)
        np.savez_compressed(folder / f"{package}_{name}.npz", x=x[:, 0].numpy().astype(bool), y=y)
        print(f"{package}_{name}: mean output {y.mean():.3f}")


def export(package: str, net, x):
    if package == "snntorch":
        from snntorch.export_nir import export_to_nir

        return export_to_nir(net, x[0], ignore_dims=[0])
    from norse.torch.utils.export_nir import to_nir

    # Norse 1.1 multiplies time constants by `dt`
    return to_nir(net, x[0, 0], dt=1.0)


def simulate(package: str, net, x) -> np.ndarray:
    """The outputs of a network, one step after the other."""
    import torch

    state, ys = None, []
    with torch.no_grad():
        for layer in net.modules():
            if hasattr(layer, "reset_mem"):
                layer.reset_mem()
        for x_t in x:
            if package == "norse":
                y, state = net(x_t, state)
            else:
                y = net(x_t)
            ys.append(y[0] if isinstance(y, tuple) else y)
    return torch.stack(ys).numpy()


def learn(source: Path, folder: Path) -> None:
    """Train each network online with braintrace, save it, and record what it then does."""
    import brainstate
    import jax.numpy as jnp
    import optax

    import braintrace

    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in SETTINGS.items():
        if settings.get("reset", "hard") != "hard":
            continue  # NIR has no such reset, so that it could not be saved
        net = braintrace.nir.load(source / f"{name}.nir", **settings)
        xs = jnp.asarray(np.load(source / f"{name}.npz")["x"], jnp.float32)
        brainstate.nn.init_all_states(net)
        learner = braintrace.D_RTRL(net, window=10)
        learner.compile_graph(xs[0])
        # every second unit is to fire, the others are not
        target = jnp.arange(net.out_size[0]) % 2
        step = partial(lambda learner, target, x: jnp.mean((learner(x) - target) ** 2), learner, target)
        optimizer = optax.adam(1e-2)
        params = net.states(brainstate.ParamState)
        values = {key: param.value for key, param in params.items()}
        state, losses = optimizer.init(values), []
        for _ in range(30):
            brainstate.nn.init_all_states(net)
            learner.reset_state()
            grads, loss = learner.etrace_grad(xs, step_fn=step, return_value=True)
            changes, state = optimizer.update(dict(grads), state)
            values = optax.apply_updates(values, changes)
            for key, value in values.items():
                params[key].value = value
            losses.append(float(jnp.mean(loss)))
        braintrace.nir.save(net, folder / f"{name}.nir")
        brainstate.nn.init_all_states(net)
        y = brainstate.transform.for_loop(net, xs)
        np.savez_compressed(folder / f"{name}.npz", x=np.asarray(xs, bool), y=np.asarray(y))
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, mean output {float(y.mean()):.3f}")


def run(package: str, folder: Path) -> None:
    """Run the saved networks in a simulator, and compare."""
    import nir
    import torch

    for path in sorted(folder.glob(f"{package}_*.nir")):
        saved = np.load(path.with_suffix(".npz"))
        graph = nir.read(path)
        if path.stem == "norse_readout":
            print(f"{path.stem}: not run; Norse 1.1 writes LI nodes, but does not read them")
            continue
        if path.stem == "snntorch_recurrent":
            net = recurrent_of(graph)
        elif package == "snntorch":
            from snntorch.import_nir import import_from_nir

            net = import_from_nir(graph)
        else:
            import norse.torch as norse

            net = norse.from_nir(graph, dt=1e-3)
        # snnTorch writes a Flatten without the batch axis, and reads it back as if there were none
        y = simulate(package, net, torch.tensor(saved["x"]).float())
        print(f"{path.stem}: outputs differ by at most {np.abs(y - saved['y']).max():.2g} in {STEPS} steps")


def recurrent_of(graph):
    """The recurrent network of snnTorch, which writes cycles but does not read them, with these weights."""
    import torch

    net = snntorch_nets()["recurrent"][0]
    for name, layer in {"0": net[0], "1.w_rec": net[1].recurrent, "2": net[2]}.items():
        layer.weight.data = torch.tensor(graph.nodes[name].weight).float()
        layer.bias.data = torch.tensor(graph.nodes[name].bias).float()
    return net


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    if command == "learn":
        learn(*map(Path, args))
    else:
        {"record": record, "run": run}[command](args[0], Path(args[1]))
