"""Which engine a request goes to."""

from __future__ import annotations

from plugin.engines.servers.pool import PrefixRouter, ServerPool


def test_without_a_prefix_the_idlest_is_asked() -> None:
    router = PrefixRouter()
    assert router.choose(None, {"a": 3, "b": 1, "c": 1}) == "b"
    assert router.choose(None, {}) is None


def test_a_group_stays_on_the_engine_that_read_its_prompt() -> None:
    router, loads = PrefixRouter(slack=4), {"a": 0, "b": 0}
    chosen = []
    for seed in range(8):  # two prompts, four responses each, one after the other
        place = router.choose(seed % 2, loads)
        chosen.append(place)
        loads[place] += 1
    assert chosen == ["a", "b"] * 4


def test_a_busy_home_is_left_beyond_the_slack_and_the_new_one_becomes_home() -> None:
    router = PrefixRouter(slack=4)
    assert router.choose("p", {"a": 0, "b": 0}) == "a"
    assert router.choose("p", {"a": 5, "b": 1}) == "a"  # 5 - 1 = 4, not beyond
    assert router.choose("p", {"a": 6, "b": 1}) == "b"
    assert router.choose("p", {"a": 0, "b": 1}) == "b"  # now b holds it, too


def test_an_engine_that_is_gone_or_was_forgotten_is_not_asked() -> None:
    router = PrefixRouter()
    assert router.choose("p", {"a": 0, "b": 0}) == "a"
    assert router.choose("p", {"b": 9}) == "b"
    router.choose("q", {"a": 0, "b": 1})
    router.forget("a")
    assert router.choose("q", {"a": 1, "b": 0}) == "b"  # a new process holds nothing


def test_only_the_prefixes_used_last_are_remembered() -> None:
    router = PrefixRouter(remembered=2)
    for prefix in ("p", "q", "p", "r"):  # q is the oldest
        router.choose(prefix, {"a": 0, "b": 1})
    loads = {"a": 1, "b": 0}
    assert [router.choose(prefix, loads) for prefix in ("p", "r")] == ["a", "a"]
    assert router.choose("q", loads) == "b"


def test_servers_are_picked_in_the_same_way_and_a_troubled_one_is_avoided() -> None:
    pool = ServerPool(["http://a", "http://b"])
    for server in pool.servers:
        pool.put_in(server, "v0")
    first = pool.pick(prefix="p")
    first.in_flight = 3
    assert pool.pick(prefix="p") is first and pool.pick(prefix="q") is not first
    assert pool.pick(avoid=first, prefix="p") is not first
    pool.take_out(first, "gone")
    assert pool.pick(prefix="p") is not first
