"""Products with rows as they are stored: the C code against torch, and what is left to torch."""

import shutil
import sys

import pytest
import torch
from architectures import tiny_model

from hf_kvcache import build_cache
from hf_kvcache.attention import matmul, rows
from hf_kvcache.codecs.levels import Levels
from hf_kvcache.codecs.nibble import Nibbles
from hf_kvcache.codecs.packing import pack
from hf_kvcache.evaluation.protocols import forward

HEADS = 3
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-13}
SYMBOLS = [((6, 4), (5, 3)), ((5, 3, 3, 2),), ((4, 3, 2, 1),), ((2, 2, 2, 2),), ((3, 3, 3, 3),), ((4, 4),)]
KINDS = ["plain", "bfloat16", "nibbles", *SYMBOLS]


def stored(kind, tokens, width, dtype):
    """Rows of a kind, cut out of larger arrays, as pools are."""
    if kind == "plain":
        return torch.randn(HEADS, tokens + 40, width, dtype=dtype)[:, 7 : 7 + tokens]
    if kind == "bfloat16":
        return torch.randn(tokens + 40, HEADS, width).bfloat16()[7 : 7 + tokens].transpose(0, 1)
    if kind == "nibbles":
        return Nibbles(torch.randint(-128, 128, (HEADS, tokens + 40, width // 2), dtype=torch.int8)[:, 7 : 7 + tokens])
    count = width // sum(map(len, kind))
    planes = [
        plane
        for bits in map(sum, kind)
        for plane in pack(torch.randint(0, 1 << bits, (HEADS, tokens + 40, count)), bits)
    ]
    return Levels([plane[:, 7 : 7 + tokens] for plane in planes], kind, count)


def decoded(found, dtype):
    return found.to(dtype) if isinstance(found, torch.Tensor) else found.decode(dtype)


@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("gcc") is None, reason="no compiler")
def test_it_is_compiled_where_it_can_be():
    assert rows.is_compiled()


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 15, 256, 1000])
@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize("width", [8, 24, 64, 128, 512])
@pytest.mark.parametrize("scaled", [True, False])
def test_products_are_those_of_torch(kind, dtype, tokens, queries, width, scaled):
    found = stored(kind, tokens, width, dtype)
    expected = decoded(found, dtype)
    query = torch.randn(HEADS, queries + 2, width, dtype=dtype)[:, 1:-1]
    weights = torch.rand(HEADS, queries, tokens + 3, dtype=dtype)[..., 2:-1]
    scales = torch.randint(-20, 20, (HEADS, tokens + 9, 3), dtype=torch.int8)[:, 9:, 1:2] if scaled else None
    if scaled:
        expected = expected * rows.token_scales(scales, dtype)
    products, sums = rows.scores(query, found, scales), rows.weighted_sum(weights, found, scales)
    if not rows.is_compiled():
        assert products is None
        assert sums is None
        return
    for got, exact in ((products, query @ expected.transpose(1, 2)), (sums, weights @ expected)):
        assert got.shape == exact.shape
        torch.testing.assert_close(got, exact, rtol=0, atol=DTYPES[dtype] * float(exact.abs().max()))
    assert torch.equal(matmul.scores(query, found, scales), products)
    assert torch.equal(matmul.weighted_sum(weights, found, scales), sums)


def test_sums_do_not_depend_on_the_number_of_threads():
    query, keys = torch.randn(2, 4, 64), torch.randn(2, 3000, 64)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            products = matmul.scores(query, keys)
            found.append((products, matmul.weighted_sum(products, keys)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for some in found for one, other in zip(some, found[0], strict=True))


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        (torch.randn(2, 17, 64), torch.randn(2, 9, 64)),
        (torch.randn(2, 3, 64).bfloat16(), torch.randn(2, 9, 64).bfloat16()),
        (torch.randn(2, 3, 64), torch.randn(2, 9, 64).half()),
        (torch.randn(2, 3, 60), torch.randn(2, 9, 60)),
        (torch.randn(2, 3, 520), torch.randn(2, 9, 520)),
        (torch.randn(2, 3, 64), torch.randn(2, 64, 9).transpose(1, 2)),
        (torch.randn(2, 3, 64, requires_grad=True), torch.randn(2, 9, 64)),
        (torch.randn(2, 3, 64, device="meta"), torch.randn(2, 9, 64, device="meta")),
        (torch.randn(2, 3, 64), torch.randn(2, 0, 64)),
    ],
    ids=["queries", "query dtype", "key dtype", "lanes", "width", "strides", "gradients", "device", "nothing"],
)
def test_what_is_not_covered_is_left_to_torch(query, keys):
    assert rows.scores(query, keys) is None
    products = matmul.scores(query, keys)
    assert products.shape == (2, query.shape[1], keys.shape[1])
    assert products.requires_grad == query.requires_grad


@pytest.mark.parametrize(("heads", "tokens", "fits"), [(2, 9, True), (3, 9, False), (1, 9, False), (2, 8, False)])
def test_nothing_is_read_behind_the_end(heads, tokens, fits):
    queries, values = torch.randn(2, 3, 64), torch.randn(2, 9, 64)
    plain, scales = rows.Rows(0, 64, [values]), torch.zeros(heads, tokens, 1, dtype=torch.int8)
    assert rows._is_readable(queries, plain, scales) is fits
    two_planes = rows.Rows(0, 64, [values, torch.randn(heads, tokens, 64)])
    assert rows._is_readable(queries, two_planes, None) is fits
    assert rows._is_readable(torch.randn(heads, 3, 64), plain, None) is (heads == 2)


@pytest.mark.parametrize(
    "spec", ["paged", "quantized:bits=4", "quantized:bits=3", "quantized:bits=2", "quantized:codec=lloyd,bits=4"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_caches_are_the_same_without_a_compiler(spec, dtype, monkeypatch):
    """In float64 up to rounding; in bfloat16 as near as one rounding of the outputs."""
    model = tiny_model("llama", dtype=dtype)
    ids = torch.randint(5, 90, (1, 330), generator=torch.Generator().manual_seed(3))
    found = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(rows, "_library", lambda: None)
        cache = build_cache(model.config, spec)
        forward(model, ids[:, :320], cache)
        found.append(torch.cat([forward(model, ids[:, at : at + 1], cache) for at in range(320, 330)]))
    scale = float(found[0].abs().max())
    assert float((found[0] - found[1]).abs().max()) <= (1e-12 if dtype == torch.float64 else 2e-2) * scale
