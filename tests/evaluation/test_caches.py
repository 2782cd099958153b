import pytest
import toys
from transformers import DynamicCache, StaticCache

from hf_kvcache.errors import ConfigError, SpecError
from hf_kvcache.evaluation import resolve_cache

CONFIG = toys.tiny_model().config


def test_transformers_caches_by_name():
    assert resolve_cache("none", 64)(CONFIG) is None
    assert type(resolve_cache("dynamic", 64)(CONFIG)) is DynamicCache
    static = resolve_cache("static", 64)(CONFIG)
    assert type(static) is StaticCache
    assert static.layers[0].max_cache_len == 64
    assert resolve_cache("static:max_cache_len=99", 64)(CONFIG).layers[0].max_cache_len == 99


def test_every_build_is_a_fresh_cache():
    build = resolve_cache("dynamic", 64)
    assert build(CONFIG) is not build(CONFIG)


def test_a_cache_of_the_user():
    assert type(resolve_cache("toys:rounded", 64)(CONFIG)) is toys.Rounded


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dynamc", "Did you mean 'dynamic'"),
        ("pagd:block_size=4", "Did you mean 'paged'"),
        ("static:max_cache_length=4", "did you mean 'max_cache_len'"),
        ("static:4", "expected key=value"),
        ("dynamic:nbits=4", "no option 'nbits'"),
        ("quantized:backend=hqq,bits=4", "did you mean 'nbits'"),
        ("no.such.module:make", "cannot be imported"),
        ("toys:no_such_function", "cannot be imported"),
    ],
)
def test_a_spec_that_names_nothing_says_what_is_near(spec, message):
    with pytest.raises(SpecError, match=message):
        resolve_cache(spec, 64)(CONFIG)


@pytest.mark.parametrize("spec", ["toys:not_a_cache", "quantized:backend=nonesuch"])
def test_a_cache_that_cannot_be_built(spec):
    with pytest.raises(ConfigError, match=r"must return a transformers Cache|cannot build"):
        resolve_cache(spec, 64)(CONFIG)
