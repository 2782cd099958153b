"""The policies by name."""

from __future__ import annotations

import difflib

from ..errors import ConfigError
from .cur import Cur
from .expected_attention import ExpectedAttention
from .h2o import H2O
from .keydiff import KeyDiff
from .knorm import KeyNorm
from .lagkv import LagKV
from .policy import Policy
from .snapkv import SnapKV
from .tova import Tova

POLICIES: dict[str, type[Policy]] = {
    kind.name: kind for kind in (KeyNorm, KeyDiff, LagKV, Cur, SnapKV, Tova, H2O, ExpectedAttention)
}
"""Every policy a cache can name."""


def make_policy(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        ConfigError: There is none.
    """
    if name not in POLICIES:
        close = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(POLICIES)}"
        raise ConfigError(f"no eviction policy is called {name!r}; {hint}")
    return POLICIES[name]()
