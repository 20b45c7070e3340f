"""Site states of examples: raw tokens through the prefix, or the cache of a frozen one."""

from gar.features._cache import Features
from gar.features.sources import CachedSource, Part, RawSource, Source, make_source, make_sources, tokenized

__all__ = [
    "CachedSource",
    "Features",
    "Part",
    "RawSource",
    "Source",
    "make_source",
    "make_sources",
    "tokenized",
]
