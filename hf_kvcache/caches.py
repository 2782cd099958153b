"""The named caches: thin presets over `KVCache`."""

from __future__ import annotations

from transformers import PreTrainedConfig

from .cache import KVCache
from .quantized import Quantization
from .residency import Residency
from .retention import Eviction, Quest, Window
from .retention.budget import Amount, Recent


class PagedCache(KVCache):
    """The whole history, exact, in blocks that rows share and that are never copied to grow.

    The idea of pages with reference counts is that of PagedAttention (arXiv 2309.06180), inside plain `generate`.

    Args:
        config: The model's config.
        block_size: Tokens per block. Smaller blocks share more and waste less, larger ones are fewer to count.
        fused: See `KVCache`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import PagedCache
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> cache = PagedCache(model.config)
        >>> text = model.generate(torch.arange(3, 13)[None], past_key_values=cache, max_new_tokens=5, min_new_tokens=5)
        >>> cache.get_seq_length()
        14
    """

    def __init__(self, config: PreTrainedConfig, block_size: int = 64, fused: bool = True) -> None:
        super().__init__(config, block_size=block_size, fused=fused)


class OffloadedCache(KVCache):
    """The whole history, exact, larger than the memory of the device: what is beyond a budget lies below.

    Whole layers go down, spread evenly over the model; each of their full blocks is written once, and never again, and
    comes back for every token while the model works on the layers before it. Attention is that of `PagedCache` on the
    same layout, and gives the same bits. As long as everything fits in the budget it is a `PagedCache`.

    On the device are then at most the budget, two layers' read buffers, and the incomplete blocks of all rows, which
    count but cannot go down. A layer that went down stays there until the cache is reset.

    Args:
        config: The model's config.
        device_budget: Bytes for the history on each device, as in "512MiB" or as a number.
        residency: Where the rest goes. "host": the memory beside an accelerator; layers that run on the CPU are there
            already, so that for them it does nothing, and says so once. "disk:FOLDER": files without a name there,
            which are gone with the process, however it ends. Or a chain with the most that each may hold:
            "host:4GiB+disk:FOLDER:100GiB".
        block_size: Tokens per block.

    Raises:
        ConfigError: Neither a size nor a place.
        StorageError: The folder does not exist, or cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import OffloadedCache
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> cache = OffloadedCache(model.config, device_budget="100KiB", residency=f"disk:{tempfile.gettempdir()}")
        >>> text = model.generate(torch.randint(3, 50, (1, 300)), past_key_values=cache, max_new_tokens=5)
        >>> cache.memory().device_bytes["disk"] > 0
        True
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        device_budget: str | int = "512MiB",
        residency: str = "host",
        block_size: int = 64,
    ) -> None:
        super().__init__(config, block_size=block_size, residency=Residency(device_budget, residency))


class QuantizedCache(KVCache):
    """The history in few bits: sinks and recent tokens exact, everything between them encoded once, block by block.

    Layers with full attention are encoded; layers whose own window bounds them are kept as they are, exact. Choose
    the bits by what `hf-kvcache eval` measures on your model and text. Defaults are the best choice measured:
    4.4 bits per number all in, and for bits=3 and bits=2 about 3.3 and 2.4.

    Args:
        config: The model's config.
        bits: Nominal bits per number, 2 to 8.
        key_bits: Bits of the keys, where they differ. Keys need more than values.
        value_bits: Bits of the values, where they differ.
        codec: How blocks are encoded: a name in `hf_kvcache.codecs.CODECS`, or "auto", the best measured at these
            bits; "keys/values" where they differ, as in "mixed/affine".
        sinks: Tokens at the beginning that stay exact.
        recent: Tokens at the end that stay exact, at least.
        block_size: Tokens per encoded block.
        layers: What differs in some layers, as in ``0:key_bits=8&value_bits=8;3-5:recent=256``; `calibrate` finds it.

    Raises:
        ConfigError: Bits, codec, sizes or layers that do not exist.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import QuantizedCache
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> cache = QuantizedCache(model.config, bits=4)
        >>> text = model.generate(torch.randint(3, 50, (1, 300)), past_key_values=cache, max_new_tokens=5)
        >>> cache.exactness.kind
        'approximate'
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        bits: int = 4,
        key_bits: int | None = None,
        value_bits: int | None = None,
        codec: str = "auto",
        sinks: int = 4,
        recent: int = 128,
        block_size: int = 64,
        layers: str = "",
    ) -> None:
        quantization = Quantization(
            key_bits=bits if key_bits is None else key_bits,
            value_bits=bits if value_bits is None else value_bits,
            codec=codec,
            sinks=sinks,
            recent=recent,
            layers=layers,
        )
        super().__init__(config, block_size=block_size, quantization=quantization)


class SlidingWindowCache(KVCache):
    """The first tokens and a sliding window: memory and time that do not grow with the text.

    On layers with full attention every query sees the first real tokens of its row and the last `window` tokens, its
    own included; the rest is dropped, block by block. That is another function than the model's: approximate. Layers
    whose own window bounds them are kept as they are, exact.

    Attention sinks: Xiao et al., arXiv 2309.17453.

    Args:
        config: The model's config.
        window: Tokens at the end that a query sees.
        sinks: Tokens at the beginning that it sees. In a batch padded on the left, those of its own row.
        rerotate: See the sinks right in front of the window, wherever that is, instead of ever further back: for texts
            longer than the model was trained to. For models whose positions are rotations of a fixed frequency.
        block_size: Tokens per block.

    Raises:
        ConfigError: A window that is not longer than the sinks, or a model whose keys cannot be moved.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import SlidingWindowCache
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> cache = SlidingWindowCache(model.config, window=64, block_size=16)
        >>> prompt = torch.randint(3, 50, (1, 300))
        >>> text = model.generate(prompt, past_key_values=cache, max_new_tokens=9, min_new_tokens=9)
        >>> cache.memory().tokens_seen > 300, cache.memory().tokens_held <= 4 + 64 + 16
        (True, True)
    """

    def __init__(
        self, config: PreTrainedConfig, window: int, sinks: int = 4, rerotate: bool = False, block_size: int = 64
    ) -> None:
        super().__init__(config, block_size=block_size, retention=Window(window, sinks, rerotate))


class EvictingCache(KVCache):
    """The history within a budget: tokens that a policy scores lowest are dropped, and their bytes given back.

    Layers with full attention evict; layers whose own window bounds them are kept as they are. Sinks and recent tokens
    always stay. Each head of each layer and row makes its own choice. Attention goes through torch's
    ``scaled_dot_product_attention``; other implementations of transformers cannot leave tokens out, and raise once
    something was dropped.

    Args:
        config: The model's config.
        policy: Which tokens go: a name in `hf_kvcache.retention.POLICIES`.
        budget: How much stays of each row. A float up to 1.0: a share of the tokens seen. An int: tokens. A size such
            as "64MiB": bytes of all layers that evict, for the rows of the first batch.
        sinks: Tokens at the beginning of each row, padding aside, that always stay.
        recent: Tokens at the end that always stay; a float below 1.0 is their share of the budget.
        per_head: Let the heads of a layer share what they keep, so that one that looks around keeps more. For policies
            whose scores compare heads: snapkv, h2o, expected_attention.
        pyramid: Let lower layers keep more than upper ones, as many in all (PyramidKV, arXiv 2406.02069).
        block_size: Tokens per block, and tokens that go at a time while decoding.

    Raises:
        ConfigError: No such policy, or a budget that leaves no choice.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import EvictingCache
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> cache = EvictingCache(model.config, budget=256)
        >>> text = model.generate(torch.randint(3, 50, (1, 400)), past_key_values=cache, max_new_tokens=5)
        >>> cache.memory().tokens_held <= 256
        True
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: str = "h2o",
        budget: Amount = 0.5,
        sinks: int = 4,
        recent: Recent = 0.5,
        per_head: bool = False,
        pyramid: bool = False,
        block_size: int = 64,
    ) -> None:
        retention = Eviction(policy, budget, sinks, recent, per_head, pyramid)
        super().__init__(config, block_size=block_size, retention=retention)


class QuestCache(KVCache):
    """The whole history, of which a decoded token reads few blocks. What is read falls, memory does not.

    On layers with full attention each head reads the blocks whose keys may match its query best, by the least and
    largest number of every channel, and the newest two. Nothing is lost: what one token leaves unread, the next may
    read. Prompts and drafts read everything, and so do attention implementations other than torch's
    ``scaled_dot_product_attention``.

    Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (arXiv 2406.10774).

    Args:
        config: The model's config.
        budget: The share of the full blocks that a decoded token reads.
        block_size: Tokens per block. Smaller blocks are chosen better, and their bounds take more bytes.

    Raises:
        ConfigError: No share of the blocks.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import QuestCache
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> cache = QuestCache(model.config, budget=0.2)
        >>> text = model.generate(torch.randint(3, 50, (1, 400)), past_key_values=cache, max_new_tokens=5)
        >>> cache.memory().tokens_held == cache.get_seq_length()
        True
    """

    def __init__(self, config: PreTrainedConfig, budget: float = 0.2, block_size: int = 4) -> None:
        super().__init__(config, block_size=block_size, retention=Quest(budget))
