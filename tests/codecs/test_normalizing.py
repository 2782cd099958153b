"""What codecs do to states before they code them."""

import torch
from codec_cases import TOKENS, encode, make

from hf_kvcache.attention.rows import token_scales
from hf_kvcache.codecs.centring import add_mean_scores, block_means, centre, fit_means, prepare_means
from hf_kvcache.codecs.rotation import rotation
from hf_kvcache.codecs.tile import even_channels


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_means_follow_a_drifting_text() -> None:
    drift = 2 * normal(2, 5, 1, 16, seed=1).clamp(-1, 1)
    states = 3 * normal(2, 1, 1, 16, seed=2) + drift + normal(2, 5, TOKENS, 16, seed=3)
    fit = fit_means(states.flatten(1, 2) - drift.expand_as(states).flatten(1, 2))
    residual, (stored,) = centre(states, fit)
    means = block_means(stored[:, :, 0], fit)
    # Stored in steps of a third of a deviation, so off by half of that.
    assert (means - states.mean(2)).abs().max() < 0.2
    torch.testing.assert_close(residual + means[:, :, None], states)

    query = normal(2, 3, 16, seed=4)
    scores = add_mean_scores(
        torch.zeros(2, 3, 5 * TOKENS, dtype=torch.float64), prepare_means(query, fit), stored[:, :, 0]
    )
    torch.testing.assert_close(scores, (query @ means.mT).repeat_interleave(TOKENS, dim=2))


def test_tiles_become_even_along_both_axes() -> None:
    uneven = (
        normal(2, 3, TOKENS, 64)
        * torch.exp2(2 * normal(2, 3, TOKENS, 1, seed=1))
        * torch.exp2(normal(2, 3, 1, 64, seed=2))
    )
    even = uneven / token_scales(even_channels(uneven), torch.float64)
    even = even / even.square().mean(3, keepdim=True).sqrt()
    channels = even.square().mean(2).sqrt()
    assert channels.max() / channels.min() < 1.12


def test_tiles_gain_where_rotated_channels_are_uneven() -> None:
    uneven = normal(2, 3, TOKENS, 64) * torch.exp2(normal(2, 1, 1, 64, seed=2))
    states = uneven @ rotation(64, torch.float64, torch.device("cpu")).T
    for kind in ("keys", "values"):
        assert encode(make("tile", 3, kind), states).error() < 0.8 * encode(make("lloyd", 3, kind), states).error()
