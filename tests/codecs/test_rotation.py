import pytest
import torch

from hf_kvcache.codecs.rotation import rotation

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "order", [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 3, 7, 18, 50]
)
def test_rotations_are_orthonormal(order: int) -> None:
    turn = rotation(order, torch.float64, CPU)
    torch.testing.assert_close(turn @ turn.T, torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [8, 12, 16, 20, 64, 80, 96, 128, 192, 256])
def test_common_widths_are_spread_evenly(order: int) -> None:
    turn = rotation(order, torch.float64, CPU)
    torch.testing.assert_close(turn.abs(), torch.full_like(turn, order**-0.5))


def test_other_widths_are_spread_nearly_evenly() -> None:
    assert rotation(50, torch.float64, CPU).abs().max() < 1.5 * 50**-0.5
