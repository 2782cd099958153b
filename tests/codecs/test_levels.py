import math

import pytest
import torch

from hf_kvcache.codecs.levels import lloyd_max, look_up, nearest_symbols

CPU = torch.device("cpu")
# Mean squared errors of the best quantizers of a normal number (Max, IRE Transactions on Information Theory 6, 1960).
PUBLISHED = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


@pytest.mark.parametrize("bits", range(1, 7))
def test_levels_are_the_means_of_their_cells(bits: int) -> None:
    levels = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    assert len(levels) == 2**bits
    torch.testing.assert_close(levels, -levels.flip(0), rtol=0, atol=1e-6)
    edges = [-math.inf, *((levels[1:] + levels[:-1]) / 2).tolist(), math.inf]
    for level, low, high in zip(levels.tolist(), edges, edges[1:], strict=False):
        share = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        mean = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi) / share
        assert level == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("bits", PUBLISHED)
def test_the_error_is_the_published_one(bits: int) -> None:
    numbers = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    density = torch.exp(-numbers.square() / 2)
    levels = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    nearest = levels[torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2)]
    assert ((numbers - nearest).square() * density).sum() / density.sum() == pytest.approx(PUBLISHED[bits], rel=3e-3)


@pytest.mark.parametrize("bits", [*((bits,) for bits in range(1, 7)), (4, 4), (6, 4), (5, 3, 3, 2)])
def test_the_symbols_of_the_nearest_levels_are_found(bits: tuple[int, ...]) -> None:
    numbers = torch.linspace(-6, 6, 12_000, dtype=torch.float64)
    found = look_up(nearest_symbols(numbers.clone(), bits), bits, torch.float64)
    for place, width in enumerate(bits):
        own = numbers[place :: len(bits)]
        levels = torch.tensor(lloyd_max(width), dtype=torch.float64)
        best = (own[:, None] - levels).abs().amin(1)
        # Up to half a cell of the look-up.
        assert ((own - found[place :: len(bits)]).abs() - best).max() < 2 * 9 / 4096


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [(4,), (2, 2), (2, 2, 2, 2), (4, 3, 2, 1), (3, 2, 3)])
def test_look_ups_of_all_word_sizes_agree(bits: tuple[int, ...], dtype: torch.dtype) -> None:
    symbols = torch.arange(1 << sum(bits), dtype=torch.int32)
    found, shift = look_up(symbols, bits, dtype).unflatten(-1, (-1, len(bits))), 0
    for place, width in enumerate(bits):
        levels = torch.tensor(lloyd_max(width), dtype=torch.float64).to(dtype)
        assert torch.equal(found[:, place], levels[((symbols >> shift) & ((1 << width) - 1)).long()])
        shift += width
