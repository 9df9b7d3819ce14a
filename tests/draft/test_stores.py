"""Stores by salt: each finds its own, and all together stay within a bound."""

from __future__ import annotations

from specdec.draft.stores import Stores


def kept(stores: Stores[list[int]], salt: str, n: int) -> None:
    stores.of(salt).extend(range(n))
    stores.grown(salt)


def test_the_least_recently_used_goes_first() -> None:
    stores: Stores[list[int]] = Stores(list, 10)
    kept(stores, "a", 4)
    kept(stores, "b", 4)
    assert stores.find("a") == [0, 1, 2, 3]
    kept(stores, "c", 4)
    assert stores.find("b") is None
    assert stores.find("a") is not None
    assert stores.find("never") is None
    assert len(stores) == 2


def test_one_alone_may_be_larger_and_the_one_that_grew_is_never_forgotten() -> None:
    stores: Stores[list[int]] = Stores(list, 10)
    first = stores.of("a")
    kept(stores, "b", 2)
    first.extend(range(30))
    stores.grown("a")  # the least recently used, but it is what grew
    assert stores.find("b") is None
    assert stores.find("a") is first
    kept(stores, "c", 1)
    assert stores.find("a") is None
    assert stores.values == [[0]]


def test_a_store_that_was_never_told_to_have_grown_may_go() -> None:
    stores: Stores[list[int]] = Stores(list, 3)
    stores.of("a")
    kept(stores, "b", 5)
    assert len(stores) == 1
