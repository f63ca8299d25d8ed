"""hf_paged: PagedAttention for Hugging Face models.

Contract: importing this package makes `model.generate(..., cache_implementation="paged")` work;
`unregister()` puts transformers back. The names below are the public interface.
"""

from .block_manager import BlockManager
from .block_pool import BlockPool
from .cache import PagedCache, PagedLayer
from .config import PagedCacheConfig
from .demo_model import demo_model_path
from .generate import register, unregister
from .stats import CacheStats

__version__ = "0.1.0"

__all__ = [
    "BlockManager",
    "BlockPool",
    "CacheStats",
    "PagedCache",
    "PagedCacheConfig",
    "PagedLayer",
    "__version__",
    "demo_model_path",
    "register",
    "unregister",
]

register()
