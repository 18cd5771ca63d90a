"""Paged key-value caches in any format of qdsl: allocate, store, load, and attention of one query token per sequence."""

from qdsl.kv_cache.attend import attention, attention_reference
from qdsl.kv_cache.cache import CachedRows, CacheFormat, KVCache, allocate
from qdsl.kv_cache.store import load, store, store_reference

__all__ = ["CacheFormat", "CachedRows", "KVCache", "allocate", "attention", "attention_reference", "load", "store",
           "store_reference"]
