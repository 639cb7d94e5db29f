"""From logits to tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from comlrl_lightning.agents.decoding import tokens as module
from comlrl_lightning.agents.decoding.tokens import StopStrings, pick, search, uniforms
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.utilities.rng import key_digest
from tests.tiny_lm import tiny_tokenizer

EVEN = (torch.arange(4_000, dtype=torch.float64) + 0.5) / 4_000


def shares(logits: Tensor, **settings: float | int) -> Tensor:
    """`[V]` share of each token over evenly spread draws, which leave no room for luck."""
    rows = logits.expand(len(EVEN), -1)
    tokens, _ = pick(rows, EVEN, Sampling(**settings))  # type: ignore[arg-type]
    return torch.bincount(tokens, minlength=logits.shape[-1]) / len(EVEN)


def test_uniforms_depend_on_their_key_alone() -> None:
    together = uniforms([(1, 2), (1, 3), (12,)], 5)
    assert together.dtype == torch.float64
    assert bool(((together >= 0) & (together < 1)).all())
    assert torch.equal(uniforms([(1, 3)], 3)[0], together[1, :3])
    assert len({tuple(row.tolist()) for row in together}) == 3


def test_keys_are_told_apart() -> None:
    keys = [(1, 23), (12, 3), (1, 2, 3), (123,), (-1, 23), (2**70,)]
    assert len({key_digest(key) for key in keys}) == len(keys)
    # Every machine must draw the same numbers: blake2b of "(1, 2)", 16 bytes, then Philox.
    assert uniforms([(1, 2)], 2).tolist() == [[0.7570426678707983, 0.4442707078033403]]


def test_the_global_random_state_is_left_alone() -> None:
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state(legacy=False)["state"]["key"].tolist()
    uniforms([(1,), (2,)], 10)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpy_state


@pytest.mark.parametrize("size", [5, 300, 1000, 4096 + 17])
def test_shares_follow_the_softmax_at_the_temperature(size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 3
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(-1)
        # Evenly spread draws miss a share by less than one draw at each of its two ends.
        assert float((shares(logits, temperature=temperature) - expected).abs().max()) < 2 / len(EVEN)


def test_random_draws_pass_a_chi_square_test() -> None:
    # 12 tokens, 11 degrees of freedom: 31.3 is exceeded by chance once in a thousand; the draws are fixed.
    logits = torch.linspace(-1, 1, 12)
    draws = uniforms([(3, sample) for sample in range(6000)], 1)[:, 0]
    tokens, _ = pick(logits.expand(6000, -1), draws, Sampling(temperature=0.7))
    expected = 6000 * (logits / 0.7).softmax(-1)
    counts = torch.bincount(tokens, minlength=12)
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3


def test_tokens_of_probability_zero_never_come() -> None:
    weights = torch.zeros(4, 1000)
    weights[:, [3, 700]] = 1.0
    draws = torch.tensor([0.0, 0.5, 0.4999999, 1.0], dtype=torch.float64)
    assert search(weights, draws).tolist() == [3, 700, 3, 700]
    tiny = torch.zeros(2, 1000)
    tiny[:, 999] = 1e-30
    assert search(tiny, draws[:2]).tolist() == [999, 999]


def test_log_probabilities_are_those_of_the_full_distribution() -> None:
    # logits (1, 0) at temperature 0.5: log-probabilities (-.126928, -2.126928).
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    draws = torch.tensor([0.1, 0.95], dtype=torch.float64)
    tokens, log_probs = pick(logits, draws, Sampling(temperature=0.5))
    assert tokens.tolist() == [0, 1]
    torch.testing.assert_close(log_probs, torch.tensor([-0.126928, -2.126928]))
    _, truncated = pick(logits, draws, Sampling(temperature=0.5, top_k=1))
    torch.testing.assert_close(truncated, torch.tensor([-0.126928, -0.126928]))


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    tokens, log_probs = pick(logits, torch.full((2,), 0.99, dtype=torch.float64), Sampling(temperature=0))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1))


def test_banned_tokens_do_not_come() -> None:
    logits, banned = torch.tensor([[5.0, 1.0, 0.0]]), torch.tensor([0])
    for settings in (Sampling(temperature=0), Sampling(), Sampling(top_p=0.5), Sampling(top_k=1)):
        tokens, log_probs = pick(logits, torch.tensor([0.1], dtype=torch.float64), settings, banned)
        assert tokens.tolist() == [1]
        torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, 1])


def test_nucleus() -> None:
    # (.5, .3, .2) with top_p .7 keeps .5 and .3: shares .625 and .375; .5 exactly is enough for top_p .5.
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    torch.testing.assert_close(shares(logits, top_p=0.7), torch.tensor([0.0, 0.625, 0.375]), rtol=0, atol=5e-4)
    torch.testing.assert_close(shares(logits, top_p=0.45), torch.tensor([0.0, 1.0, 0.0]))


def test_top_k_then_nucleus() -> None:
    # top_k=2 leaves .5 and .3, that is .625 and .375; top_p .6 is reached by the first alone.
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    torch.testing.assert_close(shares(logits, top_k=2), torch.tensor([0.0, 0.625, 0.375]), rtol=0, atol=5e-4)
    torch.testing.assert_close(shares(logits, top_k=2, top_p=0.6), torch.tensor([0.0, 1.0, 0.0]))
    torch.testing.assert_close(shares(logits, top_k=99), torch.tensor([0.2, 0.5, 0.3]), rtol=0, atol=5e-4)


def test_a_nucleus_larger_than_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(800, generator=torch.Generator().manual_seed(1))
    wide = shares(logits, top_p=0.9)
    assert int((wide > 0).sum()) > 300
    monkeypatch.setattr(module, "NUCLEUS", 100)
    assert torch.equal(shares(logits, top_p=0.9), wide)
    # The kept tokens are the most likely ones, in their proportions.
    kept = wide > 0
    assert float(logits[kept].min()) >= float(logits[~kept].max())
    expected = logits.softmax(-1).masked_fill(~kept, 0)
    assert float((wide - expected / expected.sum()).abs().max()) < 2 / len(EVEN)


def test_stop_strings() -> None:
    tokenizer = tiny_tokenizer(add_bos=False)
    stop = StopStrings(("END", "é"), tokenizer)
    assert not stop.reached(tokenizer("some EN").input_ids)
    assert stop.reached(tokenizer("some END").input_ids)
    # A character of two bytes is there with its second byte.
    assert [stop.reached(tokenizer("xé").input_ids[:length]) for length in (1, 2, 3)] == [False, False, True]
    assert stop.cut("a é b END") == "a "
    assert stop.cut("nothing") == "nothing"
    assert StopStrings(("<eos>",), tokenizer).reached([1, 257])
