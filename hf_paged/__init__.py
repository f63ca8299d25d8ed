"""hf_paged: PagedAttention for Hugging Face models.

Contract: importing this package makes `model.generate(..., cache_implementation="paged")` work;
`unregister()` puts transformers back. The names below are the public interface.
"""

from .batched import release
from .batcher import ContinuousBatcher
from .block_manager import BlockManager
from .block_pool import BlockPool
from .cache import PagedCache, PagedLayer
from .calibration import calibrate_kv_scales
from .config import PagedCacheConfig, SchedulerConfig
from .demo_model import demo_model_path
from .generate import register, unregister
from .kv_scales import KVScales
from .memory import MemoryReport, memory_report
from .packed_metadata import PackingError
from .prefix_cache import BlockEvent
from .request import TokenLogprobs
from .request_output import InvalidatedPrefix, RequestOutput, RequestTimings
from .stats import BatcherStats, CacheStats
from .weights import weights_changed

__version__ = "0.1.0"

__all__ = [
    "BatcherStats",
    "BlockEvent",
    "BlockManager",
    "BlockPool",
    "CacheStats",
    "ContinuousBatcher",
    "InvalidatedPrefix",
    "KVScales",
    "MemoryReport",
    "PackingError",
    "PagedCache",
    "PagedCacheConfig",
    "PagedLayer",
    "RequestOutput",
    "RequestTimings",
    "SchedulerConfig",
    "TokenLogprobs",
    "__version__",
    "calibrate_kv_scales",
    "demo_model_path",
    "memory_report",
    "register",
    "release",
    "unregister",
    "weights_changed",
]

register()
