"""The cache of one request: it begins with what the store has of the prompt."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..blocks import BlockPool, BlockTable
from ..cache import KVCache
from ..errors import InputError, StateError
from ..layer import BlockLayer
from .batch import common_beginning, real_rows
from .embeddings import embedded_prompt
from .extent import States
from .identity import has_window
from .layer import PrefixLayer
from .media import read_media
from .table import PrefixTable

if TYPE_CHECKING:
    from .index import Lease
    from .store import PrefixStore


class PrefixSharedCache(KVCache):
    """A cache that begins with the longest stored prefix of its prompt, read in place and never copied.

    `PrefixStore.generate` makes one, uses it and gives its history to the store. Make one yourself to call `generate`
    yourself: with all ids of the prompt, as with an empty cache. The last token of a prompt is always computed.

    What it reads is kept in the store until it is closed: use it in a ``with`` statement, call `close`, or let go of
    it. A closed cache goes on working, but no longer keeps anything from being evicted.

    Args:
        config: The config of the model.
        store: Where to look.
        input_ids: The prompts, without padding, ``[rows, tokens]``. Rows share the beginning that all of them have in
            common. For prompts of different lengths see `PrefixStore.prepare`. None if there are `inputs_embeds`.
        attention_mask: Where `input_ids` hold padding, as `PrefixStore.prepare` lays it out.
        namespace: Whose texts to look among; default: that of the store.
        model: The model that runs, where it is not the one the store was made for (the same, loaded again).
        media: What a processor makes besides ids and mask, for a prompt with images, sound or video. `generate` must
            not be given it where `shared_tokens` is not 0; `PrefixStore.prepare` makes what it must be given.
        inputs_embeds: One prompt as embeddings ``[1, tokens, width]`` instead of ids. Its answers are not stored.

    Raises:
        ConfigError: The config is not that of the store's model.
        InputError: Not token ids, or inputs that the store does not know for this kind of model; ids and embeddings.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_kvcache import PrefixSharedCache, PrefixStore
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50))
        >>> store, prompt = PrefixStore.for_model(model, block_size=16), torch.arange(40)[None]
        >>> for _ in range(2):
        ...     with PrefixSharedCache(model.config, store=store, input_ids=prompt) as cache:
        ...         print(cache.shared_tokens)
        ...         text = model.generate(prompt, past_key_values=cache, max_new_tokens=4)
        ...         stored = cache.commit(text)
        0
        32
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        store: PrefixStore,
        input_ids: Int[Tensor, "rows tokens"] | None = None,
        attention_mask: Tensor | None = None,
        namespace: str | None = None,
        model: PreTrainedModel | None = None,
        media: Mapping[str, Any] | None = None,
        inputs_embeds: Float[Tensor, "rows tokens width"] | None = None,
    ) -> None:
        super().__init__(config, block_size=store.block_size)
        self.layers = [
            PrefixLayer(layer.block_size, layer.window) if isinstance(layer, BlockLayer) else layer
            for layer in self.layers
        ]
        self.block_layers = [layer for layer in self.layers if isinstance(layer, PrefixLayer)]
        self._store = store
        self._model = store.model if model is None else model
        self._is_embedded = inputs_embeds is not None
        if inputs_embeds is not None and input_ids is None:
            self._media = None
            self._prompt = embedded_prompt(self._model, inputs_embeds, attention_mask, media or {})
            self._real = torch.ones(self._prompt.shape[:2], dtype=torch.bool)
            beginning = self._prompt[0, :-1]
        elif input_ids is not None and inputs_embeds is None:
            self._prompt = input_ids
            rows, self._real = real_rows(input_ids, attention_mask)
            self._media = read_media(config, input_ids, attention_mask, media or {})
            beginning = common_beginning(rows)
        else:
            raise InputError("a prompt is input_ids or inputs_embeds, one of them")
        self._namespace = namespace
        self._answers_follow = True
        self._rows_follow = True
        # A window counts columns, padding too, so with padding in the middle it would lose sight of tokens.
        in_window = has_window(config) and not bool(self._real.all())
        if in_window:
            beginning = beginning[:0]
        if not self._real[:, : len(beginning) // self.block_size * self.block_size].all():
            raise InputError(
                "what the prompts have in common must stand in the first columns of every row, before any padding; "
                "`store.prepare(inputs)` lays a batch out like that"
            )
        reason = "padding_in_a_window" if in_window else None
        prompt_tokens = int(self._real.sum())
        found = store.find(config, self._model, beginning, namespace, prompt_tokens, reason, self._media)
        self._root = found.root
        self.hold(found.lease)
        self.shared_tokens = found.tokens
        """Tokens at the beginning that were taken from the store."""
        if found.tokens:
            for layer, shared in zip(self.block_layers, found.layers, strict=True):
                keys, values = shared[0]
                pool = BlockPool(keys[None], values[None], self.block_size)
                layer.restore(PrefixTable(shared, BlockTable(pool, 1)))
            token_ids = None if self._is_embedded else beginning[None, : found.tokens].cpu()
            self.carry(token_ids, torch.tensor([found.tokens - 1]))

    # ------------------------------------------------------------------------------------------------- storing

    def commit(self, sequences: Int[Tensor, "rows tokens"]) -> int:
        """Give the store the whole blocks of every text this cache holds that it does not have yet.

        Prompts always; answers where each row of the cache is one of `sequences`, which after beam search it is not,
        and where the prompt was token ids.
        Of several rows, those that end with one token repeated, as `generate` fills up what has ended, are stored
        without the repetition.

        Args:
            sequences: What `generate` returned for this cache and its prompts.

        Returns:
            Tokens stored, for which the store now has their states. 0 if the model has changed since.

        Raises:
            InputError: The sequences are not those of this cache's prompts.
            StateError: The rows of the cache were selected, so it is not known which is which; commit before.
        """
        texts = list(self._texts(sequences))
        tables = [layer.prefix_table() for layer in self.layers if isinstance(layer, PrefixLayer)]
        if self._store.root(self._model, self._namespace, self._media) != self._root:
            return 0

        def states(row: int, columns: Tensor, part: slice) -> list[States]:
            return [table.states_of(row, columns[part]) for table in tables]

        aligned = [(row, *self._aligned(token_ids, columns)) for row, token_ids, columns in texts]
        put = partial(self._store.put, media=self._media)
        return sum(put(self._root, ids, partial(states, row, columns)) for row, ids, columns in aligned)

    def _aligned(self, token_ids: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """A text and its columns as the store keeps them; what fills a block is given the states before it."""
        if self._media is None:
            return token_ids, columns
        last = int(columns[: self._media.tokens][-1])
        return self._media.aligned(token_ids, self.block_size), self._media.aligned(columns, self.block_size, last)

    def _texts(self, sequences: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(row of the cache, token ids, their columns) of each text."""
        prompts, width = self._prompt.shape[:2]
        if self._is_embedded:
            sequences = self._prompt  # what `generate` returned are the ids of the answer alone
        held = min(self.get_seq_length(), sequences.shape[1])
        rows, texts = self.batch_size, sequences.shape[0]
        if not self._rows_follow:
            raise StateError("rows of this cache were selected, so which text each holds is not known: commit before")
        if texts % prompts or held < 1:
            raise InputError(f"{texts} sequences cannot be those of {prompts} prompts in a cache of {held} tokens")
        begin = min(held, width)
        expected = self._prompt[:, :begin].repeat_interleave(texts // prompts, dim=0)
        if not torch.equal(sequences[:, :begin].to(expected.device), expected):
            raise InputError("these sequences do not begin with the prompts this cache was made for")
        # Rows equal in number may still be other continuations: beams are reordered to the very end.
        answers = self._answers_follow and rows == texts
        for text in range(texts) if answers else range(0, texts, texts // prompts):
            row = text if answers else text // (texts // prompts) * (rows // prompts)
            real = self._real[text // (texts // prompts)][:begin].cpu()
            columns = real.nonzero()[:, 0]
            if answers:
                columns = torch.cat([columns, torch.arange(begin, held)])
            token_ids = sequences[text].cpu()[columns]
            # Only a batch goes on after a row has ended, which is then filled up.
            kept = _without_repetition(token_ids, int(real.sum())) if texts > 1 else len(token_ids)
            yield row, token_ids[:kept], columns[:kept]

    # ------------------------------------------------------------------------------------------------- sharing

    def give_up(self, reason: str) -> None:
        """Be empty and count the prompt as missed: it is computed from its first token, and can still be committed.

        Raises:
            StateError: What was found holds images, which generation is not given again.
        """
        if self.shared_tokens:
            if self._media is not None:
                raise StateError(
                    "assisted decoding and prompt look-up feed the whole prompt, but the model is not given its images "
                    "again, since their states are stored; generate without them"
                )
            self._store.withdraw(self.shared_tokens, reason)
        self.reset()

    def fork(self) -> PrefixSharedCache:
        """The same history once more, to be continued in another way; what one row holds is not copied."""
        other = copy.copy(self)
        layers = [layer.fork() if isinstance(layer, PrefixLayer) else copy.deepcopy(layer) for layer in self.layers]
        other.layers = layers
        other.block_layers = [layer for layer in layers if isinstance(layer, PrefixLayer)]
        vars(other).update(_positions=copy.copy(self._positions), _tokens=copy.copy(self._tokens))
        other.hold(self._lease.copy())
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixSharedCache:
        return self.fork()

    def close(self) -> None:
        """Let the store evict what this cache reads. The cache itself goes on working."""
        self._lease.release()
        self._finalizer.detach()

    def __enter__(self) -> PrefixSharedCache:  # noqa: PYI034  (beartype knows no Self in classes it does not decorate)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, lease: Lease) -> None:
        """Let this lease end with the cache."""
        self._lease = lease
        # A cache that is forgotten rather than closed holds nothing either.
        self._finalizer = weakref.finalize(self, lease.release)
        self._finalizer.atexit = False

    # ------------------------------------------------------------------------------------------ transformers' contract

    def reset(self) -> None:
        """Forget the history, shared and own. The cache can be used again, for any batch, as an empty one."""
        super().reset()
        self.shared_tokens = 0
        self.close()

    def activate_past_recording(self) -> None:
        """Called by transformers when assisted decoding begins, which feeds a prompt whole, whatever the cache holds.

        So what was found is given up.
        """
        if self.shared_tokens and self.get_seq_length() == self.shared_tokens:
            self.give_up("assisted_decoding")
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Make row i a copy of old row ``beam_idx[i]`` in every layer; blocks are shared, not copied."""
        self._answers_follow = False
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` in every layer, in that order; they may repeat."""
        self._rows_follow = False
        super().batch_select_indices(indices)


def _without_repetition(token_ids: Tensor, prompt_tokens: int) -> int:
    """How many tokens are left when one that is repeated at the end of an answer counts once."""
    different = (token_ids[prompt_tokens:] != token_ids[-1]).nonzero()
    if not len(token_ids) - prompt_tokens:
        return len(token_ids)
    last = int(different[-1]) + 1 if len(different) else 0
    return min(prompt_tokens + last + 1, len(token_ids))
