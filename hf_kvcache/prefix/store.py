"""Where prefixes are kept: computed once, read by every request that begins with the same text."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import ConfigError, InputError
from ..storage import layer_devices
from ..units import parse_bytes
from .batch import common_beginning, lay_out, real_rows
from .cache import PrefixSharedCache
from .extent import Extent, States, cut
from .file_format import FileBlock
from .files import BlockFiles
from .identity import (
    ModelWatch,
    Root,
    block_tokens,
    check_namespace,
    has_window,
    require_shareable,
    root_key,
    shareable_layers,
)
from .index import Block, Index, Lease, Match
from .media import Media, position_ids, read_media, split_options
from .stats import Stats


class Found(NamedTuple):
    """What a store has of a prompt."""

    tokens: int
    """Tokens found, a whole number of blocks."""
    layers: list[list[States]]
    """Of each layer, their states in pieces; views to be read in place."""
    lease: Lease
    """Keeps them from being evicted."""
    root: Root
    """Of the model and namespace they belong to."""


class PrefixStore:
    """Keys and values of texts, shared by all requests that begin like one of them.

    The history of a token depends only on the tokens up to it, so requests with equal prefixes may read one copy. A
    block is found by a SHA-256 chain over model, namespace and all tokens up to its end, and its tokens are compared
    besides (`hf_kvcache.prefix.identity`). The idea is that of automatic prefix caching in serving engines, inside
    plain `generate`. Any number of threads may use one store. `open` makes one that keeps its blocks in files as well.

    A request that finds its prefix is answered sooner, and whoever can measure that learns what others have asked.
    Give requests of different users different namespaces where that matters.

    Args:
        model: The model whose states are kept. It may change: what it computed before is then no longer found.
        capacity: Bytes of states to keep at most, as a number or as in "2GiB".
        block_size: Tokens per block. Only whole blocks are shared.
        namespace: Whose texts these are, where a request does not say so.
        lifetime_seconds: How long a block is kept after its last use; default: for as long as there is room.

    Raises:
        ConfigError: The histories of this model cannot be shared; the message says why.
        InputError: Sizes below 1, or a namespace that is not a string.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import PrefixStore
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> store = PrefixStore.for_model(model, block_size=16)
        >>> document = torch.randint(3, 50, (1, 64))
        >>> for question in ([5, 6, 7], [8, 9]):
        ...     prompt = torch.cat([document, torch.tensor([question])], dim=1)
        ...     answer = store.generate(model, input_ids=prompt, max_new_tokens=4)
        >>> store.stats().hits, store.stats().hit_tokens
        (1, 64)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int | str = "2GiB",
        block_size: int = 64,
        namespace: str | None = None,
        lifetime_seconds: float | None = None,
    ) -> None:
        require_shareable(model.config)
        check_namespace(namespace)
        capacity_bytes = _bytes(capacity)
        if block_size < 1 or capacity_bytes < 1:
            raise InputError(f"expected at least 1 token a block and 1 byte, got {block_size} and {capacity_bytes}")
        if lifetime_seconds is not None and lifetime_seconds <= 0:
            raise InputError(f"a lifetime is a positive number of seconds, got {lifetime_seconds}")
        self.model = model
        self.block_size = block_size
        self.namespace = namespace
        self._watch = ModelWatch()
        self._index = Index(block_size, capacity_bytes, lifetime_seconds)
        self._files: BlockFiles | None = None
        self._loaded_tokens = 0
        self._hits = self._hit_tokens = self._prompt_tokens = 0
        self._misses: Counter[str] = Counter()

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        capacity: int | str = "2GiB",
        block_size: int = 64,
        namespace: str | None = None,
        lifetime_seconds: float | None = None,
    ) -> PrefixStore:
        """An empty store in memory; see the class for the arguments."""
        return cls(model, capacity, block_size, namespace, lifetime_seconds)

    @classmethod
    def open(
        cls,
        url: str,
        model: PreTrainedModel,
        capacity: int | str = "2GiB",
        block_size: int = 64,
        namespace: str | None = None,
        lifetime_seconds: float | None = None,
        file_capacity: int | str = "16GiB",
        file_options: dict[str, Any] | None = None,
    ) -> PrefixStore:
        """A store that keeps its blocks in files as well, for processes that come later or run beside this one.

        What is stored is written before `generate` or `commit` returns; what is not in memory is read when it is asked
        for. Files that are missing, damaged or of another release are misses, and so is a place that cannot be read:
        the text is computed again, and `stats().file_problems` counts what happened.

        Args:
            url: A directory of your own (``file:///path``), or any address fsspec knows (``s3://bucket/prefix``).
            model: As for the class.
            capacity: As for the class: of the memory.
            block_size: As for the class, and part of what a block is.
            namespace: As for the class.
            lifetime_seconds: As for the class, and of files since they were read or written last; in an object store,
                since they were written.
            file_capacity: Bytes of files to keep at most. Those used least recently go first, in an object store those
                written first. Every process that writes may exceed it by a sixteenth before it notices the others.
            file_options: What fsspec's file system takes, for example ``{"endpoint_url": ...}``.

        Raises:
            StorageError: There is no such place, or a directory that other users can write to.
            InputError: As for the class.
        """
        file_capacity_bytes = _bytes(file_capacity)
        if file_capacity_bytes < 1:
            raise InputError(f"expected at least 1 byte of files, got {file_capacity_bytes}")
        store = cls(model, capacity, block_size, namespace, lifetime_seconds)
        store._files = BlockFiles(url, file_capacity_bytes, lifetime_seconds, file_options)
        return store

    # ------------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "rows tokens"] | None = None,
        attention_mask: Tensor | None = None,
        namespace: str | None = None,
        **options: Any,
    ) -> Any:
        """``model.generate(input_ids, ...)`` that computes only what is not stored, and stores what it computed.

        Rows of a batch share the beginning that all of them have in common; where it is not stored it is computed once
        for all of them.

        Args:
            model: The model, also loaded again or changed: only what this very model computed is found.
            input_ids: The prompts, padded on either side. None with ``inputs_embeds`` of one row among the options.
            attention_mask: 1 where they are not padding. Default: nowhere is.
            namespace: Whose texts these are; default: that of the store.
            options: What `model.generate` takes, with one row also images, sound and video as a processor makes them.

        Returns:
            What `model.generate` returns for these inputs.

        Raises:
            InputError: Other inputs (positions, a cache), images for a model of which it is not known which tokens
                depend on them, or ids that are none.
        """
        media, options = split_options(model, options)
        if media and _in_chunks(model, options):
            raise InputError(
                "a prompt with images or embeddings is computed in one piece, since a chunk could end inside an image; "
                "leave prefill_chunk_size out"
            )
        prepared = self._prepare(model, input_ids, attention_mask, namespace, media)
        cache = next(value for value in prepared.values() if isinstance(value, PrefixSharedCache))
        with cache:
            if cache_argument(model) == "past_key_values" and _in_chunks(model, options):
                cache.give_up("chunked_prefill")  # this transformers feeds the chunks of the whole prompt
            output = cast("Any", model).generate(**prepared, **options)
            sequences = output if isinstance(output, Tensor) else output.sequences
            cache.commit(sequences)
        if input_ids is None:
            return output
        given = input_ids.repeat_interleave(sequences.shape[0] // input_ids.shape[0], dim=0)
        sequences = torch.cat([given, sequences[:, prepared["input_ids"].shape[1] :]], dim=1)
        if isinstance(output, Tensor):
            return sequences
        output.sequences = sequences
        return output

    def prepare(self, inputs: Mapping[str, Tensor], namespace: str | None = None) -> dict[str, Any]:
        """Arguments for `model.generate`, or for the model itself: ids, mask, cache, and what else the model needs.

        The beginning that all rows have in common comes first in every row, then the padding, then the rest, so that
        one shared history fits them all. A common beginning that is not stored is computed here, once, if there are
        several rows. The cache is the caller's to commit and to close.

        Args:
            inputs: ``input_ids`` and ``attention_mask`` as a tokenizer makes them, and with one row also images, sound
                or video as a processor does. They are left out of the result where the cache holds their states. Or
                ``inputs_embeds`` of one row.
            namespace: Whose texts these are; default: that of the store.
        """
        media = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        return self._prepare(self.model, inputs.get("input_ids"), inputs.get("attention_mask"), namespace, media)

    def _prepare(
        self,
        model: PreTrainedModel,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        namespace: str | None,
        media: Mapping[str, Any],
    ) -> dict[str, Any]:
        if input_ids is None:
            others = dict(media)
            embeds = others.pop("inputs_embeds", None)
            cache = PrefixSharedCache(model.config, self, None, attention_mask, namespace, model, others, embeds)
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
            return {"inputs_embeds": embeds, "attention_mask": mask, cache_argument(model): cache}
        rows, real = real_rows(input_ids, attention_mask)
        if len(rows) > 1 or not bool(real.all()):
            read_media(model.config, input_ids, attention_mask, media)  # raises unless all of it is text
            media = {}
        if len(rows) == 1:
            ids, mask = rows[0][None], torch.ones_like(rows[0])[None]
            cache = PrefixSharedCache(model.config, self, ids, mask, namespace, model, media)
            rest = {} if cache.shared_tokens else media
            places = position_ids(model, ids, mask, media)
            return {"input_ids": ids, "attention_mask": mask, cache_argument(model): cache, **places, **rest}
        beginning = common_beginning(rows)
        whole = len(beginning) // self.block_size * self.block_size
        if has_window(model.config) and any(len(row) != input_ids.shape[1] for row in rows):
            whole = 0  # see `PrefixSharedCache`
        pad = 0 if bool(real.all()) else int(input_ids[~real][0])
        ids, mask = lay_out(rows, whole, input_ids.shape[1], pad)
        cache = PrefixSharedCache(model.config, self, ids, mask, namespace, model)
        if cache.shared_tokens < whole:
            _prefill(model, beginning[None, :whole], cache)
        places = position_ids(model, ids, mask, {})
        return {"input_ids": ids, "attention_mask": mask, cache_argument(model): cache, **places}

    # ------------------------------------------------------------------------------------------------- blocks

    def root(self, model: PreTrainedModel, namespace: str | None, media: Media | None = None) -> Root:
        """Where the texts of a namespace begin, as the model is now."""
        check_namespace(namespace)
        namespace = self.namespace if namespace is None else namespace
        return Root(self._watch.fingerprint(model), namespace, None if media is None else media.digest)

    def find(
        self,
        config: PreTrainedConfig,
        model: PreTrainedModel,
        beginning: Int[Tensor, "tokens *numbers"],
        namespace: str | None,
        prompt_tokens: int,
        reason: str | None = None,
        media: Media | None = None,
    ) -> Found:
        """Look for the longest stored part of `beginning`, hold it, and count the prompt.

        `reason` says why nothing of it can be found, where that is known beforehand. A part that ends before the last
        token that stands for `media` is not found.

        Raises:
            ConfigError: `config` is not that of `model`.
        """
        if config is not model.config and config.to_dict() != model.config.to_dict():
            raise ConfigError(f"this {type(config).__name__} is not the config of the store's model; pass model.config")
        root, size = self.root(model, namespace, media), self.block_size
        blocks = block_tokens(beginning if media is None else media.aligned(beginning, size), size)
        loaded = self._load(model, root, blocks)
        with self._index.lock:
            match = self._index.match(root, blocks)
            if media is not None and 0 < len(match.path) * size < media.tokens:
                match, loaded = Match([], match.keys, "media_not_covered"), range(0)
            lease = self._index.lease(match.path)
            layers = _in_pieces(match.path, size)
            if media is not None:
                layers = [media.without_fill(pieces, size) for pieces in layers]
            tokens = self._tokens_of(range(len(match.path)), media)
            loaded_tokens = self._tokens_of(loaded, media)
            self._prompt_tokens += prompt_tokens
            self._loaded_tokens += loaded_tokens
            if match.missing is None:
                self._hits += 1
                self._hit_tokens += tokens
            else:
                self._misses[reason or match.missing] += 1
        return Found(tokens, layers, lease, root)

    def withdraw(self, tokens: int, reason: str) -> None:
        """Count a prompt of which `tokens` tokens were found as a miss: they are computed again, for this reason."""
        with self._index.lock:
            self._hits -= 1
            self._hit_tokens -= tokens
            self._misses[reason] += 1

    def _tokens_of(self, blocks: range, media: Media | None) -> int:
        """The tokens that consecutive blocks of a text hold."""
        begin, end = blocks.start * self.block_size, blocks.stop * self.block_size
        if media is None:
            return end - begin
        return media.real_tokens(end, self.block_size) - media.real_tokens(begin, self.block_size)

    def put(
        self,
        root: Root,
        token_ids: Int[Tensor, "tokens *numbers"],
        states: Callable[[slice], list[States]],
        media: Media | None = None,
    ) -> int:
        """Store the whole blocks of a text that are not stored yet, as far as there is room.

        Args:
            root: Of the text.
            token_ids: The text from its first token on; with media as `Media.aligned` makes it.
            states: Gives copies of the states of some of these, of every layer.
            media: What the text holds besides tokens.

        Returns:
            Tokens stored.
        """
        blocks = block_tokens(token_ids, self.block_size)
        stored = self._keep(root, blocks, states)
        if self._files is not None:
            with self._index.lock:
                match = self._index.match(root, blocks)
                # Extents never change what they hold: these tensors stay right without a lease.
                held = [(block.extent.layers, block.position * self.block_size) for block in match.path]

            def states_of(block: int) -> list[States]:
                layers, begin = held[block]
                return cut(layers, slice(begin, begin + self.block_size))

            self._files.write(self._file_blocks(root, match, blocks)[: len(held)], states_of)
        return self._tokens_of(stored, media)

    def _keep(
        self, root: Root, blocks: Sequence[bytes], states: Callable[[slice], list[States]], known: int = 0
    ) -> range:
        """Store blocks in memory, as far as there is room. Returns which.

        `states` is not asked for the first `known` blocks: where those have gone meanwhile, nothing is stored.
        """
        size = self.block_size
        with self._index.lock:
            match = self._index.match(root, blocks)
            first, count = len(match.path), len(blocks) - len(match.path)
            if count <= 0 or first < known:
                return range(0)
            # One block first, to learn how much memory a block takes.
            with torch.inference_mode(False):
                sample = Extent(states(slice(first * size, (first + 1) * size)), 1)
                count = min(count, self._index.room_for(sample.nbytes, match.path))
                if count <= 0:
                    return range(0)
                extent = Extent(states(slice(first * size, (first + count) * size)), count) if count > 1 else sample
            return range(first, first + self._index.insert(match, blocks, extent, root))

    def _load(self, model: PreTrainedModel, root: Root, blocks: Sequence[bytes]) -> range:
        """Read from files what follows the part of a text that is in memory. Returns the blocks read."""
        if self._files is None:
            return range(0)
        match = self._index.match(root, blocks)
        first = len(match.path)
        read = self._files.read(self._file_blocks(root, match, blocks)[first:])
        if not read:
            return range(0)
        devices = layer_devices(model)
        joined = []
        with torch.inference_mode(False):
            for number, of_layer in zip(shareable_layers(model.config), zip(*read, strict=True), strict=True):
                keys, values = (torch.cat(of_kind, dim=1) for of_kind in zip(*of_layer, strict=True))
                device = devices.get(number)
                joined.append((keys.to(device), values.to(device)))
        states = partial(_copied, joined, first * self.block_size)
        return self._keep(root, blocks[: first + len(read)], states, first)

    def _file_blocks(self, root: Root, match: Match, blocks: Sequence[bytes]) -> list[FileBlock]:
        beginning = root_key(root, self.block_size)
        folder = root_key(root._replace(media=None), self.block_size)  # `clear` does not know the media of a namespace
        of_blocks = zip(match.keys, [beginning, *match.keys], blocks, strict=False)
        return [FileBlock(key, parent, folder, tokens) for key, parent, tokens in of_blocks]

    def pin(self, token_ids: Int[Tensor, " tokens"], namespace: str | None = None) -> int:
        """Keep what is stored of a text until it is unpinned. Returns how many tokens that is."""
        return self._with_path(token_ids, namespace, self._index.pin)

    def unpin(self, token_ids: Int[Tensor, " tokens"], namespace: str | None = None) -> int:
        """Undo one `pin` of this text. Returns how many of its tokens are stored."""
        return self._with_path(token_ids, namespace, self._index.unpin)

    def evict(self, token_ids: Int[Tensor, " tokens"], namespace: str | None = None) -> int:
        """Forget the end of a text, up to where others share it, read it or pinned it. Returns the tokens forgotten."""
        root, blocks = self.root(self.model, namespace), block_tokens(token_ids, self.block_size)
        self._load(self.model, root, blocks)
        with self._index.lock:
            match = self._index.match(root, blocks)
            gone = self._index.evict(match.path)
        if self._files is not None:
            self._files.remove(self._file_blocks(root, match, blocks)[len(match.path) - gone :])
        return gone * self.block_size

    def clear(self, namespace: str | None = None) -> None:
        """Forget every text of a namespace (default: of all), pinned ones too.

        Caches go on reading what they hold; its memory is given back with theirs. Files go too: without a namespace all
        at this place, whoever wrote them, with one those of this model as it is now.
        """
        check_namespace(namespace)
        self._index.clear(namespace)
        if self._files is not None:
            root = None if namespace is None else root_key(self.root(self.model, namespace), self.block_size)
            self._files.clear(root)

    def _with_path(self, token_ids: Tensor, namespace: str | None, act: Callable[[Sequence[Block]], None]) -> int:
        root, blocks = self.root(self.model, namespace), block_tokens(token_ids, self.block_size)
        self._load(self.model, root, blocks)
        with self._index.lock:
            match = self._index.match(root, blocks)
            act(match.path)
            return len(match.path) * self.block_size

    # ------------------------------------------------------------------------------------------------- telling

    def stats(self) -> Stats:
        """What has been found and what is stored."""
        index, files = self._index, self._files
        with index.lock:
            held_bytes, capacity_bytes = {"memory": index.held_bytes}, {"memory": index.capacity_bytes}
            if files is not None:
                held_bytes["files"], capacity_bytes["files"] = files.held_bytes, files.capacity_bytes
            return Stats(
                hits=self._hits,
                hit_tokens=self._hit_tokens,
                prompt_tokens=self._prompt_tokens,
                misses=dict(self._misses),
                blocks=len(index),
                pinned_blocks=index.pinned_blocks,
                blocks_in_use=index.blocks_in_use,
                evicted_blocks=index.evictions,
                held_bytes=held_bytes,
                capacity_bytes=capacity_bytes,
                loaded_tokens=self._loaded_tokens,
                file_problems={} if files is None else dict(files.problems),
            )

    def __repr__(self) -> str:
        return f"PrefixStore({len(self._index)} blocks of {self.block_size} tokens, {self._index.held_bytes} bytes)"

    def check_integrity(self) -> None:
        """Raise StateError unless what is stored is consistent."""
        self._index.check_integrity()


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model takes a cache: `past_key_values` or, since transformers 5.24, `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _in_chunks(model: PreTrainedModel, options: Mapping[str, Any]) -> bool:
    config = options.get("generation_config") or model.generation_config
    return (options.get("prefill_chunk_size") or getattr(config, "prefill_chunk_size", None)) is not None


@torch.no_grad()
def _prefill(model: PreTrainedModel, beginning: Int[Tensor, "1 tokens"], cache: PrefixSharedCache) -> None:
    """Compute the states of what the cache does not hold of a text; its logits are not asked for."""
    rest = slice(cache.shared_tokens, None)
    places = position_ids(model, beginning, torch.ones_like(beginning), {})
    places = {name: positions[..., rest] for name, positions in places.items()}
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids=beginning[:, rest], use_cache=True, **{cache_argument(model): cache}, **few, **places)


def _in_pieces(path: Sequence[Block], block_size: int) -> list[list[States]]:
    """The states of a path, of each layer in as few views as there are extents."""
    pieces: list[list[States]] = []
    begin = 0
    while begin < len(path):
        extent = path[begin].extent
        end = begin
        while end < len(path) and path[end].extent is extent:
            end += 1
        pieces.append(extent.span(path[begin].position, path[end - 1].position + 1, block_size))
        begin = end
    return [list(of_layer) for of_layer in zip(*pieces, strict=True)]


def _copied(layers: Sequence[States], first_token: int, part: slice) -> list[States]:
    """Copies of the states of some tokens of a text, from layers that hold it from `first_token` on."""
    tokens = slice(part.start - first_token, part.stop - first_token)
    return [(keys.clone(), values.clone()) for keys, values in cut(layers, tokens)]


def _bytes(size: int | str) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
