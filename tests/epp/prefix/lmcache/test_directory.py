import pytest

from epp.prefix.lmcache.directory import L2, Directory, Held, loads


def replace(directory: Directory, chunks: list[tuple[int, int]]) -> None:
    directory.begin()
    directory.stage(chunks)
    directory.finish()


@pytest.fixture
def directory() -> Directory:
    return Directory(1000)


def test_runs_end_where_holders_change_and_stop_where_nobody_holds(directory: Directory) -> None:
    a, b = directory.bit("a"), directory.bit("b")
    directory.add([(1, a | L2), (2, a | L2), (3, b | L2), (4, L2), (6, a)])
    assert directory.held([1, 2, 3, 4, 5, 6]) == [Held(2, a | L2), Held(3, b | L2), Held(4, L2)]
    assert directory.held([1, 2]) == [Held(2, a | L2)]
    assert directory.held([5, 1]) == directory.held([]) == []


def test_what_is_added_joins_what_is_there(directory: Directory) -> None:
    a, b = directory.bit("a"), directory.bit("b")
    directory.add([(1, a)])
    directory.add([(1, b), (2, L2)])
    assert directory.held([1, 2]) == [Held(1, a | b), Held(2, L2)]
    replace(directory, [(2, a)])
    assert (directory.held([1]), directory.held([2]), len(directory)) == ([], [Held(1, a)], 1)


def test_l1_is_loaded_where_the_node_has_it_and_l2_elsewhere(directory: Directory) -> None:
    a, b = directory.bit("a"), directory.bit("b")
    directory.add([(1, a | L2), (2, a | L2), (3, L2)])
    runs = directory.held([1, 2, 3])
    assert loads(runs, a, 0, 16) == (32, 16)
    assert loads(runs, b, 0, 16) == (0, 48)
    assert loads(runs, 0, 0, 16) == (0, 48)


@pytest.mark.parametrize(
    ("start", "loaded"), [(0, (20, 20)), (10, (10, 20)), (16, (4, 20)), (30, (0, 10)), (40, (0, 0)), (99, (0, 0))]
)
def test_what_the_device_holds_is_not_loaded(directory: Directory, start: int, loaded: tuple[int, int]) -> None:
    a = directory.bit("a")
    directory.add([(1, a), (2, a), (3, L2), (4, L2)])
    assert loads(directory.held([1, 2, 3, 4]), a, start, 10) == loaded


def test_nothing_is_loaded_from_behind_a_gap(directory: Directory) -> None:
    a, b = directory.bit("a"), directory.bit("b")
    directory.add([(1, L2), (2, b), (3, a | L2)])
    assert loads(directory.held([1, 2, 3]), a, 0, 8) == (0, 8)
    replace(directory, [(2, a), (3, a)])
    assert loads(directory.held([1, 2, 3]), a, 8, 8) == (0, 0)


def test_it_forgets_at_its_limit_what_is_new() -> None:
    directory = Directory(2)
    directory.add([(1, L2), (2, L2), (3, L2)])
    assert (len(directory), directory.left_out, directory.held([3])) == (2, 1, [])
    directory.add([(1, directory.bit("a"))])
    assert directory.held([1]) == [Held(1, L2 | directory.bit("a"))]


def test_what_was_asked_for_has_its_own_room_and_lasts_until_all_is_read() -> None:
    directory = Directory(16)
    directory.add((name, L2) for name in range(16))
    directory.put([(100, L2), (101, L2)])
    assert directory.held([0, 100, 101]) == [Held(3, L2)]
    directory.put([(102, L2), (100, L2)])
    assert [bool(directory.held([name])) for name in (100, 101, 102)] == [True, False, True]
    replace(directory, [(100, directory.bit("a"))])
    assert (directory.held([100]), directory.held([102])) == ([Held(1, directory.bit("a"))], [])


def test_instances_come_and_go_and_their_bits_are_used_again(directory: Directory) -> None:
    """Nodes of a cluster that grows and shrinks for ever, one of which stays."""
    stays = directory.bit("stays")
    for day in range(100):
        names = ["stays", *(f"node-{day}-{i}" for i in range(100))]
        directory.begin()
        directory.stage((i, directory.bit(name)) for i, name in enumerate(names))
        directory.finish()
        assert directory.bit_if_any("stays") == stays
        assert len({directory.bit_if_any(name) for name in names}) == 101
        assert max(directory.bit_if_any(name) for name in names).bit_length() <= 203
    assert directory.bit_if_any("node-0-0") == 0


def test_to_ask_who_holds_something_makes_nobody_known(directory: Directory) -> None:
    for i in range(10_000):
        directory.bit_if_any(f"node-{i}")
    assert directory.bit("a") == 2


def test_instances_keep_their_bits_until_it_is_cleared(directory: Directory) -> None:
    a = directory.bit("a")
    directory.add([(1, a)])
    assert directory.bit("a") == a != directory.bit("b")
    directory.clear()
    assert (len(directory), directory.held([1])) == (0, [])


def test_too_many_instances_are_not_reported_apart(directory: Directory) -> None:
    bits = [directory.bit(str(number)) for number in range(5000)]
    assert bits[-1] == 0
    assert len(set(bits[:4096])) == 4096
