import pytest
import torch

from hf_kvcache.codecs.packing import pack, plane_bits, plane_shapes, take, unpack


@pytest.mark.parametrize("bits", range(1, 19))
def test_numbers_come_back(bits: int) -> None:
    source = torch.Generator().manual_seed(bits)
    for count in (1, 2, 3, 7, 8, 16, 20, 64):
        numbers = torch.randint(0, 1 << bits, (2, 5, count), generator=source, dtype=torch.int32)
        numbers[0, 0], numbers[1, 0] = 0, (1 << bits) - 1
        assert torch.equal(unpack(pack(numbers, bits), bits, count), numbers), count


def test_every_number_of_12_bits_comes_back() -> None:
    numbers = torch.arange(1 << 12, dtype=torch.int32)
    assert torch.equal(unpack(pack(numbers, 12), 12, numbers.numel()), numbers)


@pytest.mark.parametrize("bits", range(1, 19))
def test_not_a_bit_is_wasted(bits: int) -> None:
    numbers = torch.zeros(3, 64, dtype=torch.int32)
    planes = pack(numbers, bits)
    assert [(plane.shape[-1], plane.dtype) for plane in planes] == plane_shapes(64, bits)
    assert sum(plane.nbytes for plane in planes) * 8 == bits * numbers.numel()
    assert sum(plane_bits(bits)) == bits


def test_no_bits_have_no_planes() -> None:
    with pytest.raises(ValueError, match="0 bits"):
        unpack([], 0, 4)


def test_take_is_indexing() -> None:
    table = torch.randn(256, generator=torch.Generator().manual_seed(0))
    for shape in ((3,), (2, 64), (4, 5, 7)):
        index = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        assert torch.equal(take(table, index), table[index.long()])
