"""What of the history is kept: one file a policy."""

from .choice import Retention
from .demoting_layer import DemotingLayer
from .demoting_table import DemotingTable
from .evicted_table import EvictedTable
from .evicting_layer import EvictingLayer
from .eviction import Eviction
from .policies import POLICIES
from .policy import Held, Policy
from .quest import Quest
from .quest_layer import QuestLayer
from .quest_table import QuestTable
from .ragged_table import RaggedTable
from .sinks import SinkTable
from .window import Window
from .window_layer import WindowLayer

__all__ = [
    "POLICIES",
    "DemotingLayer",
    "DemotingTable",
    "EvictedTable",
    "EvictingLayer",
    "Eviction",
    "Held",
    "Policy",
    "Quest",
    "QuestLayer",
    "QuestTable",
    "RaggedTable",
    "Retention",
    "SinkTable",
    "Window",
    "WindowLayer",
]
