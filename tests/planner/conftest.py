"""Tiny tensors are faster on one thread; and each tiny model is looked at once."""

import functools

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from transformers import PreTrainedConfig

from hf_kvcache.planner.shapes import ModelShape, observe_model


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_config(name: str) -> PreTrainedConfig:
    architecture = ARCHITECTURES[name]
    config_class = getattr(transformers, architecture.config_class, None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.config_class}")
    return config_class(**architecture.options)


@functools.cache
def tiny_shape(name: str) -> ModelShape:
    return observe_model(tiny_config(name), torch.float64)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request) -> str:
    return request.param


@pytest.fixture
def shape(architecture) -> ModelShape:
    return tiny_shape(architecture)
