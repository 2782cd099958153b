"""What a model and its cache need: bytes, capacity, operations, time. Computed before anything is loaded."""

from .capacity import Need, Planned, most_rows, most_tokens
from .compute import Work, model_work, step_flops, total_flops, uniform_work
from .configs import load_plan_config
from .gpus import GPUS, Gpu, find_gpu
from .objects import cache_bytes, cache_groups
from .plan import Plan, make_plan
from .prefix import prefix_reuse
from .presets import PRESETS
from .shapes import ModelShape, observe_model

__all__ = [
    "GPUS",
    "PRESETS",
    "Gpu",
    "ModelShape",
    "Need",
    "Plan",
    "Planned",
    "Work",
    "cache_bytes",
    "cache_groups",
    "find_gpu",
    "load_plan_config",
    "make_plan",
    "model_work",
    "most_rows",
    "most_tokens",
    "observe_model",
    "prefix_reuse",
    "step_flops",
    "total_flops",
    "uniform_work",
]
