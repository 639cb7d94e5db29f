"""Mistakes in constructors that a type checker must report: each in a line that ends with the word. Never imported."""

from __future__ import annotations

from comlrl_lightning import IAC, MADPO, MAGRPO, MARLHF, SharedBase


def reward(*completions: list[str]) -> list[float]:
    """A reward."""
    return [0.0 for _ in completions[0]]


AGENTS = SharedBase("model", num_agents=2)

MAGRPO(AGENTS, reward, num_generations=4, discount=0.9, joint_mode="cross", seed=1)
MAGRPO(agents=3, reward_func=reward)  # mistake
MAGRPO(AGENTS, reward, num_generatons=4)  # mistake
MAGRPO(AGENTS, reward, num_generations="four")  # mistake
MAGRPO()  # mistake

IAC(AGENTS, reward, num_generations=4, discount=0.9, critic_type="q", seed=1)
IAC(agents=3, reward_func=reward)  # mistake
IAC(AGENTS, reward, num_generatons=4)  # mistake
IAC(AGENTS, reward, num_generations="four")  # mistake
IAC()  # mistake

MADPO(AGENTS, reward, num_candidates=4, beta=0.2, learning_epochs=2, seed=1)
MADPO(agents=3, reward_func=reward)  # mistake
MADPO(AGENTS, reward, num_canditates=4)  # mistake
MADPO(AGENTS, reward, num_candidates="four")  # mistake
MADPO()  # mistake

MARLHF(AGENTS, reward, num_generations=4, num_candidates=4, policy="IAC", seed=1)
MARLHF(agents=3, reward_func=reward)  # mistake
MARLHF(AGENTS, reward, num_generatons=4)  # mistake
MARLHF(AGENTS, reward, num_generations="four")  # mistake
MARLHF()  # mistake
