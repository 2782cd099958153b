"""What a user chooses about where the history lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import ConfigError, InputError
from ..units import parse_bytes
from .disk import DiskTier
from .host import HostTier
from .tier import Tier

# What would read as part of a specification, see `hf_kvcache.spec`.
_NOT_IN_FOLDERS = ",+="


@dataclass(frozen=True)
class Residency:
    """How much of the history stays where the layers run, and where the rest goes.

    Raises:
        ConfigError: Neither a size nor a tier.
        StorageError: A folder in which no file can be made.
    """

    term: ClassVar[str] = "offloaded"

    device_budget: str | int
    """Bytes on each device, as a number or as in "512MiB"."""
    residency: str
    """"host", "disk:FOLDER", or a chain with the most that each may hold: "host:4GiB+disk:FOLDER:100GiB"."""
    tiers: tuple[Tier, ...] = field(init=False, compare=False)
    """From the first to the last choice."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", tuple(_tier(text) for text in self.residency.split("+")))
        if self.budget_bytes < 1:
            raise ConfigError(f"device_budget must be at least one block, got {self.device_budget} bytes")

    def options(self) -> dict[str, Any]:
        """What it was built with, as the options of a specification."""
        return {"device_budget": self.device_budget, "residency": self.residency}

    @property
    def budget_bytes(self) -> int:
        """The budget as a number."""
        if isinstance(self.device_budget, int):
            return self.device_budget
        try:
            return parse_bytes(self.device_budget)
        except InputError as error:
            raise ConfigError(f"device_budget: {error}") from None


def _tier(text: str) -> Tier:
    kind, _, rest = text.partition(":")
    if kind == "host":
        return HostTier(_size(text, rest) if rest else None)
    if kind != "disk" or not rest:
        raise ConfigError(f"residency is host, disk:FOLDER or a chain as in host:4GiB+disk:FOLDER:100GiB, got {text!r}")
    folder, colon, size = rest.rpartition(":")
    if not colon or not size[:1].isdigit():
        folder, size = rest, ""
    if any(character in folder for character in _NOT_IN_FOLDERS):
        raise ConfigError(f"a folder for history must not have any of {_NOT_IN_FOLDERS} in its name, got {folder!r}")
    return DiskTier(folder, _size(text, size) if size else None)


def _size(text: str, size: str) -> int:
    try:
        return parse_bytes(size)
    except InputError as error:
        raise ConfigError(f"residency {text!r}: {error}") from None
