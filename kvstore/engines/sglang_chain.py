"""Which block of the store a page of SGLang's is: by the page's hash, and where it stands in a chain.

SGLang names a page by a hash of 256 bits over its tokens, all before it, and what keeps requests apart
(salt, `extra_key`). That hash stands in for token ids. A page's block is named as any other: from its
parent's name. When SGLang stores pages it says what stands before them. When it looks for some, release
0.5.23 often does not: it leaves out the pages of the last node that it holds itself
(`get_prefix_hash_values` begins at the node's parent). Those were stored or read through here before,
so the pages seen last are tried as parents.

Pages for which nothing says what stands before them are stored alone: blocks without a parent.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from kvsnap.formats.extras import PAGE_HASH, page_hash_words
from kvsnap.formats.names import ZERO_PARENT, block_name
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.wanted import Wanted

WORDS = 8
"""Of a page's hash, as token ids: a page's place in a chain is counted in them."""
MOST_KNOWN = 16384
"""Pages whose place is remembered: about 10 MB."""
MOST_TRIED = 512
"""Parents that are tried for a page whose parent nobody names, so for every prompt that is new: about
1.4 ms, in a thread of SGLang's that waits for storage anyhow."""

Stored = Callable[[Sequence[bytes]], AbstractSet[bytes]]
"""Those of some names that are stored."""


def is_page_hash(key: str) -> bool:
    """Whether a key is a page's own hash and no more: SGLang appends to it for other pools, and with
    `--hicache-storage-key-scheme unified`."""
    return len(key) == 64 and all(digit in "0123456789abcdef" for digit in key)


def block_of(root_key: bytes, key: str, parent: Wanted | None) -> Wanted:
    """The block of a page that stands behind `parent`; None: behind nothing, or nobody knows."""
    words = page_hash_words(key)
    before, start = (parent.name, parent.stop) if parent is not None else (ZERO_PARENT, 0)
    return Wanted(block_name(root_key, before, words, PAGE_HASH), before, start, words, PAGE_HASH)


def chain_of(root_key: bytes, keys: Sequence[str], parent: Wanted | None) -> Iterator[Wanted]:
    """The blocks of pages that follow one another."""
    for key in keys:
        parent = block_of(root_key, key, parent)
        yield parent


class Places:
    """Where pages stand, of one root. For any number of threads."""

    def __init__(self, root_key: bytes, stored: Stored) -> None:
        self._root_key, self._stored = root_key, stored
        self._known: OrderedDict[str, Wanted] = OrderedDict()
        self._lock = threading.Lock()

    def to_store(self, prefix: Sequence[str] | None, keys: Sequence[str]) -> list[Wanted]:
        """As what pages are stored: behind `prefix`, or alone where SGLang does not say (None)."""
        if prefix is None:
            found = [block_of(self._root_key, key, None) for key in keys]
        else:
            found = list(chain_of(self._root_key, keys, self._end(prefix)))
        self.remember(keys, found)
        return found

    def find(self, prefix: Sequence[str] | None, keys: Sequence[str]) -> list[Wanted]:
        """The blocks of as many of the first pages as are stored; as far as the index tells."""
        found: list[Wanted] = []
        parent = self._end(prefix or ())
        while len(found) < len(keys):
            run = self._run(keys[len(found) :], parent)
            if not run:
                break
            found += run
            parent = run[-1]
        self.remember(keys, found)
        return found

    def behind(
        self, prefix: Sequence[str] | None, found: Sequence[Wanted], keys: Sequence[str]
    ) -> list[Wanted]:
        """As what the pages after those found would be stored, if they were somewhere."""
        parent = found[-1] if found else self._end(prefix or ())
        return list(chain_of(self._root_key, keys[len(found) :], parent))

    def remember(self, keys: Sequence[str], blocks: Sequence[Wanted]) -> None:
        with self._lock:
            for key, block in zip(keys, blocks, strict=False):
                self._known[key] = block
                self._known.move_to_end(key)
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def _end(self, prefix: Sequence[str]) -> Wanted | None:
        """The block of a prefix's last page; from the last one on whose place is known."""
        parent, start = None, 0
        with self._lock:
            for number in range(len(prefix) - 1, -1, -1):
                if prefix[number] in self._known:
                    parent, start = self._known[prefix[number]], number + 1
                    break
        for block in chain_of(self._root_key, prefix[start:], parent):
            parent = block
        return parent

    def _run(self, keys: Sequence[str], parent: Wanted | None) -> list[Wanted]:
        """Blocks that stand behind one another, from the first page on, as many as are stored."""
        for first in self._places(keys[0], parent):
            if not self._stored([first.name]):
                continue
            chain = [first]
            more = chain_of(self._root_key, keys[1:], first)

            def holds(
                number: int, chain: list[Wanted] = chain, more: Iterator[Wanted] = more
            ) -> bool:
                chain.extend(itertools.islice(more, max(0, number + 1 - len(chain))))
                return bool(self._stored([chain[number].name]))

            return chain[: gallop(holds, len(keys))]
        return []

    def _places(self, key: str, parent: Wanted | None) -> Iterator[Wanted]:
        """Where a page may stand, the likeliest first."""
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            yield known
        yield block_of(self._root_key, key, parent)
        yield from self._tried(key)
        if parent is not None:
            yield block_of(self._root_key, key, None)

    def _tried(self, key: str) -> Iterator[Wanted]:
        """Behind a page that was seen of late."""
        with self._lock:
            seen = list(itertools.islice(reversed(self._known.values()), MOST_TRIED))
        words = page_hash_words(key)
        names = [block_name(self._root_key, page.name, words, PAGE_HASH) for page in seen]
        there = self._stored(names)
        for page, name in zip(seen, names, strict=True):
            if name in there:
                yield block_of(self._root_key, key, page)
