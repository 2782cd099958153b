"""The reference's logits on disk, bit for bit: a later run compares with the same ones and need not compute them."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_kvcache.errors import InputError, StorageError
from hf_kvcache.evaluation.models import LoadedModel
from hf_kvcache.evaluation.protocols import Protocol, Scored, stream
from hf_kvcache.whole_file import whole_file

FORMAT = "hf-kvcache-reference/1"


class StoredReference:
    """A folder of logits, one safetensors file a window, in the dtype that the model gave them in.

    A window that is there is read, piece by piece; one that is not is computed and added. The first window is computed
    in any case: that tells whether this run would give the same bits.

    Args:
        folder: Made if missing.
        loaded: The model that is measured now; it may be another one, if it has the same vocabulary.
        protocol: Window and prefill decide what is scored; the chunk moves logits by rounding only.

    Attributes:
        maker: What computed the logits.
        same: Whether this run computes the same bits, as far as windows were computed.

    Raises:
        InputError: The folder holds logits of another vocabulary, or of another prefill.
    """

    def __init__(self, folder: Path, loaded: LoadedModel, protocol: Protocol) -> None:
        self.folder = folder
        self._loaded, self._protocol = loaded, protocol
        self._maker = {
            "model": loaded.name,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "weights": sum(of.numel() for of in loaded.model.parameters()),
        }
        fixed = {
            "format": FORMAT,
            "vocabulary": _vocabulary(loaded),
            "window_tokens": protocol.window_tokens,
            "prefill_tokens": protocol.prefill_tokens,
        }
        manifest = folder / "reference.json"
        if manifest.is_file():
            found = json.loads(manifest.read_text(encoding="utf-8"))
            for name, value in fixed.items():
                if found.get(name) != value:
                    raise InputError(
                        f"the reference in {folder} is of {name} {found.get(name)}, this run is of {name} {value}: "
                        "they cannot be compared. Give another folder, or the same tokenizer and sizes"
                    )
        else:
            found = fixed | self._maker
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(manifest) as scratch:
                scratch.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        self._is_mine = all(found.get(name) == value for name, value in self._maker.items())
        self.maker = f"{found['model']}, {found['dtype']}"
        self.same = True

    def stream(self, cache: Cache | None, window: Int[Tensor, " tokens"], number: int) -> Iterator[Scored]:
        """What `protocols.stream` yields, from the folder where it is there.

        Raises:
            InputError: The window in the folder is of another text, or it is missing and of another model.
            StorageError: The window cannot be written.
        """
        path = self.folder / f"window-{number}.safetensors"
        computed = stream(self._loaded.model, cache, window, self._protocol)
        if path.is_file():
            stored = self._stored(path, window, number)
            return self._compared(stored, computed) if number == 0 else stored
        if not self._is_mine:
            raise InputError(
                f"the reference in {self.folder} was made by {self.maker} and has no window {number}; "
                f"{self._loaded.name} in {self._maker['dtype']} cannot add one. Score fewer tokens, or let that model "
                "score as many"
            )
        return self._added(path, window, computed)

    def _compared(self, stored: Iterator[Scored], computed: Iterator[Scored]) -> Iterator[Scored]:
        for chunk, own in zip(stored, computed, strict=True):
            self.same = self.same and chunk.logits.dtype == own.logits.dtype and torch.equal(chunk.logits, own.logits)
            yield chunk

    def _added(self, path: Path, window: Tensor, computed: Iterator[Scored]) -> Iterator[Scored]:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        logits: Tensor | None = None
        for chunk in computed:
            if logits is None:
                scored = len(window) - 1 - self._protocol.prefill_tokens
                logits = torch.empty(scored, chunk.logits.shape[1], dtype=chunk.logits.dtype)
            begin = chunk.first_position - self._protocol.prefill_tokens - 1
            logits[begin : begin + len(chunk.targets)] = chunk.logits
            yield chunk
        if logits is not None:
            try:
                with whole_file(path) as scratch:
                    save_file({"ids": window.cpu().contiguous(), "logits": logits}, scratch, {"format": FORMAT})
            except (OSError, SafetensorError) as error:
                raise StorageError(
                    f"a window of the reference ({logits.nbytes / 2**20:,.0f} MiB) cannot be written: {error}. Make "
                    "room, or leave the folder out: finished windows are kept, and the same command goes on from them"
                ) from error

    def _stored(self, path: Path, window: Tensor, number: int) -> Iterator[Scored]:
        from safetensors import safe_open

        prefill, device = self._protocol.prefill_tokens, self._loaded.model.device
        with safe_open(path, framework="pt") as file:
            ids: Tensor = file.get_tensor("ids")
            if not torch.equal(ids, window.cpu()):
                raise InputError(
                    f"window {number} of the reference in {self.folder} is of another text: {_difference(ids, window)}"
                )
            rows: Any = file.get_slice("logits")
            for start in range(prefill, len(window) - 1, self._protocol.chunk_tokens):
                stop = min(start + self._protocol.chunk_tokens, len(window) - 1)
                logits: Tensor = rows[start - prefill : stop - prefill]
                yield Scored(logits.to(device), window[start + 1 : stop + 1].to(device), start + 1)


def _difference(ids: Tensor, window: Tensor) -> str:
    if len(ids) != len(window):
        return f"it has {len(ids)} tokens there and {len(window)} here. Score as many tokens of the same text"
    place = int((ids != window.cpu()).nonzero()[0])
    return f"token {place} is {int(ids[place])} there and {int(window[place])} here. Give the text it was made of"


def _vocabulary(loaded: LoadedModel) -> str:
    """Number of logits and a digest of the tokens."""
    tokens = json.dumps(sorted(loaded.tokenizer.get_vocab().items())).encode()
    size = loaded.model.config.get_text_config(decoder=True).vocab_size
    return f"{size} ({hashlib.sha256(tokens).hexdigest()[:12]})"
