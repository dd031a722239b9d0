"""Agents that learn while they act: reinforcement learning in a stream, with a recurrent net.

Two kinds of traces meet here and are kept apart. The learner's traces are the influence of the parameters on
the hidden state, `dh[t]/dθ`; they give the gradient of a value or of a log-probability at each step.
Eligibility traces of returns are decayed sums of these gradients; the TD error of a step assigns credit to
them. `Agent` runs an algorithm (`ActorCritic`, `QRC`) over a learner of `braintrace.online` in environments
with gymnax's interface, as one compiled loop.
"""

from . import environments as environments
from .actor_critic import ActorCritic as ActorCritic
from .agent import Agent as Agent
from .agent import AgentState as AgentState
from .agent import Steps as Steps
from .modules import from_module as from_module
from .q_learning import QRC as QRC
